"""Speculators out and in: what is served from the folder is the same function, and it comes back bit for bit."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import Medusa
from specjax.models import ends
from specjax.models.transformer import Block, apply
from specjax.topology import Topology
from specjax.weights.speculators import load_speculator
from tests.weights import served_modules
from tests.weights.speculator_cases import (
    CASES,
    EVERY,
    KEPT,
    MASK,
    SCALED,
    TEXT,
    VOCAB,
    assert_bit_equal,
    fails,
    in_dtype,
    saved,
)  # fmt: skip


@pytest.mark.parametrize(
    "name, dtype",
    [(name, "float32") for name in CASES] + [(name, "bfloat16") for name in ("eagle3_reduced", "block", "medusa")],
)
def test_what_is_saved_comes_back(tmp_path, name, dtype):
    drafter = in_dtype(CASES[name], dtype)
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
    modes = {file.stat().st_mode for file in (tmp_path / "a").iterdir()}
    assert len(modes) == 1  # whoever may read the one may read the other


@EVERY
def test_a_file_without_our_own_entry_gives_the_same_network(tmp_path, name):
    drafter = CASES[name]
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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("eagle3")] + ["scaled"])
def test_the_served_eagle3_is_the_same_function(tmp_path, name):
    drafter = SCALED if name == "scaled" else CASES[name]
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
    drafter = CASES[name]
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
    drafter = CASES[name]
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
    drafter = CASES[name]
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
    saved(tmp_path, CASES["eagle3_reduced"])
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert (tensors["d2t"] + np.arange(6)).tolist() == KEPT.tolist()
    assert np.flatnonzero(tensors["t2d"]).tolist() == KEPT.tolist()


def test_the_mask_is_the_only_row_that_is_not_the_targets(tmp_path):
    params, target_params = saved(tmp_path, CASES["block"])
    table = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    expected = np.array(target_params["embedding"]["embedding"])
    expected[MASK] = params["mask_embedding"]
    np.testing.assert_array_equal(table, expected)


def test_biases_that_the_network_has_not_are_zeros_and_must_be(tmp_path):
    drafter = CASES["eagle3_biased"]
    saved(tmp_path, drafter)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]["attention_bias"] is True
    assert not tensors["layers.0.self_attn.o_proj.bias"].any() and tensors["layers.0.self_attn.q_proj.bias"].any()
    save_file(tensors | {"layers.0.self_attn.o_proj.bias": np.ones(16, np.float32)}, file)
    fails("o_proj.bias is not zero", load_speculator, tmp_path, drafter.target)
