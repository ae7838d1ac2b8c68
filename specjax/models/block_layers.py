"""A block drafter's network: blocks of masked tokens that attend to a target's features (DFlash, arXiv 2602.06036).

A block is the pending token, whose own feature does not exist yet, and γ masks; it has W = γ + 1 positions. With the
pending token at position a, any number of blocks A of one row can be run side by side:

    context entries   0  1  ...  a-1 | a  a+1 ...        one per position of the text, from the target's features
    block                              r  m  m  m        r is the token at a, the masks stand at a+1 .. a+γ
    visible to each
    of its positions  yes ...... yes   yes yes yes yes   (both directions inside the block, no other block)

Each layer makes keys and values of the context from the fused features themselves, not from the layer below ("KV
injection"), with the same projections that it uses for the block. So a context entry depends on one position of the
text only, and is computed once and cached.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_norm, make_rms_norm
from specjax.models.positions import rotate
from specjax.models.transformer import MLP

KeysValues = tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]


class BlockAttention(nn.Module):
    """Queries from the blocks; keys and values from the context before each block and from the block itself."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.query = make_dense(c, c.num_heads * c.head_dim, c.qkv_bias, None)
        self.key = make_dense(c, c.num_kv_heads * c.head_dim, c.qkv_bias, None)
        self.value = make_dense(c, c.num_kv_heads * c.head_dim, c.qkv_bias, None)
        self.output = make_dense(c, c.d_model, c.attention_bias, None)
        if c.qk_norm:
            self.query_norm, self.key_norm = make_rms_norm(c, None), make_rms_norm(c, None)

    def keys_values(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> KeysValues:
        """Rotated keys, and values, [B, K, T, H]."""
        c = self.config
        k, v = (dense(x).reshape(*x.shape[:2], c.num_kv_heads, c.head_dim) for dense in (self.key, self.value))
        k = rotate(self.key_norm(k) if c.qk_norm else k, positions, c)
        return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def __call__(
        self, x: Float[Array, "B A W D"], context: KeysValues, length: Int[Array, "B A"]
    ) -> Float[Array, "B A W D"]:
        """Attend to the first `length` context entries and to the own block, which begins at position `length`.

        Scores are joined, not keys: a cache would be copied.
        """
        c = self.config
        batch, blocks, width = x.shape[:3]
        kv_heads, groups, head_dim = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
        positions = (length[..., None] + jnp.arange(width)).reshape(batch, -1)
        flat = x.reshape(batch, blocks * width, -1)
        q = self.query(flat).reshape(batch, blocks * width, c.num_heads, head_dim)
        q = rotate(self.query_norm(q) if c.qk_norm else q, positions, c)
        q = q.reshape(batch, blocks * width, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
        k, v = self.keys_values(flat, positions)
        k, v = (side.reshape(batch, kv_heads, blocks, width, head_dim) for side in (k, v))

        one_matrix = (batch, kv_heads, groups * blocks * width, -1)  # query heads that share a key head
        per_block = (batch, kv_heads, groups, blocks, width, -1)
        over_context = jax.lax.dot_general(q.reshape(one_matrix), context[0], (((3,), (3,)), ((0, 1), (0, 1))))
        over_block = jnp.einsum("bkgawh,bkavh->bkgawv", q.reshape(per_block), k)
        visible = jnp.arange(context[0].shape[2]) < length[..., None]  # [B, A, S]
        scale = head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        wide = jnp.promote_types(over_context.dtype, jnp.float32)
        over_context = over_context.reshape(per_block).astype(wide)
        over_context = jnp.where(visible[:, None, None, :, None], over_context, jnp.finfo(wide).min)
        scores = jnp.concatenate([over_context, over_block.astype(wide)], -1) * scale
        weights = jax.nn.softmax(scores).astype(v.dtype)
        of_context, of_block = weights[..., :-width], weights[..., -width:]
        out = jax.lax.dot_general(of_context.reshape(one_matrix), context[1], (((3,), (2,)), ((0, 1), (0, 1))))
        out = out.reshape(per_block) + jnp.einsum("bkgawv,bkavh->bkgawh", of_block, v)
        out = out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, blocks, width, c.num_heads * head_dim)
        return self.output(out)


class BlockLayer(nn.Module):
    """Attention and MLP, each with its norm before it."""

    config: TransformerConfig

    def setup(self):
        self.attention_norm, self.mlp_norm = make_norm(self.config, None), make_norm(self.config, None)
        self.attention, self.mlp = BlockAttention(self.config), MLP(self.config)

    def keys_values(self, fused: Float[Array, "B S D"], positions: Int[Array, "B S"]) -> KeysValues:
        """This layer's cache entries of the fused context features."""
        return self.attention.keys_values(fused, positions)

    def __call__(
        self, x: Float[Array, "B A W D"], context: KeysValues, length: Int[Array, "B A"]
    ) -> Float[Array, "B A W D"]:
        x = x + self.attention(self.attention_norm(x), context, length)
        flat = self.mlp_norm(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + self.mlp(flat).reshape(x.shape)


class BlockTransformer(nn.Module):
    """The layers with what surrounds them; embedding and head are the target's."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.fuse, self.fuse_norm = make_dense(c, c.d_model, False, None), make_norm(c, None)
        self.mask_embedding = self.param("mask_embedding", nn.initializers.normal(0.02), (c.d_model,), c.param_dtype)
        self.layers = [BlockLayer(c) for _ in range(c.num_layers)]
        self.final_norm = make_norm(c, None)

    def inject(self, features: Float[Array, "B S F"], positions: Int[Array, "B S"]) -> tuple[KeysValues, ...]:
        """Each layer's context entries for the features of the target's layers, side by side, at these positions."""
        fused = self.fuse_norm(self.fuse(features))
        return tuple(layer.keys_values(fused, positions) for layer in self.layers)

    def blocks(self, pending: Float[Array, "B A D"], num_masks: int) -> Float[Array, "B A W D"]:
        """What goes into the first layer: each pending token's embedding and γ masks behind it."""
        mask = jnp.asarray(self.mask_embedding, self.config.dtype)
        masks = jnp.broadcast_to(mask, (*pending.shape[:2], num_masks, mask.shape[0]))
        return jnp.concatenate([pending[:, :, None].astype(mask.dtype), masks], 2)

    def denoise(
        self, x: Float[Array, "B A W D"], context: tuple[KeysValues, ...], length: Int[Array, "B A"]
    ) -> Float[Array, "B A W D"]:
        """Normalised outputs of blocks that see the first `length` context entries and begin at position `length`."""
        for layer, entries in zip(self.layers, context, strict=True):
            x = layer(x, entries, length)
        return self.final_norm(x)

    def __call__(
        self,
        features: Float[Array, "B S F"],
        pending: Float[Array, "B A D"],
        anchors: Int[Array, "B A"],
        num_masks: int,
    ) -> Float[Array, "B A G D"]:
        """Outputs at the γ masks of blocks whose pending tokens stand at `anchors`, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
        context = self.inject(features, positions)
        return self.denoise(self.blocks(pending, num_masks), context, anchors)[:, :, 1:]
