"""Causal attention with grouped key-value heads, over a cache or over the sequence itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.cache import write
from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_rms_norm
from specjax.models.linear import product
from specjax.models.positions import rotate


class Attention(nn.Module):
    """Multi-head or grouped-query attention.

    Attributes:
        config: of the model.
        sliding: whether this layer sees the config's sliding window only.
    """

    config: TransformerConfig
    sliding: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], cached, length: Int[Array, "B"], positions: Int[Array, "B T"], mask):
        """Attend, after writing the new keys and values behind the `length` cached ones (`cached`: a pair, or None).

        Returns:
            (output [B, T, D], the written (keys, values) or None)
        """
        c = self.config
        groups = c.num_heads // c.num_kv_heads

        def project(heads, name):
            out = make_dense(c, heads * c.head_dim, c.qkv_bias, name)(x)
            return out.reshape(*out.shape[:2], heads, c.head_dim)

        q, k, v = project(c.num_heads, "query"), project(c.num_kv_heads, "key"), project(c.num_kv_heads, "value")
        if c.qk_norm:
            q = make_rms_norm(c, "query_norm")(q)
            k = make_rms_norm(c, "key_norm")(k)
        if c.positions == "rotary":
            q, k = rotate(q, positions, c, self.sliding), rotate(k, positions, c, self.sliding)

        batch, width = x.shape[:2]
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if cached is not None:
            k, v = write(cached[0], k, length), write(cached[1], v, length)
            cached = (k, v)
        visible = visible_slots(k.shape[2], width, length, mask)
        if self.sliding:
            visible = within_window(visible, c.sliding_window)
        # [B, K, groups * T, H]: the query heads that share a key head form one matrix.
        q = q.reshape(batch, width, c.num_kv_heads, groups, c.head_dim).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch, c.num_kv_heads, groups * width, c.head_dim)
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        scores = product(q, k, (((3,), (3,)), ((0, 1), (0, 1)))) * scale
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        scores = scores.reshape(batch, c.num_kv_heads, groups, width, -1)
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores).reshape(batch, c.num_kv_heads, groups * width, -1)
        out = product(weights.astype(v.dtype), v, (((3,), (2,)), ((0, 1), (0, 1))))
        out = out.reshape(batch, c.num_kv_heads, groups, width, c.head_dim).transpose(0, 3, 1, 2, 4)
        out = out.reshape(batch, width, c.num_heads * c.head_dim)
        return make_dense(c, c.d_model, c.attention_bias, "output")(out), cached


def visible_slots(num_slots: int, width: int, length: Int[Array, "B"], mask) -> Bool[Array, "B T S"]:
    """Which slots each of the `width` new tokens may attend to.

                   earlier slots     the last M slots, T of them new     behind
    token t        all               mask[t] (or 0..t of the new)        none
    """
    slots = jnp.arange(num_slots)
    if mask is None:
        offset = slots - length[:, None]  # [B, S]: which of the new tokens a slot holds; negative: an earlier one
        return offset[:, None] <= jnp.arange(width)[:, None]
    span = mask.shape[-1]
    offset = slots - (length + width - span)[:, None]  # which column of the mask a slot belongs to
    mask = jnp.broadcast_to(mask, (length.shape[0], width, span))
    masked = jnp.take_along_axis(mask, jnp.clip(offset, 0, span - 1)[:, None], 2)
    return (offset < 0)[:, None] | (masked & (offset < span)[:, None])


def within_window(visible: Bool[Array, "B T S"], window: int) -> Bool[Array, "B T S"]:
    """Of the visible slots, the last `window` of each token.

    What a token sees is one text, in slot order, whichever branches of a tree lie between. So the distance of a slot is
    the number of visible ones behind it, and positions need not be known.
    """
    behind = jnp.cumsum(visible[..., ::-1], -1, dtype=jnp.int32)[..., ::-1]
    return visible & (behind <= window)
