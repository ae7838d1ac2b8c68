"""What a Hugging Face config.json says, in the fields of `TransformerConfig`."""

from typing import Any

from specjax.models.config import LinearRotaryScaling, RotaryScaling

SLIDING, FULL = "sliding_attention", "full_attention"

# What the models here do not do: key -> the values that leave it off.
_UNSUPPORTED = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1),
}
_ACTIVATION_KEYS = {"Gemma3ForCausalLM": "hidden_activation", "GPT2LMHeadModel": "activation_function"}


def read_fields(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `TransformerConfig`, but for its dtypes.

    Args:
        name: the architecture.
        values: its config.json, with the values of absent keys filled in.

    Raises:
        ValueError: something that is not supported; a size that is no number.
    """
    for key, off in _UNSUPPORTED.items():
        if values.get(key) not in off:
            raise ValueError(f"{name} with {key} {values[key]!r} is not supported")
    key = _ACTIVATION_KEYS.get(name, "hidden_act")
    known = ("silu", "swish") if key == "hidden_act" else ("gelu_pytorch_tanh", "gelu_new")
    if values[key] not in known:
        raise ValueError(f"{name} with {key} {values[key]!r} is not supported; known are {', '.join(known)}")
    return _read_gpt2(values) if name == "GPT2LMHeadModel" else _read_llama_like(name, values)


def _read_gpt2(values: dict) -> dict[str, Any]:
    return dict(
        vocab_size=_integer(values, "vocab_size"),
        d_model=_integer(values, "n_embd"),
        num_layers=_integer(values, "n_layer"),
        num_heads=_integer(values, "n_head"),
        d_ff=_integer(values, "n_inner", optional=True),
        context_length=_integer(values, "n_positions"),
        norm="layernorm",
        norm_eps=_number(values, "layer_norm_epsilon"),
        positions="learned",
        attention_scale=None if values["scale_attn_weights"] else 1.0,
        mlp="gelu",
        qkv_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tied_head=bool(values["tie_word_embeddings"]),
    )


def _read_llama_like(name: str, values: dict) -> dict[str, Any]:
    gemma, llama, qwen2 = (name == f"{kind}ForCausalLM" for kind in ("Gemma3", "Llama", "Qwen2"))
    num_layers = _integer(values, "num_hidden_layers")
    window, sliding_layers = _read_window(name, values, num_layers)
    (base, scaling), (sliding_base, sliding_scaling) = _read_rotary(name, values)
    if sliding_layers and sliding_scaling != (None if gemma else scaling):
        raise ValueError(f"{name} with scaled rotary positions in its sliding layers is not supported")
    # The layers of Mistral and Qwen2 ignore the key.
    biased = name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM") and bool(values["attention_bias"])
    fields = dict(
        vocab_size=_integer(values, "vocab_size"),
        d_model=_integer(values, "hidden_size"),
        num_layers=num_layers,
        num_heads=_integer(values, "num_attention_heads"),
        num_kv_heads=_integer(values, "num_key_value_heads", optional=True),
        head_dim=_integer(values, "head_dim", optional=True),
        d_ff=_integer(values, "intermediate_size"),
        context_length=_integer(values, "max_position_embeddings"),
        norm_eps=_number(values, "rms_norm_eps"),
        rotary_base=base,
        rotary_scaling=scaling,
        sliding_window=window,
        sliding_layers=sliding_layers,
        mlp="geglu" if gemma else "swiglu",
        qkv_bias=qwen2 or biased,
        attention_bias=biased,
        mlp_bias=llama and bool(values["mlp_bias"]),
        tied_head=bool(values["tie_word_embeddings"]),
        qk_norm=name in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
    )
    if gemma:
        fields |= dict(
            norm_offset=1.0,
            norm_position="sandwich",
            sliding_rotary_base=sliding_base if sliding_layers else None,
            attention_scale=_number(values, "query_pre_attn_scalar") ** -0.5,
            embedding_scale=fields["d_model"] ** 0.5,
        )
    return fields


def _read_window(name: str, values: dict, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, the layers that slide), both None where none does."""
    if name == "LlamaForCausalLM":
        return None, None
    off = not values.get("use_sliding_window", True)
    window = None if off else _integer(values, "sliding_window", optional=True)
    if name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = _integer(values, "max_window_layers", least=0)
        slides = [window is not None and i >= first for i in range(num_layers)]
    elif name == "Gemma3ForCausalLM":
        pattern = _integer(values, "sliding_window_pattern")
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        slides = [window is not None] * num_layers
    kinds = values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {SLIDING, FULL}:
            raise ValueError(f"layer_types must name {SLIDING} or {FULL} for each of {num_layers} layers; got {kinds}")
        if name == "MistralForCausalLM" and slides != [kind == SLIDING for kind in kinds]:
            raise ValueError(f"{name} whose layers differ in their windows is not supported; got layer_types {kinds}")
        slides = [kind == SLIDING for kind in kinds]
    layers = tuple(i for i, slide in enumerate(slides) if slide)
    if layers and window is None:
        raise ValueError(f"layers {layers} of {name} slide, but there is no sliding_window")
    return (window, layers) if layers else (None, None)


Rotary = tuple[float, RotaryScaling | LinearRotaryScaling | None]


def _read_rotary(name: str, values: dict) -> tuple[Rotary, Rotary]:
    """(base, scaling) of the full and of the sliding layers."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_scaling must be an object; got {given!r}")
    nested = FULL in given or SLIDING in given
    if name != "Gemma3ForCausalLM":
        if nested:
            raise ValueError(f"{name} with rope_parameters for each kind of layer is not supported")
        rotary = _rotary(given, values, "rope_theta")
        return rotary, rotary
    full, sliding = (given.get(kind) or {} for kind in (FULL, SLIDING)) if nested else (given, {})
    return _rotary(full, values, "rope_theta"), _rotary(sliding, values, "rope_local_base_freq")


def _rotary(given: dict, values: dict, base_key: str) -> Rotary:
    base = _number(given, "rope_theta") if "rope_theta" in given else _number(values, base_key)
    if given.get("partial_rotary_factor") not in _UNSUPPORTED["partial_rotary_factor"]:
        raise ValueError(f"partial_rotary_factor {given['partial_rotary_factor']} is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, LinearRotaryScaling(_number(given, "factor"))
    if kind == "llama3":
        given = {"original_max_position_embeddings": values["max_position_embeddings"]} | given
        factors = (_number(given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return base, RotaryScaling(*factors, _integer(given, "original_max_position_embeddings"))
    raise ValueError(f"rotary positions of type {kind!r} are not supported; known are default, linear, llama3")


def _integer(values: dict, key: str, optional: bool = False, least: int = 1) -> int | None:
    value = values.get(key)
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}; got {value!r}")
    return value


def _number(values: dict, key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key} must be a positive number; got {value!r}")
    return float(value)
