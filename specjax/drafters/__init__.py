"""Everything that proposes tokens, by the name that configs use."""

from specjax.drafters.adaptive import Adaptive
from specjax.drafters.block import BlockDrafter
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle_dynamic import EagleDynamic
from specjax.drafters.eagle_suffix import EagleSuffix
from specjax.drafters.eagle_tree import EagleTree
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.empty import Empty
from specjax.drafters.hydra import Hydra
from specjax.drafters.independent import Independent
from specjax.drafters.independent_tree import IndependentTree
from specjax.drafters.lookahead import Lookahead
from specjax.drafters.medusa import Medusa
from specjax.drafters.ngram import NGram
from specjax.drafters.suffix import Suffix

DRAFTERS = {
    "adaptive": Adaptive,
    "block": BlockDrafter,
    "eagle": Eagle,
    "eagle_dynamic": EagleDynamic,
    "eagle_suffix": EagleSuffix,
    "eagle_tree": EagleTree,
    "early_exit": EarlyExit,
    "empty": Empty,
    "hydra": Hydra,
    "independent": Independent,
    "independent_tree": IndependentTree,
    "lookahead": Lookahead,
    "medusa": Medusa,
    "ngram": NGram,
    "suffix": Suffix,
}

__all__ = [
    "DRAFTERS",
    "Adaptive",
    "BlockDrafter",
    "Eagle",
    "EagleDynamic",
    "EagleSuffix",
    "EagleTree",
    "EarlyExit",
    "Empty",
    "Hydra",
    "Independent",
    "IndependentTree",
    "Lookahead",
    "Medusa",
    "NGram",
    "Suffix",
]
