"""The config.json of a speculator: written for a drafter, and a drafter made from it.

    EAGLE-1        speculators_model_type "eagle", its layer as a Llama layer
    EAGLE-3        speculators_model_type "eagle3", its layer as a Llama layer (a Qwen3 layer with qk_norm)
    block drafter  speculators_model_type "dflash", its layers as Qwen3 layers
    Medusa         vLLM's own medusa config: the speculators format documents no type for it

What only this library knows (the shape of a tree, which sizes were left to the target) stands under "specjax", which
the others ignore; a file without it becomes a chain. Layers are compared as `config_from_huggingface` reads them.
"""

import dataclasses
from typing import Any

from specjax.drafters import BlockDrafter, Eagle, EagleDynamic, EagleTree, Medusa
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import TransformerConfig
from specjax.models.eagle_layer import EagleConfig
from specjax.topology import Topology
from specjax.weights.speculators_fields import (
    LLAMA,
    QWEN3,
    own_fields,
    read_layer,
    rebuild,
    same_layer,
    same_target,
    verifier,
    write_layer,
)

OURS = "specjax"
EAGLES = {cls.__name__: cls for cls in (Eagle, EagleTree, EagleDynamic)}
# Of EAGLE-3, with what vLLM takes when they are absent; the network here has none of them.
NORMS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_SIZES = ("num_heads", "num_kv_heads", "d_ff")
_OF_TARGET = {"hidden_size": "d_model", "vocab_size": "vocab_size", "num_hidden_layers": "num_layers"}


def write_config(drafter, target_name: str, mask_token_id: int | None) -> dict:
    """The config.json of a drafter.

    Args:
        drafter: what it describes.
        target_name: name or path of the target.
        mask_token_id: of a block drafter, the token whose embedding is the mask's.

    Raises:
        ValueError: the layout has no such network; the message names the field.
    """
    if isinstance(drafter, Medusa):
        return _write_medusa(drafter, target_name)
    if isinstance(drafter, BlockDrafter):
        return _write_block(drafter, target_name, mask_token_id)
    if type(drafter).__name__ in EAGLES:
        return (_write_eagle1 if drafter.model.version == 1 else _write_eagle3)(drafter, target_name)
    raise ValueError(
        f"{type(drafter).__name__} has no speculators layout; known are {', '.join(EAGLES)}, Medusa and BlockDrafter"
    )


def read_config(config: dict, target: TransformerConfig) -> EagleDrafter | Medusa | BlockDrafter:
    """The drafter that a config.json describes, for this target.

    Raises:
        ValueError: an unknown kind, another target, or something that the networks here do not have.
    """
    kind = config.get("speculators_model_type", config.get("model_type"))
    readers = {"eagle": _read_eagle1, "eagle3": _read_eagle3, "dflash": _read_block, "medusa": _read_medusa}
    if kind not in readers:
        raise ValueError(f"speculators_model_type {kind!r} is not supported; known are {', '.join(readers)}")
    try:
        told = config.get("speculators_config", config).get("verifier", {})
        for key, field in _OF_TARGET.items():
            same_target(key, told.get(key, getattr(target, field)), getattr(target, field))
        return readers[kind](config, target)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{kind} config is incomplete or not of its form: {error!r}") from None


def _write_eagle1(drafter: EagleDrafter, target_name: str) -> dict[str, Any]:
    model = drafter.model
    if model.input_norm:
        raise ValueError(
            "input_norm: version 1 can be saved without a norm before attention only, as the format's layer has none; "
            "train EagleConfig(input_norm=False), or version 3"
        )
    return _speculators("eagle", "EagleSpeculator", drafter, target_name) | dict(
        architectures=["EagleSpeculator", "LlamaDecoderLayer"],
        transformer_layer_architecture="LlamaDecoderLayer",
        transformer_layer_config=write_layer(_eagle1_layer(model), LLAMA),
        layernorms=False,
        fusion_bias=False,
        **{OURS: own_fields(drafter) | {size: getattr(model, size) for size in _SIZES}},
    )


