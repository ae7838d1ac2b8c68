"""What is left of the target's law behind each node after its children failed, one child at a time.

    node i with parent v:   h_i = w_v R_v(x_i) / q_i(x_i)        threshold of its coin
                            R_v <- norm(max(w_v R_v - q_i, 0))   what the next sibling is judged by

R begins as p. With the weights w fixed at 1 this is multi-round rejection; traversal verification carries them along.
Every node touches one row [V] of R per batch row, so the whole costs O(N V). R is updated in place: rows are read by a
gather and written by a scatter, even where all batch rows share one tree (a dynamic slice of axis 1 makes XLA copy R).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.protocol import Proposal
from specjax.verifiers.block import weight_after_failure
from specjax.verifiers.chain import target_law
from specjax.verifiers.round_stream import Arithmetic, drafted_probabilities, normalised, ratio
from specjax.verifiers.tree_walk import last_node


def peel(p: Float[Array, "B M V"], proposal: Proposal, *, joint: bool) -> Arithmetic:
    """Thresholds, weights and residuals; invalid nodes are passed over.

    Args:
        p: target laws of the root and the N nodes (M = N + 1).
        proposal: q_i is the law that node i was really drawn from; without replacement, given its earlier siblings.
        joint: carry the weights: a node begins with w_i = min(1, h_i), and a failed child leaves its parent
            r / (r + 1 - w_v), r being the mass of max(w_v R_v - q_i, 0). If not, they are 1 throughout.
    """
    _, q_x = drafted_probabilities(p, proposal)
    batch, nodes, vocab = *proposal.tokens.shape, p.shape[-1]
    start = jnp.zeros_like(q_x), jnp.ones((batch, nodes + 1), q_x.dtype), p.astype(q_x.dtype)
    if not nodes:
        return Arithmetic(*start)
    parents = jnp.broadcast_to(proposal.node_parents, (batch, nodes))
    tokens = jnp.clip(proposal.tokens, 0, vocab - 1)
    ids, rows = jnp.arange(vocab, dtype=tokens.dtype), jnp.arange(batch)

    def node(i, carry):
        accept, weight, residual = carry
        parent, token, valid, q = (_column(x, i) for x in (parents, tokens, proposal.valid, q_x))
        old_weight, old = weight[rows, parent], residual[rows, parent]
        scaled = old_weight[:, None] * old if joint else old
        h = jnp.where(valid, ratio(jnp.take_along_axis(scaled, token[:, None], 1)[:, 0], q), 0)
        if proposal.law is None:
            left = jnp.where(ids == token[:, None], 0, scaled)
        else:
            left = jnp.maximum(scaled - _column(proposal.law, i), 0)
        mass = jnp.sum(left, -1)
        new = left / jnp.where(mass > 0, mass, 1)[:, None]
        residual = residual.at[rows, parent].set(jnp.where(valid[:, None], new, old))
        if joint:
            new_weight = jnp.where(valid, weight_after_failure(old_weight, mass), old_weight)
            weight = weight.at[rows, parent].set(new_weight).at[:, i + 1].set(jnp.minimum(1, h))
        return accept.at[:, i].set(h), weight, residual

    accept, weight, residual = jax.lax.fori_loop(0, nodes, node, start)
    return Arithmetic(accept=weight[:, 1:] if joint else accept, weight=weight, residual=residual)


def residual_behind(
    p: Float[Array, "B M V"],
    arithmetic: Arithmetic,
    num_accepted: Int[Array, "B"],
    path: Int[Array, "B D"],
) -> Float[Array, "B V"]:
    """The residual at the end of the accepted path; p where nothing is left of it (p = q up to rounding)."""
    node = last_node(num_accepted, path)
    return normalised(target_law(arithmetic.residual, node), target_law(p, node).astype(arithmetic.residual.dtype))


def _column(values, i):
    return jax.lax.dynamic_index_in_dim(values, i, 1, keepdims=False)
