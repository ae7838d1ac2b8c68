import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import EarlyExit
from specjax.models import LanguageModel, Transformer, TransformerConfig
from specjax.training.early_exit_objective import ExitDistillation, LayerSkip
from specjax.training.fit import Schedule, fit
from specjax.training.objectives import NextToken, Objective
from specjax.training.state import OptimizerConfig

VOCAB, LAYERS = 11, 3
CONFIG = TransformerConfig(VOCAB, 16, LAYERS, 2, d_ff=24, context_length=16)
ADAPTER = EarlyExit(CONFIG, 1, 3, trained_exit=True)
OWN_HEAD = dataclasses.replace(ADAPTER, own_head=True)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model():
    params = LanguageModel.init(CONFIG, jax.random.key(1)).params
    return LanguageModel(CONFIG, jax.tree.map(lambda x: 3 * x, params))  # sharper than a fresh one


def batch(rows=4, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (rows, 9)).astype(np.int32)}


@jax.jit
def _laws(model, inputs):
    cut = range(1, model.config.num_layers + 1)
    return jnp.stack([jax.nn.log_softmax(model(inputs, layers=(0, i))[0]) for i in cut])


def laws(model, data):
    """[exit or last, B, T, V] log-laws behind every layer, cutting the model off there."""
    return np.asarray(_laws(model, data["tokens"][:, :-1]))


def cross_entropies(model, data):
    picked = np.take_along_axis(laws(model, data), data["tokens"][None, :, 1:, None], -1)
    return -picked[..., 0].mean((1, 2))


def moved(params, by=0.3):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return jax.tree.unflatten(
        tree, [x + by * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    )


# The exit behind a frozen target.


def test_the_exit_is_compared_with_the_target_at_the_same_position(model):
    data = batch()
    start = ADAPTER.init_params(KEY)  # the shared exit, so the model cut off behind layer 1
    loss, metrics = ExitDistillation(ADAPTER).loss(start, data, KEY, model.params)
    each = laws(model, data)
    p, q = np.exp(each[-1]), np.exp(each[0])
    divergence = (p * (each[-1] - each[0])).sum(-1)
    assert loss == pytest.approx(divergence.mean(), rel=1e-4)
    assert metrics["overlap"] == pytest.approx(np.minimum(p, q).sum(-1).mean(), rel=1e-4)
    assert metrics["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert metrics["cross_entropy"] == pytest.approx(cross_entropies(model, data)[0], rel=1e-4)
    # A comparison one position off would have given something else.
    shifted = (p[:, 1:] * (each[-1, :, 1:] - each[0, :, :-1])).sum(-1)
    assert abs(shifted.mean() - divergence.mean()) > 0.05
    mask = np.zeros((4, 9), bool)
    mask[2, 5] = True  # token 5 is predicted from position 4
    loss, metrics = ExitDistillation(ADAPTER).loss(start, {**data, "mask": mask}, KEY, model.params)
    assert metrics["positions"] == 1 and loss == pytest.approx(divergence[2, 4], rel=1e-4)


@pytest.mark.parametrize("drafter", [ADAPTER, OWN_HEAD], ids=["adapter", "own head"])
@pytest.mark.parametrize("divergence", ["forward_kl", "jensen_shannon"])
def test_the_target_gets_no_gradient_and_the_exit_does(model, drafter, divergence):
    objective = ExitDistillation(drafter, divergence)
    params = moved(drafter.init_params(KEY, model.params))
    compute = jax.jit(jax.grad(lambda params, frozen: objective.loss(params, batch(), KEY, frozen)[0], argnums=(0, 1)))
    own, targets = compute(params, model.params)
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in jax.tree.leaves(own))
    assert all(float(jnp.max(jnp.abs(x))) == 0 for x in jax.tree.leaves(targets))


def test_upper_layers_reach_the_exit_only_through_the_targets_law(model):
    """The exit reads layer 1: other upper layers change p, not the exit's own law."""
    params, changed = moved(ADAPTER.init_params(KEY)), dict(model.params)
    changed["layer_2"] = moved(changed["layer_2"])
    metrics = [ExitDistillation(ADAPTER).loss(params, batch(), KEY, frozen)[1] for frozen in (model.params, changed)]
    assert metrics[0]["cross_entropy"] == pytest.approx(float(metrics[1]["cross_entropy"]), rel=1e-6)
    assert abs(metrics[0]["overlap"] - metrics[1]["overlap"]) > 1e-3


@pytest.mark.parametrize("drafter", [ADAPTER, OWN_HEAD], ids=["adapter", "own head"])
def test_a_trained_exit_comes_nearer_and_leaves_the_target_alone(model, drafter):
    before = jax.tree.map(np.asarray, model.params)
    result = fit(
        ExitDistillation(drafter), drafter.init_params(KEY, model.params), (batch(16, seed) for seed in range(60)),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, total_steps=60), Schedule(steps=60, log_every=1),
        frozen=model.params,
    )  # fmt: skip
    overlaps = [record["overlap"] for record in result.history]
    assert np.mean(overlaps[-5:]) > np.mean(overlaps[:2]) + 0.05
    chex.assert_trees_all_equal(model.params, before)


