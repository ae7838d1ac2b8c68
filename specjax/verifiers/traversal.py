"""Traversal verification: the tree is judged from the leaves up, whole paths at a time."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal
from specjax.verifiers.chain import ANY_SIBLINGS
from specjax.verifiers.round_stream import Arithmetic, verify_round
from specjax.verifiers.tree_residual import peel, residual_behind
from specjax.verifiers.tree_walk import deepest, first_siblings, in_subtree, path_to, whole_paths


@dataclasses.dataclass(frozen=True)
class TraversalRule:
    """The block rule on a tree: nodes are tried in post-order, and the first success is kept with its whole path.

    A node's weight w begins as min(1, w_v R_v(x) / q(x)), v being its parent. It is the probability that something in
    the node's subtree is kept, given that the walk gets there: a child's subtree takes Σ min(q, w R) of it and leaves,
    when it failed, w <- r / (r + 1 - w) and R <- max(w R - q, 0) / r with r = Σ max(w R - q, 0). What w is after the
    last child is the threshold of the node's own coin; the root always succeeds. On a chain it is the block rule.

    The coins of nodes that were not kept have influenced what was, so they must never be tossed again: round stream.

    Reference:
        Weng et al., Traversal Verification for Speculative Tree Decoding, 2025 (arXiv 2505.12398).
    """

    name: ClassVar[str] = "traversal"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Weights, which are the thresholds, and what is left behind each node."""
        return peel(p, proposal, joint=True)

    def decide(
        self, arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
    ) -> tuple[Int[Array, "B"], Int[Array, "B D"]]:
        """The first success in post-order: down from the root, to the first child with a success in its subtree."""
        success = proposal.valid & (uniforms < arithmetic.accept)
        chosen = first_siblings(in_subtree(success, proposal), proposal)
        return path_to(deepest(whole_paths(chosen, proposal), proposal), proposal)

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

    verify = verify_round
