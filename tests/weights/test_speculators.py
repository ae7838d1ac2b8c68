"""Speculators out and in: what is served from the folder is the same function, and it comes back bit for bit."""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import BlockDrafter, Eagle, EagleDynamic, EagleTree, Medusa, NGram
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import LanguageModel, TransformerConfig, ends
from specjax.models.config import RotaryScaling
from specjax.models.eagle_layer import EagleConfig
from specjax.models.transformer import Block, apply
from specjax.protocol import FIXED
from specjax.topology import Topology
from specjax.weights.speculators import load_speculator, save_speculator
from tests.weights import served_modules

VOCAB, MASK = 11, 7
LLAMA = TransformerConfig(
    VOCAB, 16, 4, 4, num_kv_heads=2, d_ff=24, context_length=64, norm_eps=1e-5, rotary_base=500.0,
    rotary_scaling=RotaryScaling(4.0, 1.0, 4.0, 32), tied_head=False,
)  # fmt: skip
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True, tied_head=True, rotary_scaling=None)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=8)
TREE = Topology.from_paths([(0, 0), (0, 1), (1,)])
KEPT = jnp.array([1, 2, 4, 7, 9, 10], jnp.int32)
TEXT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])

DRAFTERS = {
    "eagle1": EagleTree(EagleConfig(QWEN2, input_norm=False), TREE, FIXED),
    "eagle1_other_heads": Eagle(EagleConfig(LLAMA, num_heads=2, d_ff=12, input_norm=False), 2),
    "eagle3": Eagle(EagleConfig(LLAMA, 3, (1, 2, 4)), 3),
    "eagle3_first_layers": Eagle(EagleConfig(LLAMA, 3, (0, 1, 3)), 2),
    "eagle3_reduced": EagleTree(EagleConfig(LLAMA, 3, (1, 2, 3), 2, d_ff=12, draft_vocab=6), TREE, FIXED),
    "eagle3_biased": EagleDynamic(EagleConfig(QWEN2, 3, (1, 2, 3), num_heads=4), 6, 3, 2),
    "eagle3_qk_norm": Eagle(EagleConfig(QWEN3, 3, (1, 2, 3), num_kv_heads=4), 1),
    "block": BlockDrafter(QWEN3, 2, (0, 2, 4), 3),
    "block_of_llama": BlockDrafter(LLAMA, 1, (2, 3), 2, qk_norm=True),
    "block_biased": BlockDrafter(dataclasses.replace(QWEN3, qkv_bias=True, tied_head=True), 1, (1, 3), 2),
    "medusa": Medusa(QWEN2, TREE, num_heads=3, num_blocks=2),
    "medusa_own_output": Medusa(LLAMA, Topology.chain(2), FIXED, own_output=True),
}
REDUCED = DRAFTERS["eagle3_reduced"]
SCALED = dataclasses.replace(REDUCED, model=dataclasses.replace(REDUCED.model, feature_scale=(2.0, 4.0, 8.0)))
EVERY = pytest.mark.parametrize("name", DRAFTERS)


def in_dtype(config, dtype):
    """The same drafter for the target in another dtype."""
    change = lambda c: dataclasses.replace(c, dtype=dtype, param_dtype=dtype)  # noqa: E731
    if isinstance(config, EagleDrafter):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, target=change(config.target)))
    return dataclasses.replace(config, target=change(config.target))


@functools.cache
def trained(drafter):
    """(parameters, the target's parameters): numbers that no initialisation gives, norms and biases included."""
    eagle = isinstance(drafter, EagleDrafter)
    shapes = jax.eval_shape(drafter.model._init_layer if eagle else drafter.init_params, jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(x):
        numbers = rng.normal(size=x.shape)
        return jnp.asarray(0.4 * numbers if x.ndim > 1 else 1 + 0.3 * numbers, x.dtype)

    params = jax.tree.map(draw, dict(shapes))
    if eagle and drafter.model.draft_vocab:
        params["draft_to_target"] = KEPT
    drafter.check_params(params)
    target = jax.eval_shape(lambda key: LanguageModel.init(drafter.target, key).params, jax.random.key(0))
    return params, jax.tree.map(draw, dict(target))


def saved(folder, drafter, verifier="some/target"):
    params, target_params = trained(drafter)
    save_speculator(folder, drafter, params, verifier, target_params=target_params, mask_token_id=MASK)
    return params, target_params


def assert_bit_equal(a, b):
    same = lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, dict(a), dict(b)))