# A model trained for its exits.


def test_the_loss_is_the_weighted_cross_entropy_of_all_exits(model):
    objective = LayerSkip(CONFIG, exit_layer=1, max_drop=0.0, exit_scale=0.5)
    loss, metrics = objective.loss(model.params, batch(), KEY)
    each = cross_entropies(model, batch())
    weights = np.array([0.5 * 1, 0.5 * 3, 3 + 0.5 * 3])  # i (i + 1) / 2 below, L + scale · L (L − 1) / 2 at the end
    assert loss == pytest.approx((weights / weights.sum()) @ each, rel=1e-5)
    assert metrics["cross_entropy"] == pytest.approx(each[-1], rel=1e-5)
    assert metrics["exit_cross_entropy"] == pytest.approx(each[0], rel=1e-5)
    log_laws = laws(model, batch())
    assert metrics["overlap"] == pytest.approx(np.exp(np.minimum(log_laws[0], log_laws[-1])).sum(-1).mean(), rel=1e-4)
    early, last = LayerSkip(CONFIG, 1).weights(jnp.ones(2, bool))
    assert np.all(np.diff([*early, last]) > 0) and float(jnp.sum(early) + last) == pytest.approx(1)


def test_without_exits_weight_and_without_drops_it_is_next_token_training(model):
    both = NextToken(CONFIG), LayerSkip(CONFIG, 1, max_drop=0.0, exit_scale=0.0)
    compute = jax.jit(lambda p: [jax.value_and_grad(lambda p, o=o: o.loss(p, batch(), KEY)[0])(p) for o in both])
    plain, skipping = compute(model.params)
    chex.assert_trees_all_close(skipping, plain, rtol=1e-4, atol=1e-6)


def test_rotation_trains_every_exit_in_turn(model):
    config = dataclasses.replace(CONFIG, num_layers=4)
    params = jax.tree.map(lambda x: 3 * x, LanguageModel.init(config, jax.random.key(2)).params)
    objective = LayerSkip(config, 1, max_drop=0.0, exit_scale=0.5, rotation=2)
    each = cross_entropies(LanguageModel(config, params), batch())
    raw = np.array([0.5, 1.5, 3.0, 4 + 0.5 * 6])
    chosen = np.array([[1, 0, 1, 1], [0, 1, 0, 1]])  # exits 1 and 3, or exit 2, and the end of the model
    possible = (chosen * raw / (chosen * raw).sum(-1, keepdims=True)) @ each
    compute = jax.jit(lambda key: objective.loss(params, batch(), key)[0])
    seen = {int(np.abs(possible - loss).argmin()) for loss in map(compute, jax.random.split(KEY, 12))}
    assert seen == {0, 1} and abs(possible[0] - possible[1]) > 1e-3
    for key in jax.random.split(KEY, 4):
        assert np.abs(possible - compute(key)).min() < 1e-5
    whole = dataclasses.replace(objective, rotation=1)
    np.testing.assert_allclose(objective.loss(params, batch(), None)[0], whole.loss(params, batch(), None)[0])


