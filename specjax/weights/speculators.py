"""Trained drafters in the layout that vLLM serves, in and out: a folder of config.json and model.safetensors.

EAGLE and block heads are written in vLLM's `speculators` format (types "eagle", "eagle3" and "dflash"), Medusa's in the
layout of vLLM's own Medusa, as that format documents none. What is written there is the same function as here, or
nothing is written and the error names the field. In particular:

    feature layers    the ids count as ours do: k is what goes into block k (from 0), the k-th block's output. vLLM
                      collects them low to high; ids 0 and the last need a model of its that collects these two
    EAGLE-3           its feature is added as it is, and its output goes on before the final norm: the switches
                      `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output` are false. The embedding is
                      the target's and not in the file. `d2t` holds the target's id minus the draft id, `t2d` which of
                      the target's ids are drafted, so the ids must rise
    EAGLE-1           the format's layer has no norm before attention: only `input_norm=False` can be saved. Of
                      the speculators types, vLLM itself serves "eagle3" and "dflash"; "eagle" is the library's
    biases            one switch stands for queries, keys, values and output; those that a network has not are zeros
    block drafter     Qwen3 layers: its qk_norm must be on. The mask is a row of an embedding table in the file,
                      otherwise the target's: that of `mask_token_id`, which must be a token that no text contains
    Medusa            heads without an output matrix of their own take the target's with them in the file

Not in the format: rotary positions over part of a head, embeddings that are scaled, norms with an offset, biases of the
output head, and MLPs other than SwiGLU.

References:
    github.com/vllm-project/speculators: docs, and config.py and core.py of models/eagle3 and models/dflash.
    github.com/vllm-project/vllm: transformers_utils/configs/speculators and configs/medusa.py; model_executor/models:
    llama_eagle3.py, qwen3_dflash.py, medusa.py.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from specjax.drafters import BlockDrafter, Medusa
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import TransformerConfig, ends
from specjax.models.eagle_layer import VOCABULARY
from specjax.weights.safetensors_file import StoredTensor, stored_tensors
from specjax.weights.speculators_config import OURS, read_config, write_config
from specjax.weights.speculators_tensors import (
    entries,
    to_params,
    to_tensors,
    vocabulary_tensors,
    with_vocabulary,
)

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def save_speculator(
    path, drafter, params: Any, target_name: str, *, target_params: Any = None, mask_token_id: int | None = None
) -> None:
    """Writes a drafter and its parameters to the folder `path`, bit for bit and in their own dtype.

    The layout knows no `EagleConfig.feature_scale`: the fusion's kernel is divided by it, and comes back so.

    Args:
        path: the folder, made if it is not there.
        drafter: Eagle, EagleTree, EagleDynamic, Medusa or BlockDrafter.
        params: its parameters.
        target_name: name on the hub, or path, of the target.
        target_params: of the target; needed for a table that the file must hold: a block drafter's embedding, and the
            output head of Medusa heads without one.
        mask_token_id: for a block drafter, a token that texts do not contain.

    Raises:
        ValueError: a family or network that the layout has not, parameters of another drafter, or a missing argument.
    """
    config = write_config(drafter, target_name, mask_token_id)
    drafter.check_params(params)
    if isinstance(drafter, EagleDrafter):
        model, params = drafter.model.without_scale(params)
        drafter = dataclasses.replace(drafter, model=model)
    tensors = to_tensors(drafter, params)
    if VOCABULARY in params:
        ids = np.asarray(params[VOCABULARY])
        if (np.diff(ids) <= 0).any():
            raise ValueError(f"{VOCABULARY} must rise: t2d is a mask; sort it and the columns of the head with it")
        tensors |= vocabulary_tensors(ids, drafter.target.vocab_size)
    lent = _lent_name(drafter)
    if lent is not None:
        if target_params is None:
            raise ValueError(f"target_params are needed: the file of this {type(drafter).__name__} must hold {lent}")
        tensors[lent] = _lent(drafter.target, target_params, lent)
        if isinstance(drafter, BlockDrafter):
            tensors[lent][mask_token_id] = np.asarray(params["mask_embedding"])
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)  # comes last: a folder with one is complete
    partial = folder / "model.safetensors.partial"
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o666 & ~_umask())  # the library's own leaves it to the owner alone, and a server is another user
        os.replace(partial, folder / "model.safetensors")
    finally:
        partial.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _umask() -> int:
    """What the process takes from the permissions of new files; it can only be read by setting it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def load_speculator(path, target: TransformerConfig, *, target_params: Any = None) -> tuple[Any, dict]:
    """What `save_speculator` or another program wrote: (drafter, parameters in the target's parameter dtype).

    Args:
        path: the folder.
        target: config of the model that it drafts for.
        target_params: of the target, to compare with tables in the file that should be the target's. Needed for files
            that others wrote with such a table, and for block heads without one.

    Raises:
        ValueError: anything missing, damaged, made for another target, or not expressible here; one line.
    """
    folder = Path(path)
    config = _read_json(folder / "config.json")
    try:
        drafter = read_config(config, target)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    file = folder / "model.safetensors"
    stored = stored_tensors(file)
    try:
        tensors = _read(file, stored, _shapes(drafter), _optional(drafter))
        params = with_vocabulary(drafter, to_params(drafter, tensors), tensors)
        if isinstance(drafter, BlockDrafter):
            params["mask_embedding"] = _mask_embedding(config, target, tensors, target_params)
        name = EMBEDDING if isinstance(drafter, EagleDrafter) else _lent_name(drafter)
        if name in tensors:
            skipped = config.get("mask_token_id") if isinstance(drafter, BlockDrafter) else None
            _check_lent(target, name, tensors[name], target_params, OURS in config, skipped)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    params = jax.tree.map(jnp.asarray, params)
    drafter.check_params(params)
    return drafter, params


