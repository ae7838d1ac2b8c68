"""Positions against their formulas, written out in plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import RotaryScaling, TransformerConfig
from specjax.models.positions import rotary_frequencies, rotate, sinusoidal

SMALL = dict(vocab_size=5, d_model=32, num_layers=1, num_heads=2)


def test_frequencies():
    config = TransformerConfig(**SMALL, rotary_base=500.0, rotary_fraction=0.5)
    np.testing.assert_allclose(rotary_frequencies(config), [500.0 ** (-i / 8) for i in (0, 2, 4, 6)], rtol=1e-14)


def test_llama3_scaling_is_the_published_case_distinction():
    scaling = RotaryScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    config = TransformerConfig(**SMALL, head_dim=128, rotary_base=500_000.0, rotary_scaling=scaling)
    expected, kinds = [], set()
    for i in range(0, 128, 2):
        frequency = 500_000.0 ** (-i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            kinds.add("kept")
        elif wavelength > 8192 / 1.0:
            kinds.add("slowed")
            frequency /= 8.0
        else:
            kinds.add("between")
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
        expected.append(frequency)
    assert kinds == {"kept", "slowed", "between"}
    np.testing.assert_allclose(rotary_frequencies(config), expected, rtol=1e-12)


def test_rotation_is_a_complex_product_on_the_rotated_part_and_nothing_else():
    config = TransformerConfig(**SMALL, rotary_fraction=0.5)
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 3, 4, 16)), np.array([[0, 1, 500], [7, 7, 3]])
    with jax.enable_x64(True):
        found = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions), config))
    turn = np.exp(1j * positions[..., None] * rotary_frequencies(config))[:, :, None]
    expected = (x[..., :4] + 1j * x[..., 4:8]) * turn
    np.testing.assert_allclose(found[..., :8], np.concatenate([expected.real, expected.imag], -1), atol=1e-12)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])


def test_attention_sees_relative_positions_only():
    config = TransformerConfig(**SMALL)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16))) for _ in range(2))
        score = lambda a, b: jnp.sum(rotate(q, jnp.array([[a]]), config) * rotate(k, jnp.array([[b]]), config))  # noqa: E731
        np.testing.assert_allclose(score(3, 1), score(103, 101), atol=1e-10)
        assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_bfloat16_tells_late_positions_apart():
    config = TransformerConfig(**SMALL)
    x = jnp.ones((1, 2, 1, 16), jnp.bfloat16)
    at_1000, at_1001 = rotate(x, jnp.array([[1000, 1001]]), config)[0]
    assert at_1000.dtype == jnp.bfloat16 and float(jnp.abs(at_1000 - at_1001).max()) > 0.5


def test_sinusoidal_positions_are_the_published_ones():
    found = sinusoidal(jnp.array([[0, 5, 99]]), 6)
    for column, position in enumerate((0, 5, 99)):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            np.testing.assert_allclose(found[0, column, 2 * i], math.sin(angle), atol=1e-5)
            np.testing.assert_allclose(found[0, column, 2 * i + 1], math.cos(angle), atol=1e-5)