@pytest.mark.parametrize(
    "name, dtype",
    [(name, "float32") for name in DRAFTERS] + [(name, "bfloat16") for name in ("eagle3_reduced", "block", "medusa")],
)
def test_what_is_saved_comes_back(tmp_path, name, dtype):
    drafter = in_dtype(DRAFTERS[name], dtype)
    params, target_params = saved(tmp_path / "a", drafter)
    for options in ({}, {"target_params": target_params}):
        found, back = load_speculator(tmp_path / "a", drafter.target, **options)
        assert found == drafter
        assert_bit_equal(params, back)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["torch_dtype"] == dtype
    verifier = config.get("speculators_config", config)["verifier"]
    assert verifier["name_or_path"] == "some/target" and verifier["num_hidden_layers"] == 4
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]


@EVERY
def test_a_file_without_our_own_entry_gives_the_same_network(tmp_path, name):
    drafter = DRAFTERS[name]
    params, target_params = saved(tmp_path, drafter)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["specjax"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, back = load_speculator(tmp_path, drafter.target, target_params=target_params)
    assert found.draft_length == (drafter.num_heads if isinstance(drafter, Medusa) else drafter.draft_length)
    assert found.topology == Topology.chain(found.draft_length)
    assert_bit_equal(params, back)


@functools.partial(jax.jit, static_argnums=0)
def target_side(drafter, params):
    """(the features that our drafter reads of TEXT, what enters each block of the target by its number from 0).

    The entry behind the last block's is what that block gives.
    """
    entered = {}

    def watch(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if isinstance(context.module, Block):
            number = int(context.module.name.removeprefix("layer_"))
            entered.update({number: args[0][0], number + 1: out[0][0]})
        return out

    with nn.intercept_methods(watch):
        raw = apply(drafter.target, params, TEXT, feature_layers=drafter.feature_layers)[2]
    return raw, entered


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name.startswith("eagle3")] + ["scaled"])
def test_the_served_eagle3_is_the_same_function(tmp_path, name):
    drafter = SCALED if name == "scaled" else DRAFTERS[name]
    params, target_params = saved(tmp_path, drafter)
    folder, model = served_modules.Folder(tmp_path), drafter.model
    raw, entered = target_side(drafter, target_params)

    @jax.jit
    def twice(params, raw):
        """Logits behind pairs with true features, and with the outputs in their place."""
        out, logits = model.start(params, target_params, raw)[:, :-1], []
        for _ in range(2):
            out, _ = model.run(params, target_params, out, TEXT[:, 1:], model.init_cache(1, TEXT.shape[1]))
            logits.append(model.logits(params, target_params, out)[0])
        return logits

    theirs = served_modules.eagle3_combine(folder, entered)[:-1]
    embedded = np.asarray(target_params["embedding"]["embedding"], np.float64)[TEXT[0, 1:]]
    for logits in np.asarray(twice(params, raw)):
        expected, theirs = served_modules.eagle3(folder, theirs, embedded, VOCAB)
        assert np.isfinite(logits).sum() == len(logits) * model.num_draft_tokens
        np.testing.assert_allclose(logits, expected, atol=2e-4)
        assert np.ptp(expected[np.isfinite(expected)]) > 1


@pytest.mark.parametrize("name", ["eagle1", "eagle1_other_heads"])
def test_the_served_eagle1_is_the_same_function(tmp_path, name):
    drafter = DRAFTERS[name]
    params, target_params = saved(tmp_path, drafter)
    folder, model = served_modules.Folder(tmp_path), drafter.model
    raw = target_side(drafter, target_params)[0]

    @jax.jit
    def twice(params, raw):
        """Outputs and logits of pairs with true features, and with the outputs in their place."""
        out, found = model.start(params, target_params, raw)[:, :-1], []
        for _ in range(2):
            out, _ = model.run(params, target_params, out, TEXT[:, 1:], model.init_cache(1, TEXT.shape[1]))
            found.append((out[0], model.logits(params, target_params, out)[0]))
        return found

    theirs = np.asarray(ends.normalise(drafter.target, target_params, raw)[0, :-1], np.float64)
    embedded = np.asarray(target_params["embedding"]["embedding"], np.float64)[TEXT[0, 1:]]
    head = np.asarray(ends.untied_head(drafter.target, target_params)["kernel"], np.float64)
    for out, logits in twice(params, raw):
        theirs = served_modules.eagle1(folder, theirs, embedded)
        np.testing.assert_allclose(np.asarray(out), theirs, atol=2e-4)
        np.testing.assert_allclose(np.asarray(logits), theirs @ head, atol=1e-3)