def _read_eagle1(config: dict, target: TransformerConfig) -> EagleDrafter:
    for switch in ("layernorms", "fusion_bias"):
        if config.get(switch):
            raise ValueError(f"{switch} must be false: the EAGLE-1 here has none; got {config[switch]!r}")
    found, own = read_layer(config["transformer_layer_config"], LLAMA), config.get(OURS, {})
    sizes = {size: own[size] if own else _unless_default(size, found, target) for size in _SIZES}
    model = EagleConfig(target, 1, input_norm=False, **sizes)
    same_layer(found, read_layer(write_layer(_eagle1_layer(model), LLAMA), LLAMA))
    return rebuild(EAGLES[own["family"]], own, model=model) if own else Eagle(model, _drafted(config))


def _eagle1_layer(model: EagleConfig) -> TransformerConfig:
    biased = model.layer.qkv_bias or model.layer.attention_bias
    return dataclasses.replace(model.layer, final_norm=True, qkv_bias=biased, attention_bias=biased)


def _write_eagle3(drafter: EagleDrafter, target_name: str) -> dict[str, Any]:
    model, layers = drafter.model, drafter.feature_layers
    if len(layers) != 3 or not layers[0] < layers[1] < layers[2]:
        raise ValueError(f"feature_layers must be 3 layers, low to high, as vLLM collects them; got {layers}")
    layer, architecture = _eagle3_layer(model)
    return _speculators("eagle3", "Eagle3Speculator", drafter, target_name) | dict(
        transformer_layer_config=write_layer(layer, architecture),
        draft_vocab_size=model.num_draft_tokens,
        target_hidden_size=None,
        eagle_aux_hidden_state_layer_ids=list(layers),
        **dict.fromkeys(NORMS, False),
        **{OURS: own_fields(drafter) | {size: getattr(model, size) for size in _SIZES}},
    )


