"""Folders with a fault: named in one line, before a tensor is read. And what looks like a fault but is none."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.weights import load_huggingface, load_weights, save_huggingface
from specjax.weights.checksums import sha256_of
from specjax.weights.safetensors_file import StoredTensor, stored_tensors, write_tensors

FIXTURES = Path(__file__).parent / "fixtures"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def rewrite(folder: Path, change) -> None:
    """The weights again, after `change` on the dict of their arrays."""
    arrays = {name: tensor.read() for name, tensor in stored_tensors(folder / SINGLE).items()}
    change(arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    write_tensors(folder / SINGLE, shapes, np.dtype("float32"), lambda name: arrays[name])


def config_change(**changes):
    def change(folder):
        about = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(about))

    return change


def index_change(change):
    def changed(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return changed


def truncate(file, to):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:to])


def zipped_pickle(folder):
    with zipfile.ZipFile(folder / SINGLE, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))


NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
SHARD = "model-00002-of-"
FAULTS = [
    ("llama3", lambda f: (f / "config.json").unlink(), "there is no config.json in"),
    ("llama3", lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    ("llama3", lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not JSON"),
    ("llama3", lambda f: (f / "config.json").write_text("[]"), "config.json must hold an object; got list"),
    ("llama3", config_change(architectures=["T5Model"]), "config.json: architecture 'T5Model' is not supported"),
    ("llama3", config_change(hidden_size=-1), "config.json: hidden_size must be an integer of at least 1"),
    ("llama3", lambda f: (f / SINGLE).unlink(), "there is neither model.safetensors nor model.safetensors.index.json"),
    ("llama3", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle and is not read"),
    ("llama3", truncate(SINGLE, -3), "model.safetensors is damaged or not a safetensors file"),
    ("llama3", truncate(SINGLE, 100), "model.safetensors is damaged or not a safetensors file"),
    ("llama3", truncate(SINGLE, 5), "model.safetensors is damaged or not a safetensors file"),
    ("llama3", truncate(SINGLE, 0), "model.safetensors is damaged or not a safetensors file"),
    ("llama3", lambda f: (f / SINGLE).write_bytes(pickle.dumps({"a": [1.0] * 9})), "is a pickle of PyTorch"),
    ("llama3", zipped_pickle, "is a pickle of PyTorch"),
    ("llama3", lambda f: rewrite(f, lambda a: a.pop(NORM)), f"lacks tensor {NORM} of LlamaForCausalLM"),
    ("llama3", lambda f: rewrite(f, lambda a: a.pop(HEAD)), "lacks tensor lm_head.weight .* tie_word_embeddings is"),
    ("llama3", lambda f: rewrite(f, lambda a: a.update(surplus=np.ones(2, "f"))), "holds tensor surplus, which Llama"),
    ("llama3", lambda f: rewrite(f, lambda a: a.update({NORM: np.ones(9, "f")})), rf"{NORM} must be \[16\]; got \[9\]"),
    ("llama3", lambda f: rewrite(f, lambda a: a.update({EMBED: a[EMBED].T})), r"must be \[64, 16\]; got \[16, 64\]"),
    ("llama3", config_change(tie_word_embeddings=True), "lm_head.weight differs from the embedding, but config.json"),
    ("llama3", config_change(num_hidden_layers=1), "holds tensor model.layers.1.* which LlamaForCausalLM with this"),
    ("llama3", config_change(num_hidden_layers=3), "lacks tensor model.layers.2.input_layernorm.weight"),
    ("qwen3", lambda f: next(f.glob(f"{SHARD}*")).unlink(), f"lacks {SHARD}.*, which model.safetensors.index.json"),
    ("qwen3", lambda f: truncate(next(f.glob(f"{SHARD}*")).name, -1)(f), f"{SHARD}.* is damaged"),
    ("qwen3", lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    ("qwen3", index_change(lambda m: m.update({EMBED: "../model.safetensors"})), "is not a file in the folder"),
    ("qwen3", index_change(lambda m: m.update({EMBED: "/etc/passwd"})), "'/etc/passwd', which is not a file in"),
    ("qwen3", index_change(lambda m: m.update({EMBED: ".."})), "is not a file in the folder"),
    ("qwen3", index_change(lambda m: m.pop(EMBED)), f"holds tensor {EMBED}, against what model.safetensors.index.json"),
    ("qwen3", index_change(lambda m: m.update(ghost=m[EMBED])), "lacks tensor ghost, against what"),
]  # fmt: skip


@pytest.mark.parametrize("name, damage, message", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_named_before_a_tensor_is_read(name, damage, message, tmp_path, monkeypatch):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    damage(folder)
    monkeypatch.setattr(StoredTensor, "read", lambda self: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match=message) as caught:
        load_huggingface(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="there is no config.json in nowhere"):
        load_huggingface("nowhere")


def test_a_dtype_that_is_no_floating_one(tmp_path):
    shutil.copytree(FIXTURES / "llama3", tmp_path, dirs_exist_ok=True)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ValueError, match="has dtype I32; known are F64, F32, F16, BF16"):
        load_huggingface(tmp_path)


def test_digests():
    files = {file: sha256_of(FIXTURES / "llama3" / file) for file in ("config.json", SINGLE)}
    load_huggingface(FIXTURES / "llama3", sha256=files | {SINGLE: files[SINGLE].upper()})
    with pytest.raises(ValueError, match=f"{SINGLE} must have sha256 {'0' * 64}; got {files[SINGLE]}"):
        load_huggingface(FIXTURES / "llama3", sha256=files | {SINGLE: "0" * 64})
    with pytest.raises(ValueError, match="there is no file other.safetensors"):
        load_huggingface(FIXTURES / "llama3", sha256={"other.safetensors": "0" * 64})


def test_digests_of_a_model_whatever_its_kind(tmp_path):
    """As `load_weights` takes them: a folder's files by name, or the one file."""
    digest = sha256_of(FIXTURES / "llama3" / SINGLE)
    load_weights(FIXTURES / "llama3", sha256={SINGLE: digest})
    with pytest.raises(ValueError, match=f"{SINGLE} must have sha256 {'0' * 64}; got {digest}: download it again"):
        load_weights(FIXTURES / "llama3", sha256={SINGLE: "0" * 64})
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="model.gguf must have sha256 00; got [0-9a-f]{64}: download it again"):
        load_weights(tmp_path / "model.gguf", sha256={"model.gguf": "00"})
    with pytest.raises(ValueError, match="there is no file other.gguf in .*model.gguf, whose sha256 was given"):
        load_weights(tmp_path / "model.gguf", sha256={"other.gguf": "00"})


