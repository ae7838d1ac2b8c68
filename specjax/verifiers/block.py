"""The block rule: the drafted tokens are judged together."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal
from specjax.verifiers.chain import ANY_SIBLINGS, chain_path
from specjax.verifiers.round_stream import Arithmetic, drafted_probabilities, ratio, residual_law, verify_round


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """Keeps the longest prefix of the draft whose own coin succeeds; earlier failures do not end it.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the coin of node i succeeds with probability

        h_i = r_i / (r_i + 1 - w_i),    r_i = Σ_v max(w_i p_i(v) - q_{i+1}(v), 0),

    which is w_i at the last valid node, where q is 0. Behind the kept prefix of length n the next token comes from
    norm(max(w_n p_n - q_{n+1}, 0)). In expectation it keeps at least as many tokens as the token rule, for any p and q.

    The coins of tokens that were not kept have influenced what was, so they must never be tossed again: round stream.

    Reference:
        Sun et al., Block Verification Accelerates Speculative Decoding, 2024 (arXiv 2403.10444).
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds h and weights w."""
        p_x, q_x = drafted_probabilities(p, proposal)
        weights = [jnp.ones_like(p_x, shape=p_x.shape[:1])]
        for i in range(proposal.topology.num_nodes):
            weights.append(jnp.minimum(1, ratio(weights[-1] * p_x[:, i], q_x[:, i])))
        weight = jnp.stack(weights, 1)
        inner, last = weight[:, 1:-1], weight[:, 1:][:, -1:]
        h = weight_after_failure(inner, _residual_mass(inner, p, proposal))
        h = jnp.where(proposal.valid[:, 1:], h, inner)
        accept = jnp.where(proposal.valid, jnp.concatenate([h, last], 1), 0)
        return Arithmetic(accept=accept, weight=weight)

    def decide(
        self, arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
    ) -> tuple[Int[Array, "B"], Int[Array, "B N"]]:
        """The prefix that ends at the last success."""
        path = chain_path(proposal)
        return jnp.max(jnp.where(uniforms < arithmetic.accept, path, 0), -1, initial=0), path

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B N"],
    ) -> Float[Array, "B V"]:
        """norm(max(w p - q, 0)), or p after the last valid node."""
        return residual_law(p, proposal, num_accepted, arithmetic.weight)

    verify = verify_round


def weight_after_failure(w: Float[Array, "*B"], r: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """r / (r + 1 - w): the weight left to a prefix of weight w when the next draft failed, r being the residual's mass.

    w = 1 and r = 0, that is p = q from here on: nothing to correct, the prefix is kept for certain.
    """
    denominator = r + (1 - w)
    some = denominator > 0
    return jnp.where(some, r / jnp.where(some, denominator, 1), 1)


def _residual_mass(w, p, proposal):
    """Σ_v max(w_i p_i(v) - q_{i+1}(v), 0) for the nodes i = 1..N-1; a fused reduction, no [B, N, V] array is kept."""
    p_i = p[:, 1:-1]
    if proposal.law is None:
        # q is one-hot and w p <= 1, so only the next draft's own term vanishes.
        ids = jax.lax.broadcasted_iota(proposal.tokens.dtype, p_i.shape, 2)
        return w * jnp.sum(jnp.where(ids == proposal.tokens[:, 1:, None], 0, p_i), -1)
    return jnp.sum(jnp.maximum(w[..., None] * p_i - proposal.law[:, 1:], 0), -1)
