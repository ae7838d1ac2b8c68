"""Names and shapes of a speculator's tensors, and where each lies in our parameter trees.

A linear layer's weight is [out, in] in the file and [in, out] here. What a file holds besides is made from or checked
against something else: `d2t` and `t2d` (EAGLE-3's reduced vocabulary), and tables that the target lends.
"""

import dataclasses
from typing import Any

import numpy as np

from specjax.drafters import BlockDrafter, Medusa
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import TransformerConfig
from specjax.models.eagle_layer import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: in the file.
        path: in the parameter tree, "a/b/c"; None for a bias that the layout asks for and the network does not have:
            zeros, which do not change the function.
        shape: in the file.
        swapped: whether the two halves that a weight reads stand the other way round in the file.
    """

    name: str
    path: str | None
    shape: tuple[int, ...]
    swapped: bool = False

    def swap(self, array: np.ndarray) -> np.ndarray:
        """A weight of the file with its halves as here, or the way back."""
        return np.roll(array, self.shape[1] // 2, 1) if self.swapped else array


def entries(drafter: EagleDrafter | Medusa | BlockDrafter) -> list[Entry]:
    """Every tensor that holds trained parameters of the drafter."""
    if isinstance(drafter, Medusa):
        return _medusa(drafter)
    if isinstance(drafter, BlockDrafter):
        return _block(drafter)
    return _eagle1(drafter) if drafter.model.version == 1 else _eagle3(drafter)


def to_tensors(drafter, params: Any) -> dict[str, np.ndarray]:
    """Trained parameters as the file holds them, bit for bit."""
    tensors = {}
    for entry in entries(drafter):
        if entry.path is None:
            tensors[entry.name] = np.zeros(entry.shape, drafter.target.param_dtype)
            continue
        array = params
        for step in entry.path.split("/"):
            array = array[step]
        tensors[entry.name] = np.ascontiguousarray(entry.swap(np.asarray(array).T))
    return tensors


def to_params(drafter, tensors: dict[str, np.ndarray]) -> dict:
    """The way back, in the target's parameter dtype.

    Raises:
        ValueError: a bias that the drafter does not have and that is not zero.
    """
    params: dict = {}
    for entry in entries(drafter):
        array = tensors[entry.name]
        if entry.path is None:
            if array.any():
                raise ValueError(f"{entry.name} is not zero, but this target's drafters have no such bias")
            continue
        *steps, leaf = entry.path.split("/")
        node = params
        for step in steps:
            node = node.setdefault(step, {})
        node[leaf] = np.ascontiguousarray(entry.swap(array).T).astype(drafter.target.param_dtype)
    return params


def vocabulary_tensors(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t`, what is added to a draft id to get the target's, and `t2d`, which of the target's ids can be drafted."""
    mask = np.zeros(vocab_size, bool)
    mask[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": mask}


def draft_ids(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The target's ids of the draft vocabulary.

    Raises:
        ValueError: `d2t` and `t2d` that contradict each other.
    """
    ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(tensors["t2d"]), ids):
        raise ValueError("t2d does not name the tokens that d2t leads to")
    return ids.astype(np.int32)


def _eagle1(drafter: EagleDrafter) -> list[Entry]:
    """Without a norm before attention. The format's linear layer reads the embedding first, ours the feature."""
    width = drafter.target.d_model
    fusion = Entry("fusion_fc.weight", "join/kernel", (width, 2 * width), swapped=True)
    return [fusion, *_layer("transformer.", "block/", drafter.model.layer, width)]


def _eagle3(drafter: EagleDrafter) -> list[Entry]:
    c, width = drafter.model.layer, drafter.target.d_model
    return [
        *_linear("fc", "fusion", width, width * len(drafter.feature_layers)),
        *_norms("", {"layers.0.input_layernorm": "embedding_norm", "layers.0.hidden_norm": "feature_norm"}, width),
        *_layer("layers.0.", "", c, 2 * width),
        *_norms("", {"norm": "final_norm"}, width),
        *_linear("lm_head", "head", c.vocab_size, width),
    ]


def _block(drafter: BlockDrafter) -> list[Entry]:
    c = drafter.config
    found = _linear("fc", "fuse", c.d_model, c.d_model * len(drafter.feature_layers))
    found += _norms("", {"hidden_norm": "fuse_norm", "norm": "final_norm"}, c.d_model)
    for i in range(c.num_layers):
        found += _norms(f"layers_{i}/", {f"layers.{i}.input_layernorm": "attention_norm"}, c.d_model)
        found += _layer(f"layers.{i}.", f"layers_{i}/", c, c.d_model)
    return found


def _medusa(drafter: Medusa) -> list[Entry]:
    found, width = [], drafter.target.d_model
    for k in range(drafter.num_heads):
        for i in range(drafter.num_blocks):
            found += _linear(f"blocks.{k}.layers.{i}", f"head_{k + 1}/block_{i}/update", width, width)
        if drafter.own_output:
            found += _linear(f"lm_heads.{k}", f"head_{k + 1}/output", drafter.target.vocab_size, width)
    return found


def _layer(name: str, path: str, c: TransformerConfig, width: int) -> list[Entry]:
    """Attention, which reads `width` numbers, and MLP with its norm, of a Llama or Qwen layer."""
    biased = c.qkv_bias or c.attention_bias  # one switch for all four in the layout
    heads = {"q": ("query", c.num_heads), "k": ("key", c.num_kv_heads), "v": ("value", c.num_kv_heads)}
    found = []
    for short, (long, count) in heads.items():
        found += _linear(
            f"{name}self_attn.{short}_proj", f"{path}attention/{long}", count * c.head_dim, width, biased, c.qkv_bias
        )
    found += _linear(
        f"{name}self_attn.o_proj", f"{path}attention/output", c.d_model, c.num_heads * c.head_dim, biased,
        c.attention_bias,
    )  # fmt: skip
    if c.qk_norm:
        norms = {f"{name}self_attn.q_norm": "query_norm", f"{name}self_attn.k_norm": "key_norm"}
        found += _norms(f"{path}attention/", norms, c.head_dim)
    found += _norms(path, {f"{name}post_attention_layernorm": "mlp_norm"}, c.d_model)
    for side, out, into in (("gate", c.d_ff, c.d_model), ("up", c.d_ff, c.d_model), ("down", c.d_model, c.d_ff)):
        found += _linear(f"{name}mlp.{side}_proj", f"{path}mlp/{side}", out, into, c.mlp_bias, c.mlp_bias)
    return found


def _linear(name: str, path: str, out: int, into: int, biased: bool = False, own_bias: bool = False) -> list[Entry]:
    """A weight, and a bias if the layout has one; the network's own, or zeros."""
    weight = [Entry(f"{name}.weight", f"{path}/kernel", (out, into))]
    return weight + [Entry(f"{name}.bias", f"{path}/bias" if own_bias else None, (out,))] * biased


def _norms(path: str, names: dict[str, str], width: int) -> list[Entry]:
    return [Entry(f"{theirs}.weight", f"{path}{ours}/scale", (width,)) for theirs, ours in names.items()]


def with_vocabulary(drafter, params: dict, tensors: dict[str, np.ndarray]) -> dict:
    """The parameters of a reduced vocabulary added, if the drafter has one."""
    if isinstance(drafter, EagleDrafter) and drafter.model.draft_vocab is not None:
        return {**params, VOCABULARY: draft_ids(tensors)}
    return params
