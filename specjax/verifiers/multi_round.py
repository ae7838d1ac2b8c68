"""Multi-round rejection: the candidates of a node are judged one after the other, each by what the others left."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal
from specjax.verifiers.chain import ANY_SIBLINGS
from specjax.verifiers.round_stream import Arithmetic, verify_round
from specjax.verifiers.tree_residual import peel, residual_behind
from specjax.verifiers.tree_walk import first_successes


@dataclasses.dataclass(frozen=True)
class MultiRoundRule:
    """The token rule on a tree: a child x is accepted with probability min(1, R(x) / q(x)), R being p at first.

    A child that fails leaves R <- norm(max(R - q, 0)) for its next sibling and, behind the last one, for the next
    token. q is the law that the child was really drawn from, so siblings may be drawn with or without replacement, or
    be chosen and tried in order (q one-hot). On a chain it is the token rule.

    References:
        Miao et al., SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
        Verification, 2023 (arXiv 2305.09781), algorithm 2.
        Jeon et al., Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement, 2024
        (arXiv 2402.14160), recursive rejection sampling.
    """

    name: ClassVar[str] = "multi_round"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds R(x) / q(x) and what is left behind each node."""
        return peel(p, proposal, joint=False)

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B D"],
    ) -> Float[Array, "B V"]:
        """R behind the path's last node: p if it had no candidates."""
        return residual_behind(p, arithmetic, num_accepted, path)

    decide = staticmethod(first_successes)
    verify = verify_round
