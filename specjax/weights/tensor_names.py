"""The tensors of each architecture of Hugging Face, and the parameters that they hold.

    self_attn.q_proj.weight   [out, in]        layer_i/attention/query/kernel   [in, out], transposed
    attn.c_attn.weight        [in, 3 * out]    GPT-2's query, key and value side by side, not transposed
"""

import dataclasses
import re

from specjax.models.config import TransformerConfig

_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
# Tables that older versions stored with the weights although they follow from the config.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(bias|masked_bias)$")
GPT2_PREFIX = "transformer."


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        name: in the file.
        paths: of the parameters that it holds, concatenated along their last axis.
        transposed: whether it is stored the other way round.
    """

    name: str
    paths: tuple[str, ...]
    transposed: bool = False


def tensors_of(config: TransformerConfig, architecture: str) -> list[Tensor]:
    """All tensors of a model, in the order of the layers."""
    if architecture == "GPT2LMHeadModel":
        tensors = _gpt2(config)
    else:
        tensors = _llama_like(config)
    if not config.tied_head:
        tensors.append(Tensor("lm_head.weight", ("head/kernel",), transposed=True))
    return tensors


def is_derived(name: str) -> bool:
    """Whether a tensor may be passed over, because the config says the same."""
    return _DERIVED.search(name) is not None


def full_name(name: str, architecture: str) -> str:
    """The name by which `tensors_of` knows a tensor: GPT-2 was published without its prefix."""
    if architecture != "GPT2LMHeadModel" or name.startswith((GPT2_PREFIX, "lm_head.")):
        return name
    return GPT2_PREFIX + name


def _llama_like(config: TransformerConfig) -> list[Tensor]:
    tensors = [Tensor("model.embed_tokens.weight", ("embedding/embedding",))]
    for i in range(config.num_layers):

        def add(name, path, i=i, transposed=False):
            tensors.append(Tensor(f"model.layers.{i}.{name}", (f"layer_{i}/{path}",), transposed))

        def linear(name, path, bias, add=add):
            add(f"{name}.weight", f"{path}/kernel", transposed=True)
            if bias:
                add(f"{name}.bias", f"{path}/bias")

        add("input_layernorm.weight", "attention_norm/scale")
        for part, name in _ATTENTION.items():
            bias = config.attention_bias if part == "output" else config.qkv_bias
            linear(f"self_attn.{name}", f"attention/{part}", bias)
        if config.qk_norm:
            add("self_attn.q_norm.weight", "attention/query_norm/scale")
            add("self_attn.k_norm.weight", "attention/key_norm/scale")
        if config.norm_position == "sandwich":
            add("post_attention_layernorm.weight", "attention_out_norm/scale")
            add("pre_feedforward_layernorm.weight", "mlp_norm/scale")
            add("post_feedforward_layernorm.weight", "mlp_out_norm/scale")
        else:
            add("post_attention_layernorm.weight", "mlp_norm/scale")
        for part in ("gate", "up", "down"):
            linear(f"mlp.{part}_proj", f"mlp/{part}", config.mlp_bias)
    return [*tensors, Tensor("model.norm.weight", ("final_norm/scale",))]


def _gpt2(config: TransformerConfig) -> list[Tensor]:
    tensors = [
        Tensor("transformer.wte.weight", ("embedding/embedding",)),
        Tensor("transformer.wpe.weight", ("position_embedding/embedding",)),
    ]
    for i in range(config.num_layers):

        def add(name, weight, *paths, i=i):
            for kind, leaf in (("weight", weight), ("bias", "bias")):
                full = tuple(f"layer_{i}/{path}/{leaf}" for path in paths)
                tensors.append(Tensor(f"transformer.h.{i}.{name}.{kind}", full))

        add("ln_1", "scale", "attention_norm")
        add("attn.c_attn", "kernel", "attention/query", "attention/key", "attention/value")
        add("attn.c_proj", "kernel", "attention/output")
        add("ln_2", "scale", "mlp_norm")
        add("mlp.c_fc", "kernel", "mlp/up")
        add("mlp.c_proj", "kernel", "mlp/down")
    ends = (("weight", "scale"), ("bias", "bias"))
    return tensors + [Tensor(f"transformer.ln_f.{kind}", (f"final_norm/{leaf}",)) for kind, leaf in ends]