def test_drop_rates_rise_from_zero_to_the_largest():
    """The exponential schedule, and layers really left out that often (20,000 coins a layer, 5 standard errors)."""
    objective = LayerSkip(dataclasses.replace(CONFIG, num_layers=5), 2, max_drop=0.4)
    expected = 0.4 * (np.exp(np.arange(5) * np.log(2) / 4) - 1)
    np.testing.assert_allclose(objective.drop_rates, expected, rtol=1e-12)
    kept = np.asarray(objective.layers_kept(KEY, 20_000))
    np.testing.assert_allclose(1 - kept.mean(0), expected, atol=5 * 0.5 / np.sqrt(20_000))
    assert kept[:, 0].all()
    corner = np.corrcoef(kept[:, 1:].T)  # layers of a row, and rows, fall independently
    assert np.abs(corner - np.eye(4)).max() < 0.05


def test_a_row_passes_a_dropped_layer_unchanged(model):
    """Row 0 skips the second layer, row 1 nothing, row 2 all but the first: the others' rows do not notice."""
    tokens = jnp.asarray(batch(3)["tokens"])
    keep = jnp.array([[True, False, True], [True, True, True], [True, False, False]])
    dropped, _, features = model(tokens, layer_keep=keep, feature_layers=(1, 2, 3))
    first, second, third = jnp.split(features, 3, -1)
    whole, _, plain = model(tokens, feature_layers=(1,))
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(second[0], first[0])
    np.testing.assert_array_equal(third[2], first[2])
    np.testing.assert_allclose(dropped[1], whole[1], atol=1e-5)
    np.testing.assert_allclose(dropped[2], model(tokens[2:], layers=(0, 1))[0][0], atol=1e-5)
    without = {name: value for name, value in model.params.items() if name not in ("layer_1", "layer_2")}
    shallow = LanguageModel(dataclasses.replace(CONFIG, num_layers=2), without | {"layer_1": model.params["layer_2"]})
    np.testing.assert_allclose(dropped[0], shallow(tokens[:1])[0][0], atol=1e-5)
    assert float(jnp.max(jnp.abs(dropped[0] - whole[0]))) > 0.1


def test_a_dropped_layer_gets_no_gradient(model):
    tokens, keep = jnp.asarray(batch(2)["tokens"]), jnp.array([[True, False, True]] * 2)
    loss = lambda params: jnp.sum(Transformer(CONFIG).apply({"params": params}, tokens, layer_keep=keep)[0] ** 2)  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(model.params)
    assert all(float(jnp.max(jnp.abs(x))) == 0 for x in jax.tree.leaves(gradient["layer_1"]))
    assert all(float(jnp.max(jnp.abs(x))) > 0 for x in jax.tree.leaves(gradient["layer_2"]))


def test_layers_are_dropped_in_training_only(model):
    objective = LayerSkip(CONFIG, 1, max_drop=0.5)
    compute = jax.jit(lambda key: objective.loss(model.params, batch(), key)[0])
    assert len({float(compute(key)) for key in jax.random.split(KEY, 5)}) > 1
    still = objective.loss(model.params, batch(), None)
    calm = dataclasses.replace(objective, max_drop=0.0).loss(model.params, batch(), KEY)
    chex.assert_trees_all_close(still, calm, rtol=1e-6)


