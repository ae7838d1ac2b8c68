import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from specjax.training import losses
from specjax.training.losses import DIVERGENCES

V = 6
NAMES = sorted(DIVERGENCES)
TEMPERATURES = [1e-3, 0.05, 1.0, 30.0, 1e4]


def logits(seed, scale=3.0, shape=(V,)):
    return np.random.default_rng(seed).normal(size=shape) * scale


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def value_and_gradient(name, target, draft, target_temperature=1.0, draft_temperature=1.0):
    log_p = losses.log_law(target, target_temperature)
    return jax.value_and_grad(lambda z: DIVERGENCES[name](log_p, losses.log_law(z, draft_temperature)))(draft)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
@example(seed=141, scale=30.0)
def test_zero_for_equal_laws_and_positive_for_different_ones(name, seed, scale):
    p, q = jnp.float32(logits(seed, scale)), jnp.float32(logits(seed + 1, scale))
    value, _ = value_and_gradient(name, p, p + 2.0)  # the same law: logits are defined up to a constant
    assert abs(value) < 1e-5
    value, gradient = value_and_gradient(name, p, p)
    assert abs(value) < 1e-6
    np.testing.assert_allclose(gradient, 0, atol=1e-5)
    # At scale 30 two laws may both be one-hot at the same token: then they are equal in float32.
    assume(DIVERGENCES["total_variation"](losses.log_law(p), losses.log_law(q)) > 1e-3)
    value, gradient = value_and_gradient(name, p, q)
    assert value > 1e-6
    # Where the drafter's law is one-hot in float32, no small change of its logits moves it.
    assert np.abs(gradient).max() > 0 or jnp.exp(losses.log_law(q)).max() > 0.999


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_gradient_equals_finite_differences(name, seed, temperature):
    with jax.enable_x64(True):
        p, q = jnp.asarray(logits(seed)), jnp.asarray(logits(seed + 1))
        _, gradient = value_and_gradient(name, p, q, 1.0, temperature)
        assert gradient.dtype == jnp.float64
        step = 1e-6
        numeric = []
        for i in range(V):
            ends = [value_and_gradient(name, p, q.at[i].add(s * step), 1.0, temperature)[0] for s in (1, -1)]
            numeric.append((ends[0] - ends[1]) / (2 * step))
        np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("draft_temperature", TEMPERATURES)
@pytest.mark.parametrize("target_temperature", TEMPERATURES)
def test_finite_at_any_temperature(name, target_temperature, draft_temperature):
    for seed in range(3):
        # Dividing the logits here instead of in log_law compiles one program for all temperatures.
        p = jnp.float32(logits(seed, 10) / target_temperature)
        q = jnp.float32(logits(seed + 50, 10) / draft_temperature)
        value, gradient = value_and_gradient(name, p, q)
        assert np.isfinite(value) and value >= -1e-6
        assert np.all(np.isfinite(gradient))
        value, gradient = value_and_gradient(name, p, p)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_negative_log_acceptance_still_teaches_where_total_variation_is_flat():
    p, q = jnp.float32([200, 0]), jnp.float32([0, 200])
    assert np.abs(value_and_gradient("total_variation", p, q)[1]).max() == 0
    value, gradient = value_and_gradient("negative_log_acceptance", p, q)
    assert value == pytest.approx(200 - math.log(2), rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_outside_both_supports_count_nothing(name):
    p, q = jnp.float32(logits(0)), jnp.float32(logits(1))
    masked = [x.at[2:].set(-jnp.inf) for x in (p, q)]
    value, gradient = value_and_gradient(name, *masked)
    expected, expected_gradient = value_and_gradient(name, p[:2], q[:2])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.append(expected_gradient, np.zeros(V - 2)), atol=1e-6)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 3.0, 40.0]))
def test_overlap_is_one_minus_total_variation(seed, scale):
    log_p, log_q = (losses.log_law(jnp.float32(logits(seed + i, scale, (2, 3, V)))) for i in range(2))
    overlap = losses.overlap(log_p, log_q)
    assert overlap.shape == (2, 3)
    np.testing.assert_allclose(overlap, 1 - losses.total_variation(log_p, log_q), atol=1e-6)
    np.testing.assert_allclose(jnp.exp(-losses.negative_log_acceptance(log_p, log_q)), overlap, atol=1e-6)


