"""What the configs of all speculators share: the target, a layer, and the fields that only this library knows."""

import dataclasses
from typing import Any

from specjax.models import TransformerConfig
from specjax.topology import Topology
from specjax.weights.architectures import config_from_huggingface, config_to_huggingface

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"


def verifier(name: str, target: TransformerConfig) -> dict[str, Any]:
    """The target, as the speculators format names it."""
    return dict(
        name_or_path=name,
        architectures=[],
        hidden_size=target.d_model,
        intermediate_size=target.d_ff,
        num_hidden_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.context_length,
    )


def own_fields(drafter) -> dict[str, Any]:
    """The family, and the fields that say how it drafts."""
    named = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    told = {"model", "target", "num_heads", "num_blocks", "hidden_width", "own_output"}
    plain = {name: value for name, value in named.items() if name not in told}
    if "topology" in plain:
        plain["topology"] = list(plain["topology"].parents)
    return {"family": type(drafter).__name__} | plain


def rebuild(family: type, own: dict[str, Any], **known):
    """A drafter of that family from what is known and from the fields of its own entry."""
    names = {f.name for f in dataclasses.fields(family)} - known.keys()
    fields = {name: value for name, value in own.items() if name in names}
    if "topology" in fields:
        fields["topology"] = Topology(tuple(fields["topology"]))
    return family(**known, **fields)


def write_layer(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """A transformer_layer_config; ValueError names a field that the architecture cannot hold."""
    written = config_to_huggingface(config, architecture)
    del written["architectures"]  # the server names its own
    return written


def read_layer(given: dict, architecture: str) -> TransformerConfig:
    """What a transformer_layer_config says, with the defaults of its architecture."""
    return config_from_huggingface(given | {"architectures": [architecture]})


def same_layer(found: TransformerConfig, wanted: TransformerConfig) -> None:
    """Raises ValueError, naming the first field, when two layers differ in what they compute."""
    for field in dataclasses.fields(wanted):
        if field.name not in ("context_length", "tied_head"):
            same_target(field.name, getattr(found, field.name), getattr(wanted, field.name))


def same_target(name: str, found, wanted) -> None:
    """Raises ValueError when a value of the file is not this target's."""
    if found != wanted:
        raise ValueError(f"it was made for another target: {name} is {found} there and must be {wanted} for this one")