@pytest.mark.parametrize("dtype", ["fp16", "", "float", "int8", 3, (1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_dtype_that_there_is_not(tmp_path, kind, dtype):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    path = FIXTURES / "llama3" if kind == "folder" else tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="^dtype (must be a floating-point one|float64 needs jax_enable_x64)") as error:
        load_weights(path, dtype)
    assert "\n" not in str(error.value)


def test_tensors_that_follow_from_the_config_are_passed_over(tmp_path):
    shutil.copytree(FIXTURES / "smollm2", tmp_path / "tied")
    shutil.copytree(FIXTURES / "gpt2", tmp_path / "gpt2")
    stored = stored_tensors(tmp_path / "tied" / SINGLE)
    names = {HEAD: EMBED} | {name: name for name in stored}
    shapes = {name: stored[source].shape for name, source in names.items()}
    write_tensors(tmp_path / "t", shapes, jnp.dtype("bfloat16"), lambda name: stored[names[name]].read())
    (tmp_path / "t").rename(tmp_path / "tied" / SINGLE)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_huggingface(tmp_path / "tied").params,
        load_huggingface(FIXTURES / "smollm2").params,
    )

    def published(arrays):
        """GPT-2 as it was published: without its prefix, with the causal mask of each layer."""
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 32, 32), "f")

    rewrite(tmp_path / "gpt2", published)
    again, first = (load_huggingface(folder / "gpt2").params for folder in (tmp_path, FIXTURES))
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_saving_refuses_before_it_writes(tmp_path):
    lm = load_huggingface(FIXTURES / "llama3")
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot hold"):
        save_huggingface(tmp_path / "a", lm, "GPT2LMHeadModel")
    with pytest.raises(ValueError, match="the model's parameters lack head/kernel"):
        save_huggingface(tmp_path / "a", lm.replace(params={**lm.params, "head": {}}), "LlamaForCausalLM")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="parameters of dtype int32 cannot be written"):
        write_tensors(tmp_path / "b", {}, np.dtype("int32"), lambda name: np.zeros(1))
    with pytest.raises(ValueError, match=r"x must be float32\[2\]; got float32\[3\]"):
        write_tensors(tmp_path / "b", {"x": (2,)}, np.dtype("float32"), lambda name: np.zeros(3, "f"))
    assert not list(tmp_path.iterdir())