@pytest.mark.parametrize("name", ["block", "block_biased", "block_of_llama"])
def test_the_served_block_head_is_the_same_function(tmp_path, name):
    drafter = DRAFTERS[name]
    params, target_params = saved(tmp_path, drafter)
    folder, config = served_modules.Folder(tmp_path), drafter.target
    raw, entered = target_side(drafter, target_params)
    anchors = jnp.array([[1, 4, 9]])
    logits = jax.jit(drafter.logits)(params, target_params, raw, TEXT, anchors)[0]
    head = np.asarray(ends.untied_head(config, target_params)["kernel"], np.float64)
    for anchor, ours in zip(anchors[0].tolist(), np.asarray(logits), strict=True):
        before = {i: x[:anchor] for i, x in entered.items()}
        expected = served_modules.dflash(folder, before, int(TEXT[0, anchor]), head)
        np.testing.assert_allclose(ours, expected, atol=2e-4)
        assert np.ptp(expected) > 1


@pytest.mark.parametrize("name", ["medusa", "medusa_own_output"])
def test_the_served_medusa_is_the_same_function(tmp_path, name):
    drafter = DRAFTERS[name]
    params, target_params = saved(tmp_path, drafter)
    features = target_side(drafter, target_params)[0]
    normalised = np.asarray(ends.normalise(drafter.target, target_params, features)[0], np.float64)
    expected = served_modules.medusa(served_modules.Folder(tmp_path), normalised)
    ours = jax.jit(drafter.teacher_forced)(params, target_params, features, TEXT)
    assert len(ours) == len(expected) == drafter.num_heads
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine[0]), theirs[: mine.shape[1]], atol=2e-4)
        assert np.ptp(theirs) > 1


def test_the_vocabulary_maps_say_what_the_format_documents(tmp_path):
    saved(tmp_path, DRAFTERS["eagle3_reduced"])
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert (tensors["d2t"] + np.arange(6)).tolist() == KEPT.tolist()
    assert np.flatnonzero(tensors["t2d"]).tolist() == KEPT.tolist()


def test_the_mask_is_the_only_row_that_is_not_the_targets(tmp_path):
    params, target_params = saved(tmp_path, DRAFTERS["block"])
    table = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    expected = np.array(target_params["embedding"]["embedding"])
    expected[MASK] = params["mask_embedding"]
    np.testing.assert_array_equal(table, expected)


def test_biases_that_the_network_has_not_are_zeros_and_must_be(tmp_path):
    drafter = DRAFTERS["eagle3_biased"]
    saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]["attention_bias"] is True
    assert not tensors["layers.0.self_attn.o_proj.bias"].any() and tensors["layers.0.self_attn.q_proj.bias"].any()
    save_file(tensors | {"layers.0.self_attn.o_proj.bias": np.ones(16, np.float32)}, file)
    fails("o_proj.bias is not zero", load_speculator, tmp_path, drafter.target)


def fails(match, call, *args, **options):
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


def like(name, **changes):
    """That drafter for a target with other fields."""
    drafter = DRAFTERS[name]
    target = dataclasses.replace(drafter.target, **changes)
    if isinstance(drafter, EagleDrafter):
        return dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, target=target))
    return dataclasses.replace(drafter, target=target)


