"""Laws against a reference that sorts, and draws against numpy's searchsorted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from specjax.keys import Source
from specjax.sampling import Sampling, draw, first_max, gumbel_max, inverse_cdf, top_tokens

LAW = jax.jit(Sampling.law)
DRAW = jax.jit(inverse_cdf)


def reference(logits, temperature, top_k, top_p, min_p):
    """The documented order by sorting, one row, in float64; also how close a cumulative mass comes to top_p."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)], np.inf
    law = np.exp((logits - logits.max()) / temperature)
    law, gap = law / law.sum(), np.inf
    if top_k is not None:
        edge = np.sort(law)[::-1][min(top_k, len(law)) - 1]
        law = np.where(law >= edge, law, 0)
        law /= law.sum()
    if top_p is not None and top_p < 1:
        values = np.unique(law)[::-1]  # ties enter together
        mass = np.array([law[law >= value].sum() for value in values])
        gap = np.abs(mass - top_p).min()
        law = np.where(law >= values[np.argmax(mass >= top_p)], law, 0)
        law /= law.sum()
    if min_p is not None:
        gap = min(gap, np.abs(law[law > 0] - min_p * law.max()).min() if 0 < min_p < 1 else np.inf)
        law = np.where(law >= min_p * law.max(), law, 0)
        law /= law.sum()
    return law, gap


# Multiples of 1/2 in a small range: many exact ties, and no two different values that only rounding tells apart.
LOGITS = st.lists(st.lists(st.integers(-8, 8), min_size=9, max_size=9), min_size=2, max_size=2)
TEMPERATURE = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
TOP_K, TOP_P = st.integers(1, 12), st.floats(0.01, 1.0)
PER_ROW = lambda values: st.lists(values, min_size=2, max_size=2)  # noqa: E731


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "kpm"])
@given(LOGITS, PER_ROW(TEMPERATURE), PER_ROW(TOP_K), PER_ROW(TOP_P), PER_ROW(st.floats(0.0, 1.0)))
def test_law_equals_the_sorting_reference(dtype, filters, logits, temperature, top_k, top_p, min_p):
    single = lambda numbers: [np.float32(x).item() for x in numbers]  # noqa: E731
    values = [top_k if "k" in filters else None]
    values += [single(v) if name in filters else None for name, v in (("p", top_p), ("m", min_p))]
    expected = []
    for row in range(2):
        arguments = [None if v is None else v[row] for v in values]
        law, gap = reference(np.array(logits[row]) / 2, temperature[row], *arguments)
        assume(gap > 1e-5)
        expected.append(law)
    with jax.enable_x64(dtype == "float64"):
        found = LAW(Sampling.of(temperature, *values), jnp.asarray(logits, dtype) / 2)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found) > 0, np.array(expected) > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-5 if dtype == "float32" else 1e-12)


def log_law(*probabilities):
    return jnp.log(jnp.array([probabilities], jnp.float32))


@pytest.mark.parametrize(
    "sampling, logits, kept",
    [
        # Top-p counts the mass after top-k renormalised: 4/7 alone reaches 0.55, 0.4 would not.
        (dict(top_k=2, top_p=0.55), (0.4, 0.3, 0.2, 0.1), [1, 0, 0, 0]),
        # Min-p comes last: before top-p it would leave 0.615 for the first token, which alone reaches 0.6.
        (dict(top_p=0.6, min_p=0.6), (0.4, 0.25, 0.2, 0.15), [1, 1, 0, 0]),
        # Temperature comes first: at 0.5 the law is (0.533, 0.3, 0.133, 0.033), and two tokens reach 0.8.
        (dict(temperature=0.5, top_p=0.8), (0.4, 0.3, 0.2, 0.1), [1, 1, 0, 0]),
        (dict(temperature=1.0, top_p=0.8), (0.4, 0.3, 0.2, 0.1), [1, 1, 1, 0]),
        (dict(temperature=0.5, min_p=0.5), (0.4, 0.25, 0.2, 0.15), [1, 0, 0, 0]),
        # Ties at the edge stay, however many they are.
        (dict(top_k=1), (0.3, 0.3, 0.3, 0.1), [1, 1, 1, 0]),
        (dict(top_p=0.2), (0.3, 0.3, 0.3, 0.1), [1, 1, 1, 0]),
        # Filters that keep everything.
        (dict(top_k=4, top_p=1.0, min_p=0.0), (0.4, 0.3, 0.2, 0.1), [1, 1, 1, 1]),
        (dict(top_k=2**31 - 1), (0.4, 0.3, 0.2, 0.1), [1, 1, 1, 1]),
    ],
)
def test_order_and_edges(sampling, logits, kept):
    law = Sampling.of(**sampling).law(log_law(*logits))
    np.testing.assert_array_equal(law > 0, [kept])
    np.testing.assert_allclose(law.sum(), 1, rtol=1e-6)


