"""Rules that decide which drafted tokens are kept: one file per rule, all listed in `VERIFIERS`.

A rule is a frozen dataclass that satisfies `specjax.protocol.Verifier`; those on the round stream are made of the three
parts in `round_stream.py`. `python -m specjax.verifiers.audit` states the exact law of each.
"""

from specjax.verifiers.block import BlockRule
from specjax.verifiers.coupled import CoupledRule
from specjax.verifiers.greedy import GreedyRule
from specjax.verifiers.k_sequential import KSequentialRule
from specjax.verifiers.lossy import LossyFixedAcceptance, LossyResampleFromTarget
from specjax.verifiers.multi_round import MultiRoundRule
from specjax.verifiers.token import TokenRule
from specjax.verifiers.traversal import TraversalRule
from specjax.verifiers.typical import LossyTypical

VERIFIERS = {
    "token": TokenRule,
    "block": BlockRule,
    "multi_round": MultiRoundRule,
    "traversal": TraversalRule,
    "k_sequential": KSequentialRule,
    "coupled": CoupledRule,
    "greedy": GreedyRule,
    "lossy_fixed_acceptance": LossyFixedAcceptance,
    "lossy_resample_from_target": LossyResampleFromTarget,
    "lossy_typical": LossyTypical,
}