@pytest.mark.parametrize(
    "match, drafter",
    [
        ("input_norm: version 1 can be saved without", Eagle(EagleConfig(LLAMA), 2)),
        ("cannot hold qk_norm True", like("eagle1", qk_norm=True)),
        ("feature_layers must be 3 layers", Eagle(EagleConfig(LLAMA, 3, (1, 2)), 2)),
        ("feature_layers must be 3 layers, low to high", Eagle(EagleConfig(LLAMA, 3, (2, 1, 3)), 2)),
        ("feature_layers must stand low to high", dataclasses.replace(DRAFTERS["block"], feature_layers=(2, 1))),
        ("cannot hold qk_norm False", BlockDrafter(LLAMA, 1, (1,), 2)),
        ("cannot hold mlp_bias True", like("block", mlp_bias=True)),
        ("cannot hold head_bias True", like("block", head_bias=True)),
        ("cannot hold head_bias True", like("eagle3", head_bias=True)),
        ("head_bias True", like("medusa", head_bias=True)),
        ("hidden_width 4", dataclasses.replace(DRAFTERS["medusa"], hidden_width=4)),
        ("cannot hold norm 'layernorm'", like("eagle3", norm="layernorm")),
        ("cannot hold norm_offset 1.0", like("eagle3", norm_offset=1.0)),
        ("cannot hold embedding_scale 4.0", like("eagle3", embedding_scale=4.0)),
        ("cannot hold rotary_fraction 0.5", like("eagle3", rotary_fraction=0.5)),
        ("cannot hold mlp 'geglu'", like("block", mlp="geglu")),
        ("cannot hold attention_scale 0.1", like("eagle3", attention_scale=0.1)),
        ("qk_norm together with qkv_bias", like("eagle3_qk_norm", qkv_bias=True)),
        ("NGram has no speculators layout", NGram(3)),
    ],
)  # fmt: skip
def test_what_the_format_has_not_is_refused_by_name(tmp_path, match, drafter):
    fails(match, save_speculator, tmp_path, drafter, None, "some/target", mask_token_id=MASK)
    assert not list(tmp_path.iterdir())


def test_saving_asks_for_what_the_file_must_hold(tmp_path):
    for name, table in (("block", "embed_tokens.weight"), ("medusa", "lm_head.weight")):
        params, _ = trained(DRAFTERS[name])
        fails(f"must hold {table}", save_speculator, tmp_path, DRAFTERS[name], params, "t", mask_token_id=MASK)
    fails("mask_token_id must be a token", save_speculator, tmp_path, DRAFTERS["block"], None, "t")
    fails("mask_token_id must be a token", save_speculator, tmp_path, DRAFTERS["block"], None, "t", mask_token_id=VOCAB)
    params, _ = trained(DRAFTERS["eagle3"])
    fails("the EAGLE drafter's", save_speculator, tmp_path, DRAFTERS["eagle3_reduced"], params, "t")
    drafter = DRAFTERS["eagle3_reduced"]
    shuffled = trained(drafter)[0] | {"draft_to_target": KEPT[::-1]}
    fails("draft_to_target must rise", save_speculator, tmp_path, drafter, shuffled, "t")


@pytest.mark.parametrize("name", ["eagle3", "block", "medusa"])
def test_another_target_is_noticed(tmp_path, name):
    saved(tmp_path, DRAFTERS[name])
    target = DRAFTERS[name].target
    for match, changes in {
        "hidden_size is 16 there and must be 32": dict(d_model=32),
        "vocab_size is 11 there and must be 12": dict(vocab_size=12),
        "num_hidden_layers is 4 there and must be 5": dict(num_layers=5),
    }.items():
        fails(match, load_speculator, tmp_path, dataclasses.replace(target, **changes))
    if name != "medusa":
        for match, changes in {
            "norm_eps": dict(norm_eps=1e-6),
            "rotary_base": dict(rotary_base=1e4),
            "rotary_scaling": dict(rotary_scaling=None),
            "d_ff": dict(d_ff=32),
            "num_kv_heads": dict(num_kv_heads=4),
            "bias": dict(qkv_bias=True),
        }.items():
            fails(match, load_speculator, tmp_path, dataclasses.replace(target, **changes))


