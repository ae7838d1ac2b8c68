"""GGUF files: a model that was written is the model that is loaded, and a wrong file ends in one line."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from specjax.models import LanguageModel, LinearRotaryScaling, RotaryScaling, Transformer, TransformerConfig
from specjax.models.positions import rotary_frequencies
from specjax.weights import gguf_file
from specjax.weights.gguf_file import expected_tensors, load_gguf, read_metadata

Kind = gguf.GGMLQuantizationType

_SIZES = dict(vocab_size=11, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=64, context_length=64)
_GEMMA = dict(
    num_layers=7,
    head_dim=16,
    norm_offset=1.0,
    norm_position="sandwich",
    mlp="geglu",
    qk_norm=True,
    attention_scale=16**-0.5,
    embedding_scale=32**0.5,
    rotary_base=1_000_000.0,
    sliding_window=3,
    sliding_layers=(0, 1, 2, 3, 4, 6),
    sliding_rotary_base=10_000.0,
)
CONFIGS = {
    "llama": TransformerConfig(**_SIZES),
    "llama own head, biases": TransformerConfig(
        **_SIZES, tied_head=False, qkv_bias=True, attention_bias=True, mlp_bias=True, norm_eps=1e-5
    ),
    "llama partly rotated": TransformerConfig(**_SIZES, rotary_fraction=0.5),
    "qwen2": TransformerConfig(**_SIZES, qkv_bias=True, rotary_base=1_000_000.0),
    "qwen2 stretched": TransformerConfig(**_SIZES, qkv_bias=True, rotary_scaling=LinearRotaryScaling(4.0)),
    "qwen3": TransformerConfig(**_SIZES, qk_norm=True, head_dim=16, tied_head=False),
    "gemma3": TransformerConfig(**_SIZES | _GEMMA),
}


def random_model(config, seed=0):
    """Every parameter random, norms and biases too, so that none can be left out unnoticed."""
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    random = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.3 * random.standard_normal(leaf.shape), leaf.dtype)  # noqa: E731
    return LanguageModel(config=config, params=jax.tree.map(draw, shapes))


def as_llama_stores(rows, heads):
    """A head's rows in the order of interleaved rotary positions, all of the head rotated."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write(path, model, architecture, kind=Kind.F32, metadata=(), tensors=lambda tensors: tensors, permuted=None):
    """The file of a model as converters write it; `metadata` and `tensors` change what is written."""
    c, writer = model.config, gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.num_layers,
        "feed_forward_length": c.d_ff,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.freq_base": c.rotary_base,
        "rope.dimension_count": c.rotary_dim,
        "attention.sliding_window": c.sliding_window,
    }
    if isinstance(c.rotary_scaling, LinearRotaryScaling):
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.rotary_scaling.factor}
    for key, value in (values | dict(metadata)).items():
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}.get(type(value), None)
        if value is not None:
            (add or writer.add_uint32)(f"{architecture}.{key}", value)
    llama = architecture == "llama" if permuted is None else permuted
    flat = {
        jax.tree_util.keystr(key, simple=True, separator="/"): np.asarray(leaf, np.float32)
        for key, leaf in jax.tree.leaves_with_path(model.params)
    }
    stored = {}
    for name, tensor in expected_tensors(c).items():
        array = flat.pop(tensor.path)
        array = array.T if tensor.path.endswith("kernel") else array
        if llama and (".attn_q." in name or ".attn_k." in name):
            array = as_llama_stores(array, c.num_heads if ".attn_q." in name else c.num_kv_heads)
        stored[name] = array + (c.norm_offset if name.endswith("norm.weight") else 0)
    assert not flat, f"the model has {list(flat)} besides"
    for name, array in tensors(stored).items():
        if array.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            data = quantize(np.ascontiguousarray(array, np.float32), kind)
            writer.add_tensor(name, data, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [10, 0, 7, 7, 8, 2, 2, 4, 6, 1]])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_that_was_written_is_loaded(name, tmp_path):
    model, architecture = random_model(CONFIGS[name]), name.split()[0]
    if name == "llama partly rotated":  # only the rotated half of each head is stored in another order

        def stored(tensors):
            for kernel in (kernel for kernel in tensors if ".attn_q." in kernel or ".attn_k." in kernel):
                heads = tensors[kernel].reshape(-1, 8, 32)
                tensors[kernel] = np.concatenate([heads[:, [0, 2, 1, 3]], heads[:, 4:]], 1).reshape(-1, 32)
            return tensors

        write(tmp_path / "m.gguf", model, architecture, tensors=stored, permuted=False)
    else:
        write(tmp_path / "m.gguf", model, architecture)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert loaded.config == model.config
    loaded.check("target")
    atol = 1e-6 if model.config.norm_offset else 0  # Gemma's 1 is added and taken away in float32
    for (path, one), other in zip(jax.tree.leaves_with_path(model.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol, err_msg=str(path))


def test_the_order_of_queries_and_keys_matters(tmp_path):
    """What the tests above would not see if the order made no difference."""
    model = random_model(CONFIGS["llama"])
    logits = jax.jit(lambda params: model.replace(params=params)(TOKENS)[0])
    right = load_gguf(write(tmp_path / "right.gguf", model, "llama"))
    wrong = load_gguf(write(tmp_path / "wrong.gguf", model, "llama", permuted=False))
    np.testing.assert_allclose(logits(model.params), logits(right.params), rtol=0, atol=0)
    assert np.abs(logits(model.params) - logits(wrong.params)).max() > 0.1


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_quantized_weights_are_near(name, kind, tmp_path):
    model = random_model(CONFIGS[name])
    loaded = load_gguf(write(tmp_path / "m.gguf", model, name, kind))
    error = {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 1e-2}.get(kind.name, 0.2)
    for one, other in zip(jax.tree.leaves(model.params), jax.tree.leaves(loaded.params), strict=True):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=0, atol=error)
    assert np.any(np.asarray(model.params["embedding"]["embedding"] != loaded.params["embedding"]["embedding"]))