@given(seed=st.integers(0, 10**6), beta=st.floats(0.05, 0.95))
def test_jensen_shannon_definition(seed, beta):
    with jax.enable_x64(True):
        log_p, log_q = (losses.log_law(jnp.asarray(logits(seed + i))) for i in range(2))
        p, q = np.exp(log_p), np.exp(log_q)
        m = beta * p + (1 - beta) * q
        expected = beta * np.sum(p * np.log(p / m)) + (1 - beta) * np.sum(q * np.log(q / m))
        value = losses.jensen_shannon(log_p, log_q, beta)
        np.testing.assert_allclose(value, expected, rtol=1e-9)
        assert value <= math.log(2)
        np.testing.assert_allclose(value, losses.jensen_shannon(log_q, log_p, 1 - beta), rtol=1e-9)
        small = 1e-6
        limit = losses.jensen_shannon(log_p, log_q, small) / small
        np.testing.assert_allclose(limit, losses.forward_kl(log_p, log_q), rtol=1e-2)


def test_the_two_kls_are_each_other_swapped_and_differ():
    log_p, log_q = (losses.log_law(jnp.float32(logits(i))) for i in range(2))
    np.testing.assert_allclose(losses.forward_kl(log_p, log_q), losses.reverse_kl(log_q, log_p), rtol=1e-6)
    assert abs(losses.forward_kl(log_p, log_q) - losses.reverse_kl(log_p, log_q)) > 0.01


def test_forward_kl_gradient_is_q_minus_p_over_temperature():
    p, q = jnp.float32(logits(0)), jnp.float32(logits(1))
    _, gradient = value_and_gradient("forward_kl", p, q, 1.0, 2.0)
    np.testing.assert_allclose(gradient, (jax.nn.softmax(q / 2) - jax.nn.softmax(p)) / 2, atol=1e-6)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_law_divides_by_the_temperature(temperature):
    z = jnp.float32(logits(0))
    np.testing.assert_allclose(losses.log_law(z, temperature), jax.nn.log_softmax(z / temperature), rtol=1e-6)


def test_log_law_is_float32_for_bfloat16_logits_and_keeps_float64():
    assert losses.log_law(jnp.ones((2, V), jnp.bfloat16)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert losses.log_law(jnp.ones((2, V), jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_bad_temperature_is_named(temperature):
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
        losses.log_law(jnp.ones((V,)), temperature)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_bad_beta_is_named(beta):
    with pytest.raises(ValueError, match=f"beta.*{beta}"):
        losses.jensen_shannon(jnp.zeros((V,)), jnp.zeros((V,)), beta)


def test_cross_entropy_is_minus_the_log_probability_of_the_token():
    z = jnp.float32(logits(0, shape=(2, 3, V)))
    tokens = jnp.array([[0, 1, 2], [3, 4, 5]])
    value = losses.cross_entropy(losses.log_law(z), tokens)
    expected = [[-np.log(np.asarray(jax.nn.softmax(z))[b, t, tokens[b, t]]) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_masked_mean_ignores_masked_values_whatever_they_are():
    values = jnp.float32([[1, jnp.nan, 3], [jnp.inf, 5, jnp.nan]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    mean, gradient = jax.value_and_grad(losses.masked_mean)(values, mask)
    assert mean == 3
    np.testing.assert_allclose(gradient, mask / 3)


@pytest.mark.parametrize("name", NAMES)
def test_empty_mask_gives_zero_loss_and_zero_gradient(name):
    log_p = losses.log_law(jnp.float32(logits(0, 10, (2, 3, V))))

    def loss(z):
        return losses.masked_mean(DIVERGENCES[name](log_p, losses.log_law(z)), jnp.zeros((2, 3), bool))

    value, gradient = jax.value_and_grad(loss)(jnp.float32(logits(1, 10, (2, 3, V))))
    assert value == 0
    assert not np.any(gradient)
