"""The architectures of Hugging Face that are read and written, as far as config.json describes them.

    config.json  ── config_from_huggingface ──►  TransformerConfig  ── config_to_huggingface ──►  config.json

Both spellings of rotary positions are read: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5.
The older one is written, which every version reads. An absent key has the value that transformers gives it.
"""

import dataclasses
import math
from typing import Any

from specjax.models.config import LinearRotaryScaling, TransformerConfig
from specjax.weights.config_reading import FULL, SLIDING, read_fields

_LLAMA = dict(
    num_key_value_heads=None, head_dim=None, hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6,
    rope_theta=10_000.0, tie_word_embeddings=False,
)  # fmt: skip
_QWEN = _LLAMA | dict(
    num_key_value_heads=32, max_position_embeddings=32_768, use_sliding_window=False, sliding_window=4096,
    max_window_layers=28,
)  # fmt: skip
_GEMMA3 = dict(
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", max_position_embeddings=131_072,
    rms_norm_eps=1e-6, rope_theta=1_000_000.0, rope_local_base_freq=10_000.0, tie_word_embeddings=True,
    attention_bias=False, query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=6,
)  # fmt: skip
_GPT2 = dict(
    n_positions=1024, n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, scale_attn_weights=True,
    tie_word_embeddings=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: what config.json calls the kind.
        defaults: values of absent keys.
        required: the sizes, which config.json must give.
    """

    model_type: str
    defaults: dict[str, Any]
    required: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _LLAMA | dict(attention_bias=False, mlp_bias=False)),
    "MistralForCausalLM": Architecture(
        "mistral", _LLAMA | dict(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096)
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", _QWEN),
    "Qwen3ForCausalLM": Architecture("qwen3", _QWEN | dict(head_dim=128, attention_bias=False)),
    "Gemma3ForCausalLM": Architecture("gemma3_text", _GEMMA3),
    "GPT2LMHeadModel": Architecture("gpt2", _GPT2, required=("vocab_size", "n_embd", "n_layer", "n_head")),
}


def architecture_of(config: dict) -> str:
    """The name of the architecture that a config.json is for.

    Raises:
        ValueError: it is none of `ARCHITECTURES`.
    """
    by_type = {known.model_type: name for name, known in ARCHITECTURES.items()}
    named = config.get("architectures") or [by_type.get(config.get("model_type"), config.get("model_type"))]
    name = named[0] if isinstance(named, list) else named
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    return name


def config_from_huggingface(config: dict, dtype="float32") -> TransformerConfig:
    """What a config.json says, with `dtype` for activations and parameters.

    Raises:
        ValueError: an architecture, or something in it, that is not supported; a size that is missing or no number.
    """
    name = architecture_of(config)
    for key in ARCHITECTURES[name].required:
        if key not in config:
            raise ValueError(f"config.json of {name} lacks {key}")
    fields = read_fields(name, ARCHITECTURES[name].defaults | config)
    return TransformerConfig(dtype=dtype, param_dtype=dtype, **fields)


def config_to_huggingface(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """The config.json of a model as one of the `ARCHITECTURES`.

    Raises:
        ValueError: the architecture is unknown, or has no such model; the message names the first difference.
    """
    name = architecture_of({"architectures": [architecture]})
    written = dict(
        architectures=[name],
        model_type=ARCHITECTURES[name].model_type,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tied_head,
        torch_dtype=config.param_dtype.name,
    )
    written |= _write_gpt2(config) if name == "GPT2LMHeadModel" else _write_llama_like(name, config)
    wanted, held = _meaning(config), _meaning(config_from_huggingface(written, config.param_dtype))
    for field, value in wanted.items():
        same = math.isclose(value, held[field]) if isinstance(value, float) and held[field] else value == held[field]
        if not same:
            raise ValueError(f"{name} cannot hold {field} {value!r}; it would be {held[field]!r}")
    return written


def _write_gpt2(config: TransformerConfig) -> dict[str, Any]:
    return dict(
        n_embd=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.d_ff,
        n_positions=config.context_length,
        activation_function="gelu_new",
        layer_norm_epsilon=config.norm_eps,
        scale_attn_weights=config.attention_scale != 1.0,
    )


def _write_llama_like(name: str, config: TransformerConfig) -> dict[str, Any]:
    c, scaling, slides = config, config.rotary_scaling, [config.slides(i) for i in range(config.num_layers)]
    written = dict(
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rotary_base,
        rope_scaling=None,
    )
    if isinstance(scaling, LinearRotaryScaling):
        written["rope_scaling"] = dict(rope_type="linear", factor=scaling.factor)
    elif scaling is not None:
        written["rope_scaling"] = dict(
            rope_type="llama3",
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_context,
        )
    known = ARCHITECTURES[name].defaults
    written |= {k: getattr(c, k) for k in ("attention_bias", "mlp_bias") if k in known}
    if "sliding_window" in known:
        written["sliding_window"] = c.sliding_window
    if "use_sliding_window" in known:
        first = slides.index(True) if True in slides else c.num_layers
        written |= dict(use_sliding_window=True in slides, max_window_layers=first)
    if "use_sliding_window" in known or name == "Gemma3ForCausalLM":
        written["layer_types"] = [SLIDING if slide else FULL for slide in slides]
    if name != "Gemma3ForCausalLM":
        return written | dict(hidden_act="silu")
    scalar = c.head_dim if c.attention_scale is None else c.attention_scale**-2
    return written | dict(
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
        rope_local_base_freq=c.rotary_base if c.sliding_rotary_base is None else c.sliding_rotary_base,
    )


def _meaning(config: TransformerConfig) -> dict[str, Any]:
    """The fields that make a difference to a model's output, with the values that are in force."""
    fields = dataclasses.asdict(config)
    for training_only in ("dropout", "remat", "dtype", "param_dtype"):
        del fields[training_only]
    if config.attention_scale is None:
        fields["attention_scale"] = config.head_dim**-0.5
    if config.positions != "rotary":
        fields |= dict(rotary_base=None, rotary_fraction=None, rotary_scaling=None, sliding_rotary_base=None)
    elif config.sliding_layers is None:
        fields["sliding_rotary_base"] = None
    elif config.sliding_rotary_base is None and config.rotary_scaling is None:
        fields["sliding_rotary_base"] = config.rotary_base
    elif config.sliding_rotary_base == config.rotary_base and config.rotary_scaling is None:
        fields["sliding_rotary_base"] = config.rotary_base
    return fields
