"""Greedy exact match: the rule for temperature 0, where no coin is needed."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from specjax.keys import Noise, Stream
from specjax.protocol import Proposal, Verdict
from specjax.sampling import first_max
from specjax.verifiers.chain import ANY_SIBLINGS
from specjax.verifiers.exact_match import follow


@dataclasses.dataclass(frozen=True)
class GreedyRule:
    """Accepts the path of the target's most probable tokens; the next token is the target's behind it.

    Lossless only for one-hot target laws (temperature 0), whatever law the drafts came from.
    """

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def verify(self, p: Float[Array, "B M V"], proposal: Proposal, noise: Noise) -> Verdict:
        """The verdict for target laws p of the root and the N nodes (M = N + 1); `noise` is not used."""
        return follow(first_max(p), proposal)