def _read_eagle3(config: dict, target: TransformerConfig) -> EagleDrafter:
    for name, absent in NORMS.items():
        if config.get(name, absent):
            raise ValueError(f"{name} must be false: the EAGLE-3 here has no such norm; got {config.get(name)}")
    given, depth = config["transformer_layer_config"], target.num_layers
    architecture = QWEN3 if given.get("model_type") == "qwen3" else LLAMA
    found = read_layer(given, architecture)
    vocab, own = config["draft_vocab_size"], config.get(OURS, {})
    layers = config.get("eagle_aux_hidden_state_layer_ids") or (2, depth // 2, depth - 3)  # vLLM's default
    sizes = {size: own[size] if own else _unless_default(size, found, target) for size in _SIZES}
    draft_vocab = None if vocab == target.vocab_size else vocab
    model = EagleConfig(target, 3, tuple(layers), draft_vocab=draft_vocab, **sizes)
    wanted, kind = _eagle3_layer(model)
    if kind != architecture:
        raise ValueError(f"its layer is of {architecture}, where drafters of this target have one of {kind}")
    same_layer(found, read_layer(write_layer(wanted, kind), kind))
    return rebuild(EAGLES[own["family"]], own, model=model) if own else Eagle(model, _drafted(config))


def _eagle3_layer(model: EagleConfig) -> tuple[TransformerConfig, str]:
    """The layer with the vocabulary and the norm around it, and the architecture that has such layers."""
    c = model.layer
    biased = c.qkv_bias or c.attention_bias
    if c.qk_norm and biased:
        raise ValueError("qk_norm together with qkv_bias or attention_bias: EAGLE-3's Qwen3 layer is served without")
    whole = dataclasses.replace(
        c, vocab_size=model.target.vocab_size, final_norm=True, qkv_bias=biased, attention_bias=biased
    )
    return whole, QWEN3 if c.qk_norm else LLAMA


def _unless_default(size: str, found: TransformerConfig, target: TransformerConfig) -> int | None:
    value = getattr(found, size)
    if size == "num_kv_heads" and found.num_heads != target.num_heads:
        return None if value == found.num_heads else value
    return None if value == getattr(target, size) else value


def _write_block(drafter: BlockDrafter, target_name: str, mask_token_id: int | None) -> dict[str, Any]:
    layers = drafter.feature_layers
    if list(layers) != sorted(layers):
        raise ValueError(f"feature_layers must stand low to high, as vLLM collects them; got {layers}")
    if mask_token_id is None or not 0 <= mask_token_id < drafter.vocab_size:
        raise ValueError(
            f"mask_token_id must be a token, 0 to {drafter.vocab_size - 1}, that texts do not contain; got "
            f"{mask_token_id}"
        )
    return _speculators("dflash", "DFlashSpeculator", drafter, target_name) | dict(
        transformer_layer_config=write_layer(_block_layers(drafter), QWEN3),
        draft_vocab_size=drafter.vocab_size,
        target_hidden_size=None,
        aux_hidden_state_layer_ids=list(layers),
        block_size=drafter.draft_length + 1,
        mask_token_id=mask_token_id,
        sample_from_anchor=False,
        sliding_window_non_causal=False,
        projector_type="dflash",
        **{OURS: {"family": BlockDrafter.__name__, "qk_norm": drafter.qk_norm}},
    )


def _read_block(config: dict, target: TransformerConfig) -> BlockDrafter:
    vocab = config["draft_vocab_size"]
    if vocab != target.vocab_size:
        raise ValueError(f"draft_vocab_size must be the target's, {target.vocab_size}, for a block head; got {vocab}")
    for key, value in (("sample_from_anchor", False), ("projector_type", "dflash")):
        if config.get(key, value) != value:
            raise ValueError(f"{key} {config[key]!r} is not supported; only {value!r} is")
    found = read_layer(config["transformer_layer_config"], QWEN3)
    layers = tuple(config["aux_hidden_state_layer_ids"])
    qk_norm = config.get(OURS, {}).get("qk_norm", None if target.qk_norm else True)
    drafter = BlockDrafter(target, found.num_layers, layers, config["block_size"] - 1, qk_norm)
    same_layer(found, read_layer(write_layer(_block_layers(drafter), QWEN3), QWEN3))
    return drafter


def _block_layers(drafter: BlockDrafter) -> TransformerConfig:
    c = drafter.config
    biased = c.qkv_bias or c.attention_bias
    return dataclasses.replace(c, tied_head=False, qkv_bias=biased, attention_bias=biased)


def _write_medusa(drafter: Medusa, target_name: str) -> dict[str, Any]:
    target = drafter.target
    for field, value in (("hidden_width", drafter.hidden_width), ("head_bias", target.head_bias or None)):
        if value is not None:
            raise ValueError(f"{field} {value}: the heads of vLLM's Medusa have no such thing")
    return dict(
        architectures=["MedusaModel"],
        model_type="medusa",
        torch_dtype=target.param_dtype.name,
        hidden_size=target.d_model,
        vocab_size=target.vocab_size,
        truncated_vocab_size=target.vocab_size,
        num_heads=drafter.num_heads,
        num_hidden_layers=drafter.num_blocks,
        original_lm_head=not drafter.own_output,
        medusa_fc_bias=False,
        verifier=verifier(target_name, target),
        **{OURS: own_fields(drafter)},
    )


def _read_medusa(config: dict, target: TransformerConfig) -> Medusa:
    same_target("hidden_size", config["hidden_size"], target.d_model)
    same_target("vocab_size", config["vocab_size"], target.vocab_size)
    if config.get("truncated_vocab_size") not in (None, target.vocab_size) or config.get("medusa_fc_bias"):
        raise ValueError("truncated_vocab_size below vocab_size and medusa_fc_bias are not supported")
    heads, own = int(config["num_heads"]), config.get(OURS)
    return rebuild(
        Medusa,
        own or {"topology": Topology.chain(heads).parents},
        target=target,
        num_heads=heads,
        num_blocks=config.get("num_hidden_layers", 1),
        own_output=not config.get("original_lm_head", False),
    )


def _speculators(kind: str, architecture: str, drafter, target_name: str) -> dict[str, Any]:
    """What every speculator has in common."""
    greedy = dict(
        proposal_type="greedy", speculative_tokens=drafter.draft_length, verifier_accept_k=1, accept_tolerance=0.0
    )
    return dict(
        architectures=[architecture],
        speculators_model_type=kind,
        torch_dtype=drafter.target.param_dtype.name,
        speculators_config=dict(
            algorithm=kind,
            default_proposal_method="greedy",
            proposal_methods=[greedy],
            verifier=verifier(target_name, drafter.target),
        ),
    )


def _drafted(config: dict) -> int:
    return config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
