"""The layers that every part of a transformer builds from its config."""

import flax.linen as nn

from specjax.models.config import TransformerConfig


def make_norm(config: TransformerConfig, name: str | None) -> nn.Module:
    """The config's kind of normalisation."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, name=name)


def make_dense(config: TransformerConfig, features: int, use_bias: bool, name: str | None) -> nn.Dense:
    """A linear layer; the kernel is [in, out], which is faster than [out, in] at widths above one."""
    init = nn.initializers.normal(0.02)
    return nn.Dense(
        features, use_bias=use_bias, dtype=config.dtype, param_dtype=config.param_dtype, kernel_init=init, name=name
    )