def _lent_name(drafter) -> str | None:
    """The tensor that the file holds though it is the target's."""
    if isinstance(drafter, BlockDrafter):
        return EMBEDDING
    return HEAD if isinstance(drafter, Medusa) and not drafter.own_output else None


def _lent(target: TransformerConfig, target_params, name: str) -> np.ndarray:
    """That tensor's values, in a copy of its own."""
    if name == EMBEDDING:
        return np.array(target_params["embedding"]["embedding"])
    return np.array(np.asarray(ends.untied_head(target, target_params)["kernel"]).T, order="C")


def _check_lent(
    target: TransformerConfig, name: str, table: np.ndarray, target_params, ours: bool, skipped: int | None
) -> None:
    if target_params is None:
        if not ours:
            raise ValueError(f"it holds {name}, which must be the target's; give target_params to compare it")
        return
    expected = _lent(target, target_params, name)
    rows = np.arange(len(expected)) != skipped
    if not np.array_equal(table[rows].astype(expected.dtype), expected[rows]):
        raise ValueError(f"{name} differs from the target's; drafters here use the target's own")


def _mask_embedding(config: dict, target: TransformerConfig, tensors: dict, target_params) -> np.ndarray:
    token = config.get("mask_token_id")
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise ValueError(f"mask_token_id must be a token from 0 to {target.vocab_size - 1}; got {token!r}")
    if EMBEDDING not in tensors and target_params is None:
        raise ValueError(f"it has no {EMBEDDING}, so the mask is the target's token {token}; give target_params")
    table = tensors[EMBEDDING] if EMBEDDING in tensors else _lent(target, target_params, EMBEDDING)
    return table[token].astype(target.param_dtype)


def _shapes(drafter) -> dict[str, tuple[int, ...]]:
    """All tensors that the file may hold."""
    target = drafter.target
    shapes = {entry.name: entry.shape for entry in entries(drafter)}
    if isinstance(drafter, EagleDrafter):
        shapes[EMBEDDING] = (target.vocab_size, target.d_model)
        if drafter.model.draft_vocab is not None:
            shapes |= {"d2t": (drafter.model.draft_vocab,), "t2d": (target.vocab_size,)}
    lent = _lent_name(drafter)
    return shapes if lent is None else {**shapes, lent: (target.vocab_size, target.d_model)}


def _optional(drafter) -> set[str]:
    return set() if isinstance(drafter, Medusa) else {EMBEDDING, "t2d"}


def _read(file: Path, stored: dict[str, StoredTensor], shapes: dict, optional: set[str]) -> dict[str, np.ndarray]:
    """The tensors of the file, which must be these."""
    for name, shape in shapes.items():
        if name not in stored and name not in optional:
            raise ValueError(f"tensor {name} is missing")
        if name in stored and stored[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)}; got {list(stored[name].shape)}")
    extra = next((name for name in stored if name not in shapes), None)
    if extra is not None:
        raise ValueError(f"tensor {extra} is not one of this drafter's")
    kinds = {"d2t": "I64", "t2d": "BOOL"}
    tensors = {name: tensor.read() for name, tensor in stored.items() if name not in kinds}
    with safe_open(file, framework="numpy") as opened:
        for name in kinds.keys() & stored.keys():
            if stored[name].kind != kinds[name]:
                raise ValueError(f"{name} must have dtype {kinds[name]}; got {stored[name].kind}")
            tensors[name] = opened.get_tensor(name)
    return tensors


def _read_json(file: Path) -> dict:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no saved speculator in {file.parent}: it lacks {file.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object; got {type(config).__name__}")
    return config