def test_temperature_zero_is_the_first_maximum():
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [-jnp.inf, -5.0, -jnp.inf, -5.0], [1e30, -1e30, 0.0, 1e30]])
    one_hot = np.eye(4)[[1, 1, 0]]
    np.testing.assert_array_equal(Sampling.of(0.0).law(logits), one_hot)
    np.testing.assert_array_equal(Sampling.of(0.0, 3, 0.9, 0.1).law(logits), one_hot)
    np.testing.assert_array_equal(Sampling.of([0.0, 0.0, 0.0]).law(logits), one_hot)


def test_mixed_rows_equal_their_own_calls():
    logits = jax.random.normal(jax.random.key(0), (3, 2, 50)) * 3
    for filters in ({}, dict(top_k=7, top_p=0.7, min_p=0.1)):
        mixed = Sampling.of([0.0, 1.0, 0.5], **filters)
        assert mixed.kind == "mixed" and not mixed.greedy
        for row, t in enumerate((0.0, 1.0, 0.5)):
            np.testing.assert_array_equal(
                LAW(mixed, logits)[row], LAW(Sampling.of(t, **filters), logits[row : row + 1])[0]
            )


def test_a_small_temperature_approaches_the_greedy_law_without_nan():
    logits = jnp.array([[300.0, 200.0, -1e4], [100.0, 100.0, 0.0]])
    for t in (1e-2, 1e-6, 1e-30, 1e-37, 2e-38):
        np.testing.assert_allclose(Sampling.of(t).law(logits), [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)


def test_laws_are_at_least_single_precision_and_keep_double():
    wider = {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
    for logits_dtype, found in wider.items():
        with jax.enable_x64(True):
            for sampling in (Sampling.of(), Sampling.of(0.0), Sampling.of([0.0, 1.0], 3, 0.9, 0.1)):
                logits = jax.ShapeDtypeStruct((2, 5), logits_dtype)
                assert jax.eval_shape(Sampling.law, sampling, logits).dtype == found


def test_values_are_arrays_and_do_not_retrace():
    traces = []

    @jax.jit
    def law(sampling, logits):
        traces.append(1)
        return sampling.law(logits)

    logits = jnp.arange(8.0).reshape(2, 4)
    for t, k, p, m in ((1, 2, 0.5, 0), (1.0, 3, np.float32(0.25), 0.5), (np.float64(0.3), np.int64(1), 1, 1.0)):
        law(Sampling.of(t, k, p, m).per_row(2), logits)
    law(Sampling.of([0.3, 0.4], [1, 2], [0.5, 0.6], [0.1, 0.2]).per_row(2), logits)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", [-1.0, np.nan, np.inf, "hot", None, [], [[1.0]], [1.0, -0.1], 1j]),
        ("top_k", [0, -1, 1.5, 2**31, np.nan, "two", [], [3, 0]]),
        ("top_p", [0.0, -0.1, 1.01, np.nan, "p", [0.5, 0.0]]),
        ("min_p", [-0.1, 1.01, np.nan, "p", [0.5, 2.0]]),
    ],
)
def test_bad_values_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            Sampling.of(**{name: value})


def test_values_for_another_batch_are_named():
    for name, value in (("temperature", [1.0, 0.5]), ("top_k", [3, 4]), ("top_p", [0.5, 0.6]), ("min_p", [0.5, 0.6])):
        with pytest.raises(ValueError, match=f"{name} has 2 values for a batch of 3"):
            Sampling.of(**{name: value}).per_row(3)


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 8, 64, 1000])
@given(st.integers(0, 2**32 - 1))
def test_inverse_cdf_equals_searchsorted(vocab, seed):
    """Laws of small integers and dyadic uniforms: every sum and product is exact, so there is one right answer."""
    rng = np.random.default_rng(seed)
    law = rng.integers(0, 4, (256, vocab)) * (rng.random((256, vocab)) < 0.5)
    law[np.arange(256), rng.integers(vocab, size=256)] += 1
    uniform = rng.integers(0, 2**10, 256) / 2**10
    total = np.cumsum(law, -1)
    edges = total[np.arange(64), rng.integers(vocab, size=64)] / total[:64, -1]
    uniform[:64] = np.where(edges * 2**10 == np.floor(edges * 2**10), edges, 0.25)  # edges of the CDF, where exact
    uniform = np.where(uniform < 1, uniform, 0)
    expected = [np.searchsorted(c, u * c[-1], side="right") for c, u in zip(total, uniform, strict=True)]
    with jax.enable_x64(True):
        found = DRAW(jnp.asarray(law, jnp.float64), jnp.asarray(uniform))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 1000])