@pytest.mark.parametrize(
    "name, match, changes",
    [
        ("eagle3", "'mlp' is not supported; known are eagle, eagle3", {"speculators_model_type": "mlp"}),
        ("eagle1", "layernorms must be false", {"layernorms": True}),
        ("eagle3", "norm_before_residual must be false", {"norm_before_residual": True}),
        ("eagle3", "norm_before_fc must be false", {"norm_before_fc": True}),
        ("eagle3", "feature_layers must be target layers", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        ("eagle3", "draft_vocab must be 1 to 11", {"draft_vocab_size": 12}),
        ("eagle3", "is incomplete", {"draft_vocab_size": "6"}),
        ("eagle3", "is incomplete", {"transformer_layer_config": None}),
        ("eagle3", "of Qwen3ForCausalLM, where", {"transformer_layer_config": {"model_type": "qwen3"}}),
        ("block", "sample_from_anchor True is not supported", {"sample_from_anchor": True}),
        ("block", "must be the target's, 11", {"draft_vocab_size": 6}),
        ("block", "mask_token_id must be a token", {"mask_token_id": 11}),
        ("block", "draft_length must be", {"block_size": 1}),
        ("medusa", "medusa_fc_bias are not supported", {"medusa_fc_bias": True}),
        ("medusa", "is incomplete", {"num_heads": None}),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, name, match, changes):
    saved(tmp_path, DRAFTERS[name])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    layer = config.get("transformer_layer_config")
    config |= changes
    if isinstance(changes.get("transformer_layer_config"), dict):
        config["transformer_layer_config"] = layer | changes["transformer_layer_config"]
    file.write_text(json.dumps(config))
    fails(match, load_speculator, tmp_path, DRAFTERS[name].target)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    drafter = DRAFTERS["eagle3_reduced"]
    saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    q = "layers.0.self_attn.q_proj.weight"
    for match, tensors in (
        (f"tensor {q} is missing", {k: v for k, v in good.items() if k != q}),
        ("tensor d2t is missing", {k: v for k, v in good.items() if k != "d2t"}),
        ("tensor layers.1.x is not one of", good | {"layers.1.x": good["norm.weight"]}),
        (r"fc.weight must be \[16, 48\]; got \[48, 16\]", good | {"fc.weight": good["fc.weight"].T.copy()}),
        ("d2t must have dtype I64; got I32", good | {"d2t": good["d2t"].astype(np.int32)}),
        ("norm.weight has dtype I64", good | {"norm.weight": good["norm.weight"].astype(np.int64)}),
        ("t2d does not name", good | {"d2t": good["d2t"] * 0}),
        ("must hold 6 different ids", {k: v for k, v in good.items() if k != "t2d"} | {"d2t": -np.arange(6)}),
    ):
        save_file(tensors, file)
        fails(match, load_speculator, tmp_path, drafter.target)
    save_file(good, file)
    file.write_bytes(file.read_bytes()[:-8])
    fails("damaged", load_speculator, tmp_path, drafter.target)
    (tmp_path / "config.json").write_text("{")
    fails("cannot be read as JSON", load_speculator, tmp_path, drafter.target)
    (tmp_path / "config.json").unlink()
    fails("there is no saved speculator", load_speculator, tmp_path, drafter.target)


def test_a_table_that_is_not_the_targets_is_refused(tmp_path):
    drafter = DRAFTERS["eagle3"]
    _, target_params = saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    table = np.array(target_params["embedding"]["embedding"])
    save_file(load_file(file) | {"embed_tokens.weight": table}, file)
    load_speculator(tmp_path, drafter.target, target_params=target_params)
    save_file(load_file(file) | {"embed_tokens.weight": table + 1}, file)
    fails("differs from the target's", load_speculator, tmp_path, drafter.target, target_params=target_params)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["specjax"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails("give target_params", load_speculator, tmp_path, drafter.target)


def test_a_block_head_without_a_table_takes_the_mask_from_the_target(tmp_path):
    drafter = DRAFTERS["block"]
    _, target_params = saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "embed_tokens.weight"}, file)
    fails("give target_params", load_speculator, tmp_path, drafter.target)
    params = load_speculator(tmp_path, drafter.target, target_params=target_params)[1]
    np.testing.assert_array_equal(params["mask_embedding"], target_params["embedding"]["embedding"][MASK])


def test_a_feature_scale_comes_back_inside_the_fusion(tmp_path):
    params, _ = trained(SCALED)
    save_speculator(tmp_path, SCALED, params, "some/target")
    again, loaded = load_speculator(tmp_path, SCALED.target)
    assert again == REDUCED
    scale = np.repeat([2.0, 4.0, 8.0], SCALED.target.d_model)[:, None]
    np.testing.assert_array_equal(loaded["fusion"]["kernel"], params["fusion"]["kernel"] / scale)
