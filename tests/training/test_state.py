import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.models.config import TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.training.state import OPTIMIZERS, SCHEDULES, OptimizerConfig, apply_gradients, create

PARAMS = {"layer_0": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones((6,))}, "embedding": jnp.ones((5, 4))}


def gradients(seed=0, scale=1.0):
    leaves, tree = jax.tree.flatten(PARAMS)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def step(config, state, grads):
    return apply_gradients(config, state, grads, optax.tree.norm(grads))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_schedules_warm_up_to_the_peak_and_end_where_they_say(schedule, warmup):
    config = OptimizerConfig(learning_rate=0.5, total_steps=100, schedule=schedule, warmup_steps=warmup)
    rates = np.array([float(config.learning_rates()(t)) for t in range(130)])
    last = 0.5 if schedule == "constant" else 0.05
    np.testing.assert_allclose(rates[:warmup], 0.5 * np.arange(1, warmup + 1) / max(warmup, 1), rtol=1e-6)
    assert rates[warmup] == pytest.approx(0.5)
    assert rates.max() <= 0.5 + 1e-7 and rates.min() > 0
    np.testing.assert_allclose(rates[100:], last, rtol=1e-5)
    assert np.all(np.diff(rates[warmup:]) <= 1e-7)
    if schedule == "wsd":
        np.testing.assert_allclose(rates[warmup:80], 0.5, rtol=1e-6)
        assert rates[90] == pytest.approx((0.5 + 0.05) / 2, rel=1e-3)


def test_clipping_bounds_the_gradient_by_its_global_norm():
    # With b1 = b2 = 0 Adam's update ignores the scale, so look at the moments it stored.
    config = OptimizerConfig(clip_norm=1.0, b1=0.0, weight_decay=0.0)
    big = step(config, create(config, PARAMS, jax.random.key(0)), gradients(scale=100.0))
    mu = next(s.mu for s in big.opt_state if hasattr(s, "mu"))
    assert optax.tree.norm(mu) == pytest.approx(1.0, rel=1e-5)
    small = gradients(scale=1e-3)
    kept = step(config, create(config, PARAMS, jax.random.key(0)), small)
    chex.assert_trees_all_close(next(s.mu for s in kept.opt_state if hasattr(s, "mu")), small, rtol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_spares_vectors(optimizer):
    config = OptimizerConfig(optimizer=optimizer, learning_rate=0.1, schedule="constant", weight_decay=0.5)
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    params = step(config, create(config, PARAMS, jax.random.key(0)), zero).params
    np.testing.assert_allclose(params["layer_0"]["kernel"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(params["layer_0"]["bias"], 1)


def test_muon_orthogonalises_hidden_matrices_only():
    config = OptimizerConfig(optimizer="muon", learning_rate=1.0, schedule="constant", weight_decay=0.0, clip_norm=None)
    new = step(config, create(config, PARAMS, jax.random.key(0)), gradients()).params
    update = jax.tree.map(lambda a, b: np.asarray(a - b), new, PARAMS)
    singular = np.linalg.svd(update["layer_0"]["kernel"], compute_uv=False)
    assert singular.max() / singular.min() < 2
    assert np.sqrt(np.mean(update["layer_0"]["kernel"] ** 2)) == pytest.approx(0.2, rel=0.35)
    magnitudes = np.abs(update["embedding"])  # Adam's first step follows the signs of the gradient
    np.testing.assert_allclose(magnitudes, magnitudes[0, 0], rtol=1e-3)


def test_muon_takes_every_kernel_of_a_transformer_block():
    config = TransformerConfig(vocab_size=11, d_model=16, num_layers=1, num_heads=2, tied_head=False)
    params = LanguageModel.init(config, jax.random.key(0)).params
    optimizer = OptimizerConfig(optimizer="muon")
    momentum = create(optimizer, params, jax.random.key(0)).opt_state.inner_states["muon"].inner_state[0].mu
    shapes = sorted(x.shape for x in jax.tree.leaves(momentum))
    layer = params["layer_0"]
    assert shapes == sorted(x.shape for x in jax.tree.leaves(layer) if x.ndim == 2)
    assert len(shapes) == 7


def test_moving_average_follows_its_recurrence_and_is_what_is_evaluated():
    config = OptimizerConfig(learning_rate=0.1, ema_decay=0.5)
    state = create(config, PARAMS, jax.random.key(0))
    expected = jax.tree.map(np.asarray, PARAMS)
    for t in range(8):
        state = step(config, state, gradients(t))
        decay = min(0.5, (1 + t) / (10 + t))
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * np.asarray(p), expected, state.params)
    chex.assert_trees_all_close(state.ema, expected, rtol=1e-5)
    assert state.eval_params is state.ema
    assert np.any(np.asarray(state.ema["embedding"]) != np.asarray(state.params["embedding"]))
    plain = create(OptimizerConfig(), PARAMS, jax.random.key(0))
    assert plain.ema is None and plain.eval_params is plain.params


@pytest.mark.parametrize(
    "field, value",
    [
        ("optimizer", "sgd"),
        ("schedule", "step"),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("total_steps", 0),
        ("warmup_steps", 2000),
        ("final_fraction", 1.5),
        ("decay_fraction", 0.0),
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("clip_norm", 0.0),
        ("accumulation", 0),
        ("ema_decay", 1.0),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be.*{value}"):
        OptimizerConfig(**{field: value})