@given(st.integers(0, 2**32 - 1))
def test_a_token_of_probability_zero_is_never_drawn(vocab, seed):
    """At the ends of [0, 1), and at the edges of the CDF, where rounding decides."""
    rng = np.random.default_rng(seed)
    law = rng.gamma(0.3, size=(256, vocab)) * (rng.random((256, vocab)) < 0.3)
    law[np.arange(256), rng.integers(vocab, size=256)] += rng.choice([1e-30, 1e-6, 1.0], 256)
    law = (law / law.sum(-1, keepdims=True)).astype(np.float32)
    uniform = rng.random(256).astype(np.float32)
    uniform[:100] = np.cumsum(law, -1, dtype=np.float32)[:100, vocab // 2]
    uniform[100:150] = 0
    uniform[150:200] = np.nextafter(np.float32(1), np.float32(0))
    token = np.asarray(DRAW(law, np.clip(uniform, 0, np.nextafter(np.float32(1), np.float32(0)))))
    assert (law[np.arange(256), token] > 0).all()
    assert (token[100:150] == np.argmax(law[100:150] > 0, -1)).all()


@pytest.mark.parametrize("vocab", [2, 7, 300])
def test_draws_follow_the_law(vocab):
    """Chi-square at a fixed seed, cells of expectation >= 50 pooled; false alarm rate 1e-3 each (Wilson-Hilferty)."""
    rows = 40_000
    law = np.random.default_rng(0).gamma(0.5, size=vocab)
    law[rows * law / law.sum() < 50] = 0
    law = jnp.asarray(law / law.sum(), jnp.float32)
    uniform = jax.random.uniform(jax.random.key(1), (rows,))
    keys = jax.random.split(jax.random.key(2), rows)
    wide = jnp.tile(law, (rows, 1))
    for source in (Source(uniform=uniform), Source(key=keys)):
        expected = rows * np.asarray(law, np.float64) / float(law.sum())
        support = expected > 0
        observed = np.bincount(draw(wide, source), minlength=vocab)
        assert observed[~support].sum() == 0
        statistic = ((observed - expected)[support] ** 2 / expected[support]).sum()
        free = support.sum() - 1
        assert statistic < free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3 + 1


@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4))
@example([[0] * 6])
@example([[-3, 3, 3, -3, 3, 0]])
def test_first_max_is_argmax(values):
    np.testing.assert_array_equal(first_max(jnp.asarray(values, jnp.float32)), np.argmax(values, -1))


def test_gumbel_max_adds_noise_to_the_log_law_and_stays_in_the_support():
    rng = np.random.default_rng(0)
    law = rng.gamma(0.3, size=(500, 11)) * (rng.random((500, 11)) < 0.5)
    law[:, 3] += 1e-3
    noise = rng.gumbel(size=(500, 11)) * 50
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(law.astype(np.float32)) + noise.astype(np.float32), -1)
    token = np.asarray(gumbel_max(jnp.asarray(law, jnp.float32), jnp.asarray(noise, jnp.float32)))
    np.testing.assert_array_equal(token, expected)
    assert (law[np.arange(500), token] > 0).all() and len(set(token)) > 5


@given(st.lists(st.integers(-3, 3), min_size=5, max_size=5), st.integers(1, 5))
def test_the_top_tokens_come_in_order_and_ties_by_index(values, k):
    found = top_tokens(jnp.asarray([values, values[::-1]], jnp.float32), k)
    for row, given_values in zip(found, (values, values[::-1]), strict=True):
        assert row.tolist() == np.argsort(-np.asarray(given_values), kind="stable")[:k].tolist()


def test_a_choice_comes_with_the_law_it_was_drawn_from():
    logits, source = jnp.array([[0.0, 2.0, 1.0], [1.0, 1.0, 5.0]]), Source(uniform=jnp.array([0.1, 0.99]))
    token, law = Sampling.of(0).choose(logits, source)
    assert token.tolist() == [1, 2] and law is None
    sampling = Sampling.of(0.7, top_k=2)
    token, law = sampling.choose(logits, source)
    np.testing.assert_array_equal(law, sampling.law(logits))
    np.testing.assert_array_equal(token, draw(law, source))