READABLE = [kind for kind in Kind if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_quantization_that_gguf_reads(kind, tmp_path, monkeypatch):
    """Random bits as the weights of one layer, in slabs smaller than the tensors."""
    monkeypatch.setattr(gguf_file, "_SLAB", 3 * 256)
    config = TransformerConfig(7, d_model=256, num_layers=1, num_heads=2, d_ff=256)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random, raw = np.random.default_rng(0), {}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    for key, value in dict(context_length=8, embedding_length=256, block_count=1, feed_forward_length=256).items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_uint32("qwen2.attention.head_count", 2)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    for name, tensor in expected_tensors(config).items():
        if len(tensor.shape) == 1:
            writer.add_tensor(name, np.ones(tensor.shape, np.float32))
        else:
            raw[name] = random.integers(0, 256, (tensor.shape[0], 256 // block * size), np.uint8)
            writer.add_tensor(name, raw[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        params = load_gguf(tmp_path / "m.gguf").params
        down, table = (dequantize(raw[name], kind) for name in ("blk.0.ffn_down.weight", "token_embd.weight"))
    np.testing.assert_array_equal(params["layer_0"]["mlp"]["down"]["kernel"], down.T)
    np.testing.assert_array_equal(params["embedding"]["embedding"], table)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_that_is_asked_for(dtype, tmp_path):
    model = random_model(CONFIGS["gemma3"])
    loaded = load_gguf(write(tmp_path / "m.gguf", model, "gemma3"), dtype)
    assert loaded.config == dataclasses.replace(model.config, dtype=dtype, param_dtype=dtype)
    loaded.check("target")
    for one, other in zip(jax.tree.leaves(model.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_allclose(one, other.astype(jnp.float32), rtol=1e-2, atol=1e-5)
    with pytest.raises(ValueError, match="floating"):
        load_gguf(tmp_path / "m.gguf", "int8")


@pytest.mark.parametrize("scaling", [RotaryScaling(32.0, 1.0, 4.0, 8192), RotaryScaling(4.0, 1.0, 2.5, 512)])
def test_llama_3_scaling_is_read_off_its_factors(scaling, tmp_path):
    config = dataclasses.replace(CONFIGS["llama"], head_dim=64, rotary_base=500_000.0, rotary_scaling=scaling)
    plain = rotary_frequencies(dataclasses.replace(config, rotary_scaling=None))
    factors = plain / rotary_frequencies(config)
    assert ((factors > 1) & (factors < scaling.factor)).sum() >= 2
    model = random_model(config)
    with_factors = lambda tensors: tensors | {"rope_freqs.weight": factors}  # noqa: E731
    loaded = load_gguf(write(tmp_path / "m.gguf", model, "llama", tensors=with_factors))
    assert loaded.config == config
    with_factors = lambda tensors: tensors | {"rope_freqs.weight": np.linspace(1, 3, 32)}  # noqa: E731
    write(tmp_path / "other.gguf", model, "llama", tensors=with_factors)
    with pytest.raises(ValueError, match="other.gguf: rope_freqs.weight is none"):
        load_gguf(tmp_path / "other.gguf")


def test_factors_of_one_are_no_scaling(tmp_path):
    ones = lambda tensors: tensors | {"rope_freqs.weight": np.ones(4)}  # noqa: E731
    loaded = load_gguf(write(tmp_path / "m.gguf", random_model(CONFIGS["llama"]), "llama", tensors=ones))
    assert loaded.config == CONFIGS["llama"]


def test_which_layers_slide(tmp_path):
    model = random_model(CONFIGS["gemma3"])

    def load(**window):
        metadata = {f"attention.{key}": value for key, value in window.items()}
        return load_gguf(write(tmp_path / "m.gguf", model, "gemma3", metadata=metadata)).config

    assert load(sliding_window_pattern=3).sliding_layers == (0, 1, 3, 4, 6)
    assert load(sliding_window_pattern=[False, True] * 4).sliding_layers == (1, 3, 5)
    assert load(sliding_window=None).sliding_window is None
    model = random_model(CONFIGS["llama"])
    window = {"attention.sliding_window": 3}
    assert load_gguf(write(tmp_path / "l.gguf", model, "llama", metadata=window)).config.sliding_window is None
    window |= {"attention.sliding_window_pattern": [True, False]}
    assert load_gguf(write(tmp_path / "l.gguf", model, "llama", metadata=window)).config.sliding_layers == (0,)


def _without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


WRONG = {
    "tensor blk.1.ffn_up.weight is missing": dict(tensors=_without("blk.1.ffn_up.weight")),
    "tensor token_embd.weight is missing": dict(tensors=_without("token_embd.weight")),
    "tensor blk.0.attn_k.weight must be [16, 32]; got [32, 32]": dict(
        tensors=lambda tensors: tensors | {"blk.0.attn_k.weight": np.ones((32, 32))}
    ),
    "tensor blk.9.ffn_up.weight is unknown": dict(
        tensors=lambda tensors: tensors | {"blk.9.ffn_up.weight": np.ones((64, 32))}
    ),
    "tensor blk.0.attn_q.bias is unknown|tensor blk.1.attn_q.bias is missing|tensor blk.0.attn_k.bias is missing": dict(
        tensors=lambda tensors: tensors | {"blk.0.attn_q.bias": np.ones(32)}
    ),
    "the metadata's block_count is missing": dict(metadata={"block_count": None}),
    "metadata's attention.head_count must be one integer of at least 1": dict(
        metadata={"attention.head_count": [4, 2]}
    ),
    "block_count is 4000000000, but there are": dict(metadata={"block_count": 4_000_000_000}),
    "attention.key_length must be one integer of at least 1; got 0": dict(metadata={"attention.key_length": 0}),
    "must be attention.key_length": dict(metadata={"attention.value_length": 4}),
    "expert_count 8 is not supported": dict(metadata={"expert_count": 8}),
    "rope.scaling.type 'yarn' is not supported": dict(metadata={"rope.scaling.type": "yarn"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_said_in_one_line(message, tmp_path):
    path = write(tmp_path / "m.gguf", random_model(CONFIGS["llama"]), "llama", **WRONG[message])
    with pytest.raises(ValueError) as error:
        load_gguf(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text and any(one in text for one in message.split("|")), text


def test_an_unknown_architecture_is_named(tmp_path):
    write(tmp_path / "m.gguf", random_model(CONFIGS["llama"]), "mamba")
    with pytest.raises(ValueError, match="m.gguf: architecture 'mamba' is not supported; known are llama"):
        load_gguf(tmp_path / "m.gguf")


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    content = write(tmp_path / "m.gguf", random_model(CONFIGS["llama"]), "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 10, 24, 100, *range(200, 3000, 97), len(content) // 2, len(content) - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match="cut.gguf") as error:
            load_gguf(cut)
        assert "\n" not in str(error.value)


def test_a_file_with_changed_bytes_is_loaded_or_refused_in_one_line(tmp_path):
    content = write(tmp_path / "m.gguf", random_model(CONFIGS["llama"]), "llama").read_bytes()
    random, refused = np.random.default_rng(0), 0
    for place in random.integers(0, 2500, 150):  # the metadata and the list of tensors
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        (tmp_path / "changed.gguf").write_bytes(changed)
        try:
            load_gguf(tmp_path / "changed.gguf")
        except ValueError as error:
            refused += 1
            assert "changed.gguf" in str(error) and "\n" not in str(error)
    assert refused > 30


def test_other_files_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(1000))
    for path in (tmp_path / "m.gguf", tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            load_gguf(path)


def test_one_part_of_several_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="one of 2 parts"):
        load_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_metadata_are_plain_values(tmp_path):
    values = {"words": ["a", "", "ünï"], "numbers": [1, -2, 3], "scores": [0.5, 2.0], "flags": [True, False]}
    values |= {"text": "数", "number": 7, "on": True}
    for path, change in ((tmp_path / "one.gguf", 0), (tmp_path / "one.gguf", 1)):  # the second is not the first again
        values["number"] += change
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in values.items():
            add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint64}
            add[type(value)](key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        found = read_metadata(path)
        assert {key: found[key] for key in values} == values
        assert type(found["number"]) is int and type(found["flags"][0]) is bool and type(found["scores"][0]) is float
