import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.training.fit import Schedule, fit
from specjax.training.losses import DIVERGENCES
from specjax.training.objectives import Distillation, NextToken, Objective
from specjax.training.state import OptimizerConfig

TARGET = TransformerConfig(vocab_size=11, d_model=16, num_layers=1, num_heads=2, d_ff=32, context_length=16)
DRAFTER = dataclasses.replace(TARGET, d_model=8)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def target():
    params = LanguageModel.init(TARGET, jax.random.key(1)).params
    return jax.tree.map(lambda x: 3 * x, params)  # sharper than an initialised model, so there is something to learn


@pytest.fixture(scope="module")
def drafter():
    return LanguageModel.init(DRAFTER, jax.random.key(2)).params


def batch(seed=0, rows=4, width=9):
    return {"tokens": np.random.default_rng(seed).integers(0, 11, (rows, width)).astype(np.int32)}


def logits(config, params, tokens):
    return LanguageModel(config, params)(jnp.asarray(tokens))[0]


def test_next_token_is_the_cross_entropy_of_the_following_token(drafter):
    data = batch()
    loss, metrics = NextToken(DRAFTER).loss(drafter, data, KEY)
    law = np.asarray(jax.nn.softmax(logits(DRAFTER, drafter, data["tokens"][:, :-1])), np.float64)
    picked = np.take_along_axis(law, data["tokens"][:, 1:, None], -1)
    assert loss == pytest.approx(-np.mean(np.log(picked)), rel=1e-5)
    hits = law.argmax(-1) == data["tokens"][:, 1:]
    assert metrics["accuracy"] == pytest.approx(hits.mean())
    assert metrics["positions"] == 32


def test_mask_sits_on_the_target_token(drafter):
    data = batch()
    mask = np.zeros((4, 9), bool)
    mask[:, 0] = True  # the first token is never predicted, so its mask counts nothing
    mask[2, 5] = True
    loss, metrics = NextToken(DRAFTER).loss(drafter, {**data, "mask": mask}, KEY)
    law = jax.nn.log_softmax(logits(DRAFTER, drafter, data["tokens"][:, :-1]))
    assert metrics["positions"] == 1
    assert loss == pytest.approx(-float(law[2, 4, data["tokens"][2, 5]]), rel=1e-5)


@pytest.mark.parametrize("empty", ["row", "batch"])
def test_an_empty_mask_gives_no_nan_and_no_gradient(empty, target, drafter):
    data, mask = batch(), np.ones((4, 9), bool)
    mask[slice(1, 2) if empty == "row" else slice(None)] = False
    for objective, frozen in ((NextToken(DRAFTER), None), (Distillation(DRAFTER, TARGET), target)):
        compute = jax.value_and_grad(objective.loss, has_aux=True)
        (loss, _), gradient = compute(drafter, {**data, "mask": mask}, KEY, frozen)
        chex.assert_tree_all_finite(gradient)
        if empty == "batch":
            assert loss == 0 and not any(np.any(g) for g in jax.tree.leaves(gradient))
        else:
            rest = {"tokens": np.delete(data["tokens"], 1, 0)}
            (expected, _), expected_gradient = compute(drafter, rest, KEY, frozen)
            assert loss == pytest.approx(float(expected), rel=1e-5)
            chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_distilling_a_model_from_itself_costs_nothing(name, target):
    loss, metrics = Distillation(TARGET, TARGET, name).loss(target, batch(), KEY, target)
    assert abs(loss) < 1e-5
    assert metrics["overlap"] == pytest.approx(1, abs=1e-5) and metrics["agreement"] == 1


