"""Everything that proposes tokens, by the name that configs use."""

from specjax.drafters.empty import Empty
from specjax.drafters.independent import Independent

DRAFTERS = {"empty": Empty, "independent": Independent}

__all__ = ["DRAFTERS", "Empty", "Independent"]
