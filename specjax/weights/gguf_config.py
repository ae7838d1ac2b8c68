"""The metadata of a GGUF file in the fields of `TransformerConfig`."""

from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.models.config import LinearRotaryScaling, RotaryScaling, TransformerConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

# What the models here do not do; 0 leaves it off.
_UNSUPPORTED = ("expert_count", "final_logit_softcapping", "attn_logit_softcapping", "attention.clamp_kqv")

# Gemma 3 of this many layers, the 27B, is the one that scales attention by its width per head instead of head_dim.
_LAYERS_OF_27B = 62


def config_from_gguf(
    metadata: dict[str, Any], tensors: Collection[str], vocab_size: int, rope_factors: np.ndarray | None, dtype
) -> TransformerConfig:
    """What the metadata says; which biases and whether an own head, by the names of the tensors.

    Args:
        metadata: keys and values.
        tensors: names of all tensors.
        vocab_size: rows of the embedding.
        rope_factors: [rotary_dim / 2] what the rotary frequencies are divided by (`rope_freqs.weight`), or None.
        dtype: of activations and parameters.

    Raises:
        ValueError: an unknown architecture, something that is not supported, or a size that is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    values = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    for key in _UNSUPPORTED:
        if values.get(key):
            raise ValueError(f"{architecture} with {key} {values[key]} is not supported")
    d_model, num_layers = _integer(values, "embedding_length"), _integer(values, "block_count")
    num_heads = _integer(values, "attention.head_count")
    if num_layers > len(tensors):
        raise ValueError(f"the metadata's block_count is {num_layers}, but there are {len(tensors)} tensors in all")
    if "attention.key_length" not in values and d_model % num_heads:
        raise ValueError(f"embedding_length {d_model} is no multiple of attention.head_count {num_heads}")
    head_dim = _integer(values, "attention.key_length", d_model // num_heads)
    if _integer(values, "attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"attention.value_length {values['attention.value_length']} must be attention.key_length {head_dim}"
        )
    gemma = architecture == "gemma3"
    base = _number(values, "rope.freq_base", 10_000.0)
    rotary_dim = _integer(values, "rope.dimension_count", head_dim)
    window, sliding_layers = _read_window(values, num_layers, 6 if gemma else 1)
    fields = dict(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_ff=_integer(values, "feed_forward_length"),
        context_length=_integer(values, "context_length"),
        norm_eps=_number(values, "attention.layer_norm_rms_epsilon"),
        rotary_base=base,
        rotary_fraction=rotary_dim / head_dim,
        rotary_scaling=_read_scaling(values, base, rotary_dim, rope_factors),
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_scale=_number(values, "attention.scale", 0.0) or None,
        mlp="geglu" if gemma else "swiglu",
        qkv_bias="blk.0.attn_q.bias" in tensors,
        attention_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tied_head="output.weight" not in tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
    )
    if gemma:
        per_head = d_model / num_heads if num_layers == _LAYERS_OF_27B else head_dim
        fields |= dict(
            norm_offset=1.0,
            norm_position="sandwich",
            attention_scale=fields["attention_scale"] or per_head**-0.5,
            embedding_scale=d_model**0.5,
        )
    if gemma and sliding_layers:
        fields["sliding_rotary_base"] = _number(values, "rope.freq_base_swa", 10_000.0)
    return TransformerConfig(dtype=dtype, param_dtype=dtype, **fields)


def _read_window(values: dict, num_layers: int, period: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, the layers that slide); of a pattern n, every n-th layer sees all, and n = 1 means that none does."""
    window = _integer(values, "attention.sliding_window", 0, least=0) or None
    if window is None:
        return None, None
    pattern = values.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            raise ValueError(f"attention.sliding_window_pattern is for {len(pattern)} of {num_layers} layers")
        slides = pattern[:num_layers]
    else:
        # llama.cpp gives a model of the Llama or Qwen kind no window unless a pattern says which layers have one.
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]
    layers = tuple(i for i, slide in enumerate(slides) if slide)
    return (window, layers) if layers else (None, None)


def _read_scaling(values: dict, base: float, rotary_dim: int, factors: np.ndarray | None):
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported; known are none, linear")
    scale = _number(values, "rope.scaling.factor", _number(values, "rope.scale_linear", 1.0))
    linear = LinearRotaryScaling(scale) if kind == "linear" and scale not in (0, 1) else None
    if factors is None or np.all(factors == 1):
        return linear
    if linear is not None:
        raise ValueError("rope_freqs.weight beside linear rope.scaling is not supported")
    return _scaling_of_factors(base, rotary_dim, np.asarray(factors, np.float64))


def _scaling_of_factors(base: float, rotary_dim: int, factors: np.ndarray) -> RotaryScaling:
    """The scaling whose frequencies are the unscaled ones over `factors`.

    In Llama 3's scaling 1 / factors is (1 - keep) / factor + keep, and keep a straight line in the frequency between 0
    and 1. The line leaves one number open: all three of the low and high frequency factor and the context may be scaled
    together. It is the low frequency factor that is taken as 1, as in every Llama 3.
    """
    frequencies = base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    factor = _short(factors.max())
    if factors.shape == frequencies.shape and factor > 1 and factors.min() >= 1:
        keep = (1 / factors - 1 / factor) / (1 - 1 / factor)
        candidates = [RotaryScaling(factor, 1.0, 4.0, 8192)]
        ramp = (keep > 1e-5) & (keep < 1 - 1e-5)
        if ramp.sum() >= 2:
            slope, start = np.polyfit(frequencies[ramp], keep[ramp], 1)
            low, width = (1.0, -1 / start) if start < -1e-5 else (0.0, 1.0)
            context = round(slope * width * 2 * np.pi)
            candidates.append(RotaryScaling(factor, low, _short(low + width), context))
        for scaling in candidates:
            turns = scaling.original_context * frequencies / (2 * np.pi)
            line = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            if np.allclose(np.clip(line, 0, 1), keep, rtol=0, atol=1e-4):
                return scaling
    raise ValueError("rope_freqs.weight is none of Llama 3's scalings of the rotary frequencies")


def _short(value: float) -> float:
    """What was meant by a number that went through float32 and a fit."""
    return float(f"{float(value):.4g}")


def _integer(values: dict, key: str, default: int | None = None, least: int = 1) -> int:
    value = values.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:  # one value for each layer
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = "is missing" if value is None else f"must be one integer of at least {least}; got {str(value)[:60]}"
        raise ValueError(f"the metadata's {key} {what}")
    return value


def _number(values: dict, key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        what = "is missing" if value is None else f"must be a number of at least 0; got {str(value)[:60]}"
        raise ValueError(f"the metadata's {key} {what}")
    return float(str(np.float32(value)))  # the file holds float32: 1e-05 and not 9.999999747378752e-06
