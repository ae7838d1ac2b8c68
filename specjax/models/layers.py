"""The layers that every part of a transformer builds from its config."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.config import TransformerConfig
from specjax.models.linear import product


def make_norm(config: TransformerConfig, name: str | None) -> nn.Module:
    """The config's kind of normalisation."""
    if config.norm == "rmsnorm":
        return make_rms_norm(config, name)
    return nn.LayerNorm(config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


def make_rms_norm(config: TransformerConfig, name: str | None) -> nn.Module:
    """An RMSNorm, whatever the config's other norms are: that of a head's queries and keys."""
    if config.norm_offset:
        return OffsetRMSNorm(config, name=name)
    return nn.RMSNorm(config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


class OffsetRMSNorm(nn.Module):
    """RMSNorm whose scale is `norm_offset` plus what is learned, added in float32: a bfloat16 sum would lose bits."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        c = self.config
        start = nn.initializers.constant(1 - c.norm_offset)
        scale = self.param("scale", start, (x.shape[-1],), c.param_dtype)
        wide = jnp.promote_types(c.dtype, jnp.float32)
        y = x.astype(wide)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + c.norm_eps)
        return (y * (c.norm_offset + scale.astype(wide))).astype(c.dtype)


def scale_embeddings(config: TransformerConfig, embedded: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Token embeddings as the first block takes them."""
    if config.embedding_scale == 1:
        return embedded
    return embedded * jnp.asarray(config.embedding_scale, embedded.dtype)


def make_dense(
    config: TransformerConfig, features: int, use_bias: bool, name: str | None, *, zero: bool = False
) -> nn.Dense:
    """A linear layer, `zero` at the start or random; the kernel is [in, out], faster than [out, in] above one row."""
    return nn.Dense(
        features,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nn.initializers.zeros if zero else nn.initializers.normal(0.02),
        dot_general=product,
        name=name,
    )
