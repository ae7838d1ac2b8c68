"""The token rule: each drafted token is judged on its own."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal
from specjax.verifiers.chain import ANY_SIBLINGS
from specjax.verifiers.round_stream import (
    Arithmetic,
    drafted_probabilities,
    first_rejection,
    ratio,
    residual_law,
    verify_round,
)


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Accepts x with probability min(1, p(x) / q(x)); the first failure ends the run.

    The next token comes from norm(max(p - q, 0)) after a failure and from p after a full run. Given that a position is
    reached, its token is accepted with probability Σ min(p, q), the most that any rule can reach at one position.

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023 (arXiv 2211.17192).
        Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, 2023 (arXiv 2302.01318).
    """

    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds p(x) / q(x)."""
        return Arithmetic(accept=ratio(*drafted_probabilities(p, proposal)))

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B N"],
    ) -> Float[Array, "B V"]:
        """norm(max(p - q, 0)), or p after a full run."""
        return residual_law(p, proposal, num_accepted)

    decide = staticmethod(first_rejection)
    verify = verify_round
