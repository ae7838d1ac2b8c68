"""Pretrained weights from a GGUF file, dequantized tensor by tensor.

    file                                       parameter tree
    token_embd.weight        [V, D]            embedding/embedding         as it is
    blk.0.ffn_up.weight      [F, D]            layer_0/mlp/up/kernel       turned to [in, out]
    blk.0.attn_q.weight      [heads * H, D]    layer_0/attention/query     turned; Llama: each head's rows put in order
    blk.0.attn_norm.weight   [D]               layer_0/attention_norm      as it is; Gemma: less the 1 that was added

Llama files pair the rotated dimensions of a head as neighbours (0, 1), (2, 3), ...; here and in the other architectures
the first half is paired with the second.
"""

import dataclasses
import os
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from gguf.quants import dequantize

from specjax.data.gguf_metadata import metadata_of, open_gguf, read_metadata
from specjax.models.config import TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.weights.floating_dtype import floating_dtype
from specjax.weights.gguf_config import config_from_gguf

__all__ = ["load_gguf", "read_metadata"]

_SLAB = 1 << 22  # elements dequantized at a time; bounds what is held in float32 beside the result


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Where a tensor goes.

    Attributes:
        path: in the parameter tree.
        shape: in the file, as numpy orders it.
        turned: stored [out, in], wanted [in, out].
        heads: of Llama's queries or keys, whose rows are to be put in order.
        offset: what the file has added.
    """

    path: str
    shape: tuple[int, ...]
    turned: bool = False
    heads: int | None = None
    offset: float = 0.0


def load_gguf(path: str | os.PathLike, dtype: Any = "float32") -> LanguageModel:
    """The model of a GGUF file.

    Args:
        path: the file.
        dtype: of parameters and activations; None for float32.

    Raises:
        ValueError: a truncated file, an unknown architecture, a tensor that is missing, unknown or of a wrong shape, or
            a quantization that the gguf package does not read; one line that names it.
    """
    dtype = floating_dtype("float32" if dtype is None else dtype)
    reader = open_gguf(path)
    try:
        found = {tensor.name: tensor for tensor in reader.tensors}
        config = _read_config(reader, found, path, dtype)
        wanted = expected_tensors(config, llama=reader.get_field("general.architecture").contents() == "llama")
        _check(found, wanted)
        arrays = {}
        # The largest first, while there is room.
        for name in sorted(wanted, key=lambda name: -found[name].n_elements):
            arrays[wanted[name].path] = jnp.asarray(_read(path, found[name], wanted[name], config))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from None
    return LanguageModel(config=config, params=traverse_util.unflatten_dict(arrays, sep="/"))


def expected_tensors(config: TransformerConfig, llama: bool = False) -> dict[str, _Tensor]:
    """The tensors of a GGUF file for this model, by name; `llama`: with Llama's order of queries and keys."""
    c, tensors = config, {}

    def linear(name, path, out, width, bias, heads=None):
        tensors[f"{name}.weight"] = _Tensor(f"{path}/kernel", (out, width), turned=True, heads=heads)
        if bias:
            tensors[f"{name}.bias"] = _Tensor(f"{path}/bias", (out,), heads=heads)

    def norm(name, path, width=c.d_model):
        tensors[f"{name}.weight"] = _Tensor(f"{path}/scale", (width,), offset=c.norm_offset)

    tensors["token_embd.weight"] = _Tensor("embedding/embedding", (c.vocab_size, c.d_model))
    norm("output_norm", "final_norm")
    if not c.tied_head:
        linear("output", "head", c.vocab_size, c.d_model, c.head_bias)
    for i in range(c.num_layers):
        block, layer = f"blk.{i}", f"layer_{i}"
        attention, mlp = f"{layer}/attention", f"{layer}/mlp"
        for name, path, heads in (("q", "query", c.num_heads), ("k", "key", c.num_kv_heads)):
            order = heads if llama else None
            linear(f"{block}.attn_{name}", f"{attention}/{path}", heads * c.head_dim, c.d_model, c.qkv_bias, order)
            if c.qk_norm:
                norm(f"{block}.attn_{name}_norm", f"{attention}/{path}_norm", c.head_dim)
        linear(f"{block}.attn_v", f"{attention}/value", c.num_kv_heads * c.head_dim, c.d_model, c.qkv_bias)
        linear(f"{block}.attn_output", f"{attention}/output", c.d_model, c.num_heads * c.head_dim, c.attention_bias)
        linear(f"{block}.ffn_gate", f"{mlp}/gate", c.d_ff, c.d_model, c.mlp_bias)
        linear(f"{block}.ffn_up", f"{mlp}/up", c.d_ff, c.d_model, c.mlp_bias)
        linear(f"{block}.ffn_down", f"{mlp}/down", c.d_model, c.d_ff, c.mlp_bias)
        norm(f"{block}.attn_norm", f"{layer}/attention_norm")
        norm(f"{block}.ffn_norm", f"{layer}/mlp_norm")
        if c.norm_position == "sandwich":
            norm(f"{block}.post_attention_norm", f"{layer}/attention_out_norm")
            norm(f"{block}.post_ffw_norm", f"{layer}/mlp_out_norm")
    return tensors


def _read_config(reader: gguf.GGUFReader, found: dict, path, dtype) -> TransformerConfig:
    factors = found.pop("rope_freqs.weight", None)
    if factors is not None:
        factors = dequantize(factors.data, factors.tensor_type)
    metadata = metadata_of(reader, path, without="tokenizer.")
    embedding = found.get("token_embd.weight")
    rows = int(embedding.shape[-1]) if embedding is not None else 1  # a missing one is reported with the others
    return config_from_gguf(metadata, found, rows, factors, dtype)


def _check(found: dict, wanted: dict[str, _Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise ValueError(f"tensor {name} is missing")
        shape = tuple(int(n) for n in reversed(found[name].shape))
        if shape != tensor.shape:
            raise ValueError(f"tensor {name} must be {list(tensor.shape)}; got {list(shape)}")
    for name in found:
        if name not in wanted:
            raise ValueError(f"tensor {name} is unknown: the architecture has none of that name")


def _read(path, tensor, wanted: _Tensor, config: TransformerConfig) -> np.ndarray:
    """The tensor as the parameter tree holds it; the file is read, not mapped, so that its pages need no memory."""
    rows, width = (1, *wanted.shape)[-2:]
    row_bytes = tensor.n_bytes // rows
    out = np.empty((width, rows) if wanted.turned else (rows, width), config.param_dtype)
    step = max(1, _SLAB // width)
    with open(path, "rb") as file:
        file.seek(tensor.data_offset)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = np.fromfile(file, np.uint8, count * row_bytes).reshape(count, row_bytes)
            try:
                slab = dequantize(raw, tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise ValueError(f"tensor {tensor.name} is of type {kind}, which gguf cannot dequantize") from None
            slab = slab - np.float32(wanted.offset) if wanted.offset else slab
            if wanted.turned:
                out[:, first : first + count] = slab.T
            else:
                out[first : first + count] = slab
    if wanted.heads is not None:
        out = out[:, _halves_of_pairs(wanted.heads, config)]
    return out if len(wanted.shape) == 2 else out[0]


def _halves_of_pairs(heads: int, config: TransformerConfig) -> np.ndarray:
    """[heads * H] for each output of a projection, the row of the file: a head's even rows first, then the odd ones."""
    rotated = np.arange(config.rotary_dim).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([rotated, np.arange(config.rotary_dim, config.head_dim)])
    return (np.arange(heads)[:, None] * config.head_dim + head).reshape(-1)