@pytest.mark.slow
def test_training_makes_the_exit_a_drafter():
    """On texts that repeat a cycle, the early exit learns it too; next-token training alone leaves it behind."""
    cycle = np.arange(VOCAB)

    def texts(seed):
        starts = np.random.default_rng(seed).integers(VOCAB, size=16)
        return {"tokens": cycle[(starts[:, None] + 3 * np.arange(9)) % VOCAB].astype(np.int32)}

    def trained(objective):
        result = fit(
            objective, LanguageModel.init(CONFIG, jax.random.key(3)).params, (texts(seed) for seed in range(80)),
            OptimizerConfig(learning_rate=1e-2, warmup_steps=0, total_steps=80), Schedule(steps=80),
        )  # fmt: skip
        return LayerSkip(CONFIG, 1).loss(result.state.params, texts(99), None)[1]

    skipping, plain = trained(LayerSkip(CONFIG, 1, max_drop=0.2)), trained(NextToken(CONFIG))
    assert skipping["cross_entropy"] < 0.3 and skipping["exit_cross_entropy"] < 0.5
    assert skipping["overlap"] > plain["overlap"] and skipping["overlap"] > 0.7


# Both.


OBJECTIVES = {"distillation": ExitDistillation(ADAPTER), "layer skip": LayerSkip(CONFIG, 1)}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("empty", ["row", "batch"])
def test_an_empty_mask_gives_no_nan_and_no_gradient(model, name, empty):
    objective = OBJECTIVES[name]
    params, frozen = (model.params, None) if name == "layer skip" else (moved(ADAPTER.init_params(KEY)), model.params)
    mask = np.ones((4, 9), bool)
    mask[slice(1, 2) if empty == "row" else slice(None)] = False
    compute = jax.jit(jax.value_and_grad(lambda p, data: objective.loss(p, data, KEY, frozen), has_aux=True))
    (loss, metrics), gradient = compute(params, {**batch(), "mask": mask})
    chex.assert_tree_all_finite((loss, metrics, gradient))
    assert metrics["positions"] == (24 if empty == "row" else 0)
    if empty == "batch":
        assert loss == 0 and all(float(jnp.max(jnp.abs(x))) == 0 for x in jax.tree.leaves(gradient))
    else:  # what stands in the masked row does not matter
        other = batch()
        other["tokens"][1] = 0
        chex.assert_trees_all_close(compute(params, {**other, "mask": mask}), ((loss, metrics), gradient), atol=1e-6)


def test_objectives_are_hashable_and_count_their_work():
    for objective in OBJECTIVES.values():
        assert isinstance(objective, Objective) and hash(objective) == hash(dataclasses.replace(objective))
    plain = NextToken(CONFIG).flops(8)
    assert LayerSkip(CONFIG, 1).flops(8) == plain + 2 * 3 * 2 * 16 * VOCAB
    assert LayerSkip(CONFIG, 1, rotation=2).flops(8) == plain + 3 * 2 * 16 * VOCAB
    assert plain / 3 < ExitDistillation(ADAPTER).flops(8) < plain


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="set trained_exit=True"):
        ExitDistillation(EarlyExit(CONFIG, 1, 3))
    with pytest.raises(ValueError, match="divergence must be one of .*got 'kl'"):
        ExitDistillation(ADAPTER, "kl")
    with pytest.raises(ValueError, match="beta must be strictly between 0 and 1; got 1"):
        ExitDistillation(ADAPTER, beta=1)
    with pytest.raises(ValueError, match="drafter_temperature must be a positive number; got 0"):
        ExitDistillation(ADAPTER, drafter_temperature=0)
    for exits in ((0, 1), (1, 3), (2, 1)):
        with pytest.raises(ValueError, match="exit_layers must rise within 1 to 2"):
            LayerSkip(CONFIG, 1, exits)
    with pytest.raises(ValueError, match=r"exit_layer must be one of the trained exits \(2,\); got 1"):
        LayerSkip(CONFIG, 1, (2,))
    with pytest.raises(ValueError, match="max_drop must be in"):
        LayerSkip(CONFIG, 1, max_drop=1.0)
    with pytest.raises(ValueError, match="exit_scale must be"):
        LayerSkip(CONFIG, 1, exit_scale=-1.0)
    with pytest.raises(ValueError, match="rotation must be 1 to 2, the number of exits; got 3"):
        LayerSkip(CONFIG, 1, rotation=3)
