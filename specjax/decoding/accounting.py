"""What a round is on record for: which nodes were judged, their overlap, and log-probabilities of what was emitted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.protocol import Proposal, Verdict, node_laws
from specjax.verifiers.round_stream import drafted_probabilities


def judged(
    p: Float[Array, "B M V"], proposal: Proposal, verdict: Verdict
) -> tuple[Bool[Array, "B D"], Float[Array, "B D"]]:
    """Per depth, whether a valid node hung on the accepted path there, and Σ min(p, q) at the first that did.

    That first one is what a chain would have tried. With a one-hot q the overlap is p of its token.
    """
    depth = proposal.topology.max_depth
    reached = jnp.arange(depth) <= verdict.num_accepted[:, None]
    if proposal.topology.is_chain:
        attempted = proposal.valid & reached
        return attempted, jnp.where(attempted, _overlap(p, proposal), 0)
    above = jnp.pad(verdict.path, ((0, 0), (1, 0)))[:, :depth]
    hangs = proposal.valid[:, None] & (proposal.node_parents[:, None] == above[..., None])  # [B, D, N]
    attempted = reached & jnp.any(hangs, -1)
    first = jnp.argmax(hangs, -1)
    return attempted, jnp.where(attempted, jnp.take_along_axis(_overlap(p, proposal), first, 1), 0)


def _overlap(p, proposal):
    if proposal.law is None:
        return drafted_probabilities(p, proposal)[0]
    return jnp.sum(jnp.minimum(node_laws(p, proposal), proposal.law), -1)


def log_probabilities(
    logits: Float[Array, "B M V"], sources: Int[Array, "B D1"], tokens: Int[Array, "B D1"]
) -> Float[Array, "B D1"]:
    """The target's log-softmax, at temperature 1 and without filters, of each token at its source node."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    total = jax.nn.logsumexp(logits, -1)
    flat = logits.reshape(logits.shape[0], -1)
    chosen = jnp.take_along_axis(flat, sources * logits.shape[-1] + tokens, 1)
    return chosen - jnp.take_along_axis(total, sources, 1)
