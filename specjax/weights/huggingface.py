"""Models as Hugging Face folders: config.json with model.safetensors, or with an index and shards."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specjax.models import LanguageModel, Transformer, TransformerConfig
from specjax.weights.architectures import architecture_of, config_from_huggingface, config_to_huggingface
from specjax.weights.checksums import check_sha256
from specjax.weights.floating_dtype import floating_dtype
from specjax.weights.safetensors_file import StoredTensor, same_values, stored_tensors, write_tensors
from specjax.weights.tensor_names import Tensor, full_name, is_derived, tensors_of

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def load_huggingface(path, dtype=None, *, sha256: Mapping[str, str] | None = None) -> LanguageModel:
    """The model in a folder, tensor by tensor: beside the parameters no more than one tensor is in memory.

    Args:
        path: the folder.
        dtype: of parameters and activations (default: that of the file; of several, the one that holds them all).
        sha256: digests, in hexadecimal, that files of the folder must have, by file name.

    Raises:
        ValueError: anything wrong with the folder, in one line and before a tensor is read: an architecture or option
            that is not supported; a file that is missing, damaged, a pickle or of another digest; an index that points
            outside the folder; a tensor that is missing, unknown or of the wrong shape; an output head that differs
            from the embedding although the config ties them.
    """
    folder = Path(path)
    dtype = dtype if dtype is None else floating_dtype(dtype)
    about = _read_json(folder / CONFIG)
    try:
        architecture, config = architecture_of(about), config_from_huggingface(about)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    files = _files(folder)
    check_sha256(folder, sha256 or {})
    stored = {full_name(name, architecture): tensor for name, tensor in _stored(folder, files).items()}
    tensors, shapes = tensors_of(config, architecture), _parameter_shapes(config)
    _check_tensors(folder, config, architecture, tensors, shapes, stored)
    if dtype is None:
        held = {stored[tensor.name].dtype for tensor in tensors}
        dtype = floating_dtype(functools.reduce(jnp.promote_types, held))
    params = {}
    for tensor in tensors:
        widths = tuple(shapes[path][-1] for path in tensor.paths)
        params |= zip(tensor.paths, _load(stored[tensor.name], tensor.transposed, widths, dtype), strict=True)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    return LanguageModel(config, traverse_util.unflatten_dict(params, sep="/"))


def save_huggingface(
    path,
    model: LanguageModel,
    architecture: str,
    *,
    further: Mapping | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model as transformers does: the tensors' names, order of axes and dtype are those of the architecture.

    Args:
        path: the folder, made if it is not there; other files in it, such as a tokenizer's, are left alone.
        model: what to write.
        architecture: one of `architectures.ARCHITECTURES`, such as "LlamaForCausalLM".
        further: more entries for config.json, such as `eos_token_id`.
        max_shard_bytes: size above which the tensors are split over several files.

    Raises:
        ValueError: the architecture is unknown or has no such model; parameters that are not those of the config.
    """
    model.check("model")
    about = {**(further or {}), **config_to_huggingface(model.config, architecture)}
    params = traverse_util.flatten_dict(model.params, sep="/")
    tensors = {tensor.name: tensor for tensor in tensors_of(model.config, architecture)}
    all_shapes = {
        name: _stored_shape(tensor, {path: params[path].shape for path in tensor.paths})
        for name, tensor in tensors.items()
    }
    dtype = model.config.param_dtype

    def values(name):
        parts = [np.asarray(params[path]) for path in tensors[name].paths]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return array.T if tensors[name].transposed else array

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(all_shapes, dtype.itemsize, max_shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    for name, shapes in zip(names, shards, strict=True):
        write_tensors(folder / name, shapes, dtype, values)
    # What an earlier save left must not be taken for this model.
    (folder / (SINGLE if len(shards) > 1 else INDEX)).unlink(missing_ok=True)
    if len(shards) > 1:
        size = sum(int(np.prod(shape)) for shape in all_shapes.values()) * dtype.itemsize
        where = {tensor: name for name, shapes in zip(names, shards, strict=True) for tensor in shapes}
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    _write_json(folder / CONFIG, about)


def _load(stored: StoredTensor, transposed: bool, widths: tuple[int, ...], dtype) -> tuple[jax.Array, ...]:
    """The parameters of one tensor. The host's copy is gone before the converted one is made."""
    raw = jax.block_until_ready(jax.device_put(stored.read(), may_alias=False))
    return jax.block_until_ready(_convert(raw, transposed, widths, dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _convert(raw, transposed: bool, widths: tuple[int, ...], dtype):
    """The parameters that a tensor holds side by side, of these widths."""
    whole = (raw.T if transposed else raw).astype(dtype)
    return tuple(jnp.split(whole, np.cumsum(widths)[:-1], -1))


def _parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    tree = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def _stored_shape(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor in its file."""
    parts = [shapes[path] for path in tensor.paths]
    shape = (*parts[0][:-1], sum(part[-1] for part in parts))
    return shape[::-1] if tensor.transposed else shape


def _files(folder: Path) -> dict[str, set[str] | None]:
    """The files with weights, and which tensors the index puts into each (None: there is no index)."""
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    if not (folder / INDEX).exists():
        pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
        hint = f"; {pickled[0]} is a pickle and is not read" if pickled else ""
        raise ValueError(f"there is neither {SINGLE} nor {INDEX} in {folder}{hint}")
    where = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map of tensors to files")
    files: dict[str, set[str]] = {}
    for tensor, name in where.items():
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ValueError(f"{folder / INDEX} puts {tensor} into {name!r}, which is not a file in the folder")
        files.setdefault(name, set()).add(tensor)
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which {INDEX} names")
    return files


def _stored(folder: Path, files: Mapping[str, set[str] | None]) -> dict[str, StoredTensor]:
    """All tensors by name."""
    found: dict[str, StoredTensor] = {}
    for name, listed in files.items():
        held = stored_tensors(folder / name)
        differing = sorted(held.keys() ^ listed) if listed is not None else []
        if differing:
            verb = "holds" if differing[0] in held else "lacks"
            raise ValueError(f"{folder / name} {verb} tensor {differing[0]}, against what {INDEX} says")
        found |= held
    return found


def _check_tensors(folder, config, architecture, tensors, shapes, stored: dict[str, StoredTensor]) -> None:
    wanted = {tensor.name: _stored_shape(tensor, shapes) for tensor in tensors}
    for name, shape in wanted.items():
        if name not in stored:
            hint = ", and tie_word_embeddings is false" if name == "lm_head.weight" else ""
            raise ValueError(f"{folder} lacks tensor {name} of {architecture}{hint}")
        if stored[name].shape != shape:
            raise ValueError(f"{stored[name].file}: {name} must be {list(shape)}; got {list(stored[name].shape)}")
        _ = stored[name].dtype  # must be a known one
    for name, tensor in stored.items():
        if config.tied_head and name == "lm_head.weight":
            if not same_values(tensor, stored[tensors[0].name]):
                raise ValueError(
                    f"{folder}: {name} differs from the embedding, but {CONFIG} ties them; set tie_word_embeddings "
                    "to false there if the head is meant to be its own"
                )
        elif name not in wanted and not is_derived(name):
            raise ValueError(f"{tensor.file} holds tensor {tensor.name}, which {architecture} with this config has not")


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[dict[str, tuple[int, ...]]]:
    shards, size = [{}], 0
    for name, shape in shapes.items():
        more = int(np.prod(shape)) * itemsize
        if shards[-1] and size + more > limit:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += more
    return shards


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"there is no {path.name} in {path.parent}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object; got {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
