"""Folders of transformers: the same logits by every route, and every tensor back bit for bit."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Independent, IndependentTree
from specjax.models import LanguageModel, TransformerConfig, init_cache
from specjax.models.transformer import apply
from specjax.topology import Topology
from specjax.weights import load_huggingface, load_weights, save_huggingface
from specjax.weights.safetensors_file import StoredTensor, stored_tensors, write_tensors

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
RUN = jax.jit(apply, static_argnums=0)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@functools.cache
def model(name: str) -> LanguageModel:
    return load_huggingface(FIXTURES / name, "float32")


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(FIXTURES / name / "logits.npz") as saved:
        return saved["tokens"], saved["logits"]


def architecture(name: str) -> str:
    return json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    """The whole text; and padded prompts that go on through the cache in steps of one and several tokens."""
    lm, (tokens, logits) = model(name), expected(name)
    assert logits.std() > 0.5 and tokens.shape == (2, 24)
    whole, _, _ = RUN(lm.config, lm.params, jnp.asarray(tokens))
    np.testing.assert_allclose(whole, logits, rtol=0, atol=1e-4)

    lengths = np.array([8, 3])  # the second row is padded with tokens that must not matter
    prompts = np.where(np.arange(8) < lengths[:, None], tokens[:, :8], (tokens[:, :8] + 1) % lm.config.vocab_size)
    found, cache, _ = RUN(lm.config, lm.params, jnp.asarray(prompts), init_cache(lm.config, 2, 28))
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(found[row, :n], logits[row, :n], rtol=0, atol=1e-4)
    cache = cache.rollback(jnp.asarray(lengths, jnp.int32))
    for width in (4, 1, 1, 1, 4, 1, 4):
        columns = lengths[:, None] + np.arange(width)
        step = np.take_along_axis(tokens, columns, 1)
        found, cache, _ = RUN(lm.config, lm.params, jnp.asarray(step), cache)
        np.testing.assert_allclose(found, np.take_along_axis(logits, columns[..., None], 1), rtol=0, atol=1e-4)
        lengths = lengths + width
    assert lengths.tolist() == [24, 19]


@pytest.mark.parametrize("name, field, value", [
    ("gemma3", "sliding_window", 6), ("gemma3", "sliding_rotary_base", 60.0), ("gemma3", "attention_scale", None),
    ("mistral", "sliding_window", 6), ("qwen2", "sliding_layers", (0, 1, 2)), ("llama3", "rotary_scaling", None),
    ("llama_biased", "rotary_scaling", None), ("llama_biased", "norm_eps", 1e-6), ("gpt2", "mlp", "relu"),
])  # fmt: skip
def test_the_logits_notice_what_is_misread(name, field, value):
    lm, (tokens, logits) = model(name), expected(name)
    config = dataclasses.replace(lm.config, **{field: value})
    whole, _, _ = RUN(config, lm.params, jnp.asarray(tokens))
    assert np.abs(np.asarray(whole) - logits).max() > 1e-3


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    files = sorted(folder.glob("*.safetensors"))
    return {n: (t.kind, t.shape, t.read().tobytes()) for file in files for n, t in stored_tensors(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_comes_back_bit_for_bit(name, tmp_path):
    lm = load_huggingface(FIXTURES / name)
    save_huggingface(tmp_path / "again", lm, architecture(name), further={"eos_token_id": 2})
    assert contents(tmp_path / "again") == contents(FIXTURES / name)
    again = load_huggingface(tmp_path / "again")
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 2


def test_shards(tmp_path):
    assert (FIXTURES / "qwen3" / INDEX).exists() and len(list((FIXTURES / "qwen3").glob("*.safetensors"))) > 1
    lm = model("qwen3")
    save_huggingface(tmp_path, lm, "Qwen3ForCausalLM")
    (tmp_path / "tokenizer.json").write_text("{}")
    for limit, sharded in ((16_000, True), (1, True), (10**9, False)):
        save_huggingface(tmp_path, lm, "Qwen3ForCausalLM", max_shard_bytes=limit)
        assert ((tmp_path / INDEX).exists(), (tmp_path / SINGLE).exists()) == (sharded, not sharded)
        jax.tree.map(np.testing.assert_array_equal, load_huggingface(tmp_path).params, lm.params)
        if sharded:
            index = json.loads((tmp_path / INDEX).read_text())
            assert index["metadata"]["total_size"] == 4 * lm.num_params
            for file in set(index["weight_map"].values()):
                assert sum(t.read().nbytes for t in stored_tensors(tmp_path / file).values()) <= max(limit, 64 * 16 * 4)
    assert (tmp_path / "tokenizer.json").exists() and not list(tmp_path.glob("*.partial"))


def test_dtypes():
    assert load_huggingface(FIXTURES / "smollm2").config.param_dtype == jnp.bfloat16
    wide = model("smollm2")
    assert wide.config.dtype == wide.config.param_dtype == jnp.float32
    rounded = load_huggingface(FIXTURES / "llama3", jnp.bfloat16)
    rounded.check("target")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), rounded.params, model("llama3").params
    )
    with jax.enable_x64(True):
        double = load_huggingface(FIXTURES / "gpt2", "float64")
        double.check("target")
    with pytest.raises(ValueError, match="dtype float64 needs jax_enable_x64"):
        load_huggingface(FIXTURES / "gpt2", "float64")
    with pytest.raises(ValueError, match="dtype must be a floating-point one, .*; got int8"):
        load_huggingface(FIXTURES / "gpt2", "int8")


def test_a_file_of_several_dtypes_is_read_in_the_one_that_holds_them_all(tmp_path):
    shutil.copytree(FIXTURES / "smollm2", tmp_path, dirs_exist_ok=True)
    stored = stored_tensors(tmp_path / SINGLE)
    norm = "model.norm.weight"
    write_tensors(tmp_path / "norm.safetensors", {norm: (16,)}, np.dtype("float32"), lambda n: np.full(16, 0.1, "f"))
    rest = {n: t.shape for n, t in stored.items() if n != norm}
    write_tensors(tmp_path / "rest.safetensors", rest, jnp.dtype("bfloat16"), lambda n: stored[n].read())
    where = {norm: "norm.safetensors"} | dict.fromkeys(rest, "rest.safetensors")
    (tmp_path / SINGLE).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    lm = load_huggingface(tmp_path)
    assert lm.config.param_dtype == jnp.float32 and float(lm.params["final_norm"]["scale"][0]) == np.float32(0.1)


TREE = Topology.from_paths([(0, 0, 0), (0, 1), (1, 0)])


@pytest.mark.parametrize("shape", [2, pytest.param(TREE, marks=pytest.mark.slow)], ids=["chain", "tree"])
def test_speculative_text_is_the_target_only_text(shape):
    """In float64, past the window, and through trees, whose branches must not take places in it."""
    with jax.enable_x64(True):
        target = load_huggingface(FIXTURES / "gemma3", "float64")
        lower = dataclasses.replace(target.config, num_layers=1, sliding_layers=(0,))
        params = {name: part for name, part in target.params.items() if name not in ("layer_1", "layer_2")}
        prompts = [row[:n] for row, n in zip(expected("gemma3")[0].tolist(), (9, 2), strict=True)]
        options = dict(max_new_tokens=20, buffer_length=32, verifier="coupled")
        plain = generate(target, prompts, **options)
        drafter = Independent(lower, shape) if isinstance(shape, int) else IndependentTree(lower, shape)
        found = generate(target, prompts, drafter=drafter, drafter_params=params, **options)
        np.testing.assert_array_equal(np.stack(found.tokens), np.stack(plain.tokens))
    assert 0 < found.counts.accepted.sum() < found.counts.drafted.sum() and found.counts.rounds.max() < 19
    assert min(len({*row.tolist()}) for row in plain.tokens) > 5


def test_one_tensor_is_in_memory_at_a_time(monkeypatch):
    read, held, alive_at_read = StoredTensor.read, [], []

    def watched(self):
        alive_at_read.append(sum(reference() is not None for reference in held))
        array = read(self)
        held.append(weakref.ref(array.base if array.base is not None else array))
        return array

    monkeypatch.setattr(StoredTensor, "read", watched)
    load_huggingface(FIXTURES / "gpt2", "bfloat16")
    # JAX may let go of the last one a little later.
    assert len(alive_at_read) == 28 and max(alive_at_read) <= 1


PEAK = """
import resource, sys
from specjax.weights import load_huggingface
import jax, jax.numpy as jnp
jax.block_until_ready(jnp.ones((1000, 1000)).T.astype("bfloat16"))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
params = load_huggingface(sys.argv[1], sys.argv[2]).params
print(peak() - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
def test_peak_memory_is_the_weights_and_little_more(tmp_path):
    """A process of its own loads 252 MB, then half of that. The largest tensor is a tenth; 60 MB are for compiling."""
    config = TransformerConfig(vocab_size=8192, d_model=768, num_layers=8, num_heads=8, d_ff=2048, tied_head=True)
    make = jax.jit(lambda key: LanguageModel.init(config, key).params)
    save_huggingface(tmp_path, LanguageModel(config, make(jax.random.key(0))), "LlamaForCausalLM")
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", PEAK, tmp_path, dtype]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        peak, weights = map(int, found)
        assert weights > 1.2e8 and peak < 1.15 * weights + 60e6


def test_load_weights_takes_folders_and_gguf_files(tmp_path, monkeypatch):
    lm = load_weights(FIXTURES / "smollm2")
    assert lm.config == load_huggingface(FIXTURES / "smollm2").config
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match="model.bin is neither a folder with config.json nor a .gguf file"):
        load_weights(other)
    gguf = tmp_path / "model.GGUF"
    gguf.write_bytes(b"")
    calls = []
    fake = types.SimpleNamespace(load_gguf=lambda *arguments: calls.append(arguments) or lm)
    monkeypatch.setitem(sys.modules, "specjax.weights.gguf_file", fake)
    assert load_weights(gguf) is lm and load_weights(gguf, "bfloat16") is lm
    assert calls == [(gguf,), (gguf, "bfloat16")]
