"""How a transformer knows where a token stands: rotary, sinusoidal or learned positions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.config import LinearRotaryScaling, RotaryScaling, TransformerConfig


def rotary_frequencies(config: TransformerConfig, sliding: bool = False) -> np.ndarray:
    """[rotary_dim / 2] radians per position (Su et al. 2021, arXiv 2104.09864), scaled if the config asks for it.

    A sliding layer may have a base of its own, and is then not scaled (Gemma 3).
    """
    exponent = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    if sliding and config.sliding_rotary_base is not None:
        return config.sliding_rotary_base**-exponent
    frequencies = config.rotary_base**-exponent
    return _scaled(frequencies, config.rotary_scaling) if config.rotary_scaling else frequencies


def _scaled(frequencies: np.ndarray, scaling: RotaryScaling | LinearRotaryScaling) -> np.ndarray:
    if isinstance(scaling, LinearRotaryScaling):
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], config: TransformerConfig, sliding: bool = False
) -> Float[Array, "B T heads H"]:
    """Rotate the first `rotary_dim` dimensions of each head, first half paired with second (Hugging Face order).

    Angles are computed in float32 at least: bfloat16 cannot tell positions past 256 apart.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions[..., None].astype(wide) * jnp.asarray(rotary_frequencies(config, sliding), wide)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    half = config.rotary_dim // 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in rotated] + [rest], -1)


def sinusoidal(positions: Int[Array, "B T"], d_model: int) -> Float[Array, "B T D"]:
    """Vaswani et al. 2017 (arXiv 1706.03762), section 3.5: sines in the even and cosines in the odd dimensions."""
    frequencies = 10_000.0 ** -(np.arange(0, d_model, 2) / d_model)
    angles = positions[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*positions.shape, d_model)
