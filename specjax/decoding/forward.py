"""The one padded forward of the target over the pending token and all nodes of a proposal."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.transformer import apply
from specjax.protocol import Proposal


def target_forward(
    config: TransformerConfig,
    params,
    pending: Int[Array, "B"],
    proposal: Proposal,
    cache: KVCache,
    feature_layers: tuple[int, ...] = (),
    width: int | None = None,
):
    """Logits [B, N + 1, V], cache and features [B, N + 1, F] of the root and the nodes.

    Args:
        config, params: of the target.
        pending: [B] tokens of the root.
        proposal: where it carries hidden states, the forward begins behind the layers that gave them.
        cache: rolled back to the root's slot; comes back with one more slot used per node.
        feature_layers: whose outputs are returned.
        width: run the root and the first `width - 1` nodes only (default: all).
    """
    width = proposal.topology.num_nodes + 1 if width is None else width
    options = {}
    if not proposal.topology.is_chain:
        options["positions"] = cache.length[:, None] + jnp.asarray(proposal.node_depths)[:, :width]
        options["mask"] = jnp.asarray(proposal.node_ancestors)[:, :width, :width]
    if proposal.hidden is not None:
        options["hidden"] = proposal.hidden[:, :width]
        options["layers"] = (proposal.first_layer, config.num_layers)
    # An invalid node may hold any id. Embedded unclipped it would be NaN, and one NaN in the cache spoils its row.
    drafted = jnp.clip(proposal.tokens[:, : width - 1], 0, config.vocab_size - 1)
    nodes = jnp.concatenate([pending[:, None], drafted], 1)
    return apply(config, params, nodes, cache, feature_layers=feature_layers, **options)


def target_forward_in_widths(
    config: TransformerConfig,
    params,
    pending: Int[Array, "B"],
    proposal: Proposal,
    cache: KVCache,
    feature_layers: tuple[int, ...],
    widths: tuple[int, ...],
):
    """`target_forward` in the first of the `widths` that holds every valid node; what lies behind it is zeros.

    Parents come before their children, so the first nodes are a tree of their own. Each width is a `while_loop` of at
    most one trip: a `cond` would copy the cache that it carries.
    """
    arguments = config, params, pending, proposal
    if len(widths) == 1:
        return target_forward(*arguments, cache, feature_layers)
    nodes = jnp.arange(1, proposal.topology.num_nodes + 1)
    needed = 1 + jnp.max(jnp.where(proposal.valid, nodes, 0), initial=0)
    shapes = jax.eval_shape(lambda cache: target_forward(*arguments, cache, feature_layers), cache)
    logits, _, features = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], None, shapes[2]))
    carry = jnp.bool_(False), logits, cache, features
    for width in widths:

        def run(carry, width=width):
            _, logits, cache, features = carry
            new_logits, new_cache, new_features = target_forward(*arguments, cache, feature_layers, width)
            fill = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, 0, 1)  # noqa: E731
            features = None if features is None else fill(features, new_features)
            return jnp.bool_(True), fill(logits, new_logits), new_cache.rollback(cache.length), features

        carry = jax.lax.while_loop(lambda carry, width=width: ~carry[0] & (needed <= width), run, carry)
    return carry[1:]