def test_distillation_metrics_are_those_of_the_two_laws(target, drafter):
    data = batch()
    objective = Distillation(DRAFTER, TARGET, "total_variation", target_temperature=0.5, drafter_temperature=2.0)
    loss, metrics = objective.loss(drafter, data, KEY, target)
    p = np.asarray(jax.nn.softmax(logits(TARGET, target, data["tokens"][:, :-1]) / 0.5))
    q = np.asarray(jax.nn.softmax(logits(DRAFTER, drafter, data["tokens"][:, :-1]) / 2.0))
    overlap = np.minimum(p, q).sum(-1).mean()
    assert metrics["overlap"] == pytest.approx(overlap, rel=1e-5)
    assert loss == pytest.approx(1 - overlap, abs=1e-5)
    assert metrics["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())


def test_the_target_gets_no_gradient(target, drafter):
    objective = Distillation(DRAFTER, TARGET)
    gradient = jax.grad(lambda frozen: objective.loss(drafter, batch(), KEY, frozen)[0])(target)
    assert not any(np.any(g) for g in jax.tree.leaves(gradient))
    gradient = jax.grad(lambda params: objective.loss(params, batch(), KEY, target)[0])(drafter)
    assert all(np.any(g) for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_distillation_lowers_its_divergence_and_leaves_the_target_alone(name, target, drafter):
    before = jax.tree.map(np.array, target)
    data = [batch(seed, rows=8) for seed in range(40)]
    optimizer = OptimizerConfig(learning_rate=0.02, total_steps=40, weight_decay=0.0)
    objective = Distillation(DRAFTER, TARGET, name)
    result = fit(objective, drafter, data, optimizer, Schedule(40, log_every=1), frozen=target)
    start, end = ([record[key] for record in result.history] for key in ("divergence", "overlap"))
    assert np.mean(start[-5:]) < 0.8 * np.mean(start[:3])
    assert np.mean(end[-5:]) > np.mean(end[:3])
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, target), before)


def test_dropout_depends_on_the_key_and_spares_the_target(target, drafter):
    dropping = dataclasses.replace(TARGET, dropout=0.5)
    losses = [Distillation(dropping, dropping).loss(target, batch(), jax.random.key(i), target)[0] for i in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] > 1e-3  # the drafter drops, the target, of the same parameters, does not
    still = [Distillation(DRAFTER, dropping).loss(drafter, batch(), jax.random.key(i), target)[0] for i in (0, 1)]
    assert still[0] == still[1]


def test_bfloat16_compute_keeps_float32_losses_and_gradients(drafter):
    config = dataclasses.replace(DRAFTER, dtype="bfloat16")
    (loss, _), gradient = jax.value_and_grad(NextToken(config).loss, has_aux=True)(drafter, batch(), KEY)
    assert loss.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert loss == pytest.approx(float(NextToken(DRAFTER).loss(drafter, batch(), KEY)[0]), rel=0.02)


def test_objectives_are_static_and_count_their_flops():
    assert hash(NextToken(TARGET)) == hash(NextToken(TARGET))
    assert all(isinstance(x, Objective) for x in (NextToken(TARGET), Distillation(DRAFTER, TARGET)))
    assert Distillation(TARGET, TARGET).flops(8) == pytest.approx(NextToken(TARGET).flops(8) * 4 / 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"divergence": "kl"}, "divergence must be one of.*'kl'"),
        ({"target": dataclasses.replace(TARGET, vocab_size=12)}, "vocabulary of 11 must be the target's 12"),
        ({"beta": 1.0}, "beta must be strictly between 0 and 1; got 1.0"),
        ({"target_temperature": 0.0}, "target_temperature must be a positive number; got 0.0"),
        ({"drafter_temperature": float("inf")}, "drafter_temperature must be a positive number; got inf"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Distillation(**{"drafter": DRAFTER, "target": TARGET, **options})


@pytest.mark.parametrize("bad", [{"tokens": np.zeros((4,), np.int32)}, {"tokens": np.zeros((4, 1), np.int32)}])
def test_bad_batches_are_named(bad, drafter):
    with pytest.raises(ValueError, match="rows, at least 2"):
        NextToken(DRAFTER).loss(drafter, bad, KEY)
    with pytest.raises(ValueError, match="mask must have the shape"):
        NextToken(DRAFTER).loss(drafter, {**batch(), "mask": np.ones((4, 8), bool)}, KEY)
