"""Closed forms against brute force, and textbook exercises, corrected."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax import theory

rates = st.floats(0, 1)
lengths = st.integers(0, 12)


@st.composite
def laws(draw, vocab=None, zeros=True):
    size = draw(st.integers(2, 6)) if vocab is None else vocab
    weights = draw(hnp.arrays(float, size, elements=st.floats(0 if zeros else 0.01, 1)).filter(lambda w: w.sum() > 0.1))
    if zeros:
        weights = np.where(weights < 0.1, 0, weights)
        weights[draw(st.integers(0, size - 1))] += 0.2
    return weights / weights.sum()


@st.composite
def pairs(draw, zeros=True):
    p = draw(laws(zeros=zeros))
    return p, draw(laws(vocab=len(p), zeros=zeros))


# Textbook exercises.


def test_exercise_1_a_likelier_token_is_always_accepted():
    assert min(1.0, 0.8 / 0.5) == 1.0
    assert theory.overlap([0.8, 0.2], [0.5, 0.5]) == pytest.approx(0.5 * min(1, 0.8 / 0.5) + 0.5 * min(1, 0.2 / 0.5))


def test_exercise_2_tokens_per_target_call():
    assert theory.expected_tokens_without_bonus(0.8, 5) == pytest.approx(3.3616)
    assert theory.expected_tokens(0.8, 5) == pytest.approx(3.68928)
    for value in (theory.expected_tokens_without_bonus(0.8, 5), theory.expected_tokens(0.8, 5)):
        assert abs(value - 4.096) > 0.1  # the value often given is neither


def test_exercise_3_perfect_and_average_drafters():
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens_without_bonus(1.0, 4) == 4  # introductions take γ + 1 as this formula's limit
    assert theory.expected_tokens_without_bonus(0.5, 4) == 1.875
    assert theory.expected_tokens(0.5, 4) == 1.9375


# Tokens per round.


@given(rates, lengths)
def test_expected_tokens_is_the_mean_over_outcomes(alpha, gamma):
    outcomes = [(alpha**k * (1 - alpha), k + 1) for k in range(gamma)] + [(alpha**gamma, gamma + 1)]
    assert sum(p for p, _ in outcomes) == pytest.approx(1)
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(sum(p * tokens for p, tokens in outcomes))
    # Without the bonus a full run emits γ; a round of no drafts emits nothing.
    outcomes = [(alpha**k * (1 - alpha), k + 1) for k in range(gamma)] + [(alpha**gamma, gamma)]
    expected = sum(p * tokens for p, tokens in outcomes)
    assert theory.expected_tokens_without_bonus(alpha, gamma) == pytest.approx(expected)


@given(st.floats(0, 0.999), lengths)
def test_geometric_forms(alpha, gamma):
    assert theory.expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert theory.expected_tokens_without_bonus(alpha, gamma) == pytest.approx((1 - alpha**gamma) / (1 - alpha))


@given(rates, lengths)
def test_constant_acceptance_is_a_case_of_survival(alpha, gamma):
    survival = theory.survival_from_acceptance([alpha] * gamma)
    assert theory.expected_tokens_from_survival(survival) == pytest.approx(theory.expected_tokens(alpha, gamma))
    speedup = theory.constant_alpha_speedup(alpha, 0.1, gamma, 1.3)
    assert theory.predicted_speedup(survival, 0.1, 1.3) == pytest.approx(speedup)


def test_functions_of_alpha_broadcast():
    alphas = np.linspace(0, 1, 7)
    for form in (theory.expected_tokens, theory.expected_tokens_without_bonus):
        np.testing.assert_allclose(form(alphas, 4), [form(a, 4) for a in alphas])


# Speed.


@given(rates, st.integers(1, 64))
def test_linear_time_is_optimistic(alpha, gamma):
    exact = theory.time_per_token(alpha, gamma, 0.1, 1.0)
    linear = theory.time_per_token_linear(alpha, gamma, 0.1, 1.0)
    assert linear <= exact * (1 + 1e-12)
    if alpha in (0, 1) or gamma == 1:
        assert linear == pytest.approx(exact)


@given(rates, lengths, st.floats(0, 2), st.floats(0.5, 5))
def test_time_per_token_is_the_inverse_of_the_speedup(alpha, gamma, cost_ratio, verify_ratio):
    seconds = theory.time_per_token(alpha, gamma, 0.02 * cost_ratio, 0.02, 0.02 * verify_ratio)
    assert 0.02 / seconds == pytest.approx(theory.constant_alpha_speedup(alpha, cost_ratio, gamma, verify_ratio))


@given(st.lists(rates, max_size=6), st.floats(0, 1), st.floats(1, 2))
def test_optimal_draft_length_is_optimal(acceptance, cost_ratio, slope):
    verify = lambda gamma: 1 + (slope - 1) * gamma  # noqa: E731
    best = theory.optimal_draft_length(acceptance, cost_ratio, verify_ratio=verify)
    speedup = lambda g: theory.predicted_speedup(np.cumprod(acceptance[:g]), cost_ratio, verify(g))  # noqa: E731
    assert 0 <= best <= len(acceptance)
    reached = speedup(best) if best else 1.0
    assert all(reached >= speedup(g) for g in range(1, len(acceptance) + 1)) and reached >= 1


def test_optimal_draft_length_of_a_constant():
    assert theory.optimal_draft_length(0.0, 0.1, 8) == 0  # speculation that never pays is switched off
    assert theory.optimal_draft_length(1.0, 0.1, 8) == 8
    assert 0 < theory.optimal_draft_length(0.7, 0.1, 16) < 16
    with pytest.raises(ValueError, match="max_draft_length"):
        theory.optimal_draft_length(0.7, 0.1)


# Acceptance.


@given(pairs())
def test_overlap_is_what_the_token_rule_accepts(pair):
    p, q = pair
    accepted = sum(q[x] * min(1, p[x] / q[x]) for x in range(len(q)) if q[x] > 0)
    assert theory.overlap(p, q) == pytest.approx(accepted)
    assert theory.overlap(p, q) == pytest.approx(1 - theory.total_variation(p, q))


@given(laws(), st.data())
def test_one_hot_acceptance_is_the_overlap_with_a_one_hot_law(p, data):
    token = data.draw(st.integers(0, len(p) - 1))
    assert theory.one_hot_acceptance(p, token) == pytest.approx(theory.overlap(p, np.eye(len(p))[token]))


@given(pairs())
def test_coupled_acceptance_bounds(pair):
    p, q = pair
    tv = theory.total_variation(p, q)
    accepted = theory.coupled_acceptance(p, q)
    assert (1 - tv) / (1 + tv) - 1e-9 <= accepted <= 1 - tv + 1e-9
    assert accepted == pytest.approx(theory.coupled_acceptance(q, p))
    assert theory.coupled_acceptance(p, p) == pytest.approx(1)


@pytest.mark.parametrize(
    ("p", "q"), [([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]), ([0.0, 0.7, 0.3], [0.5, 0.5, 0.0]), ([1.0, 0.0], [0.0, 1.0])]
)
def test_coupled_acceptance_by_simulation(p, q):
    noise = np.random.default_rng(0).gumbel(size=(200_000, len(p)))
    with np.errstate(divide="ignore"):
        agree = np.mean(np.argmax(np.log(p) + noise, 1) == np.argmax(np.log(q) + noise, 1))
    # 4.5 standard errors: false alarm 7e-6 for each pair.
    expected = theory.coupled_acceptance(p, q)
    assert abs(agree - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / len(noise)) + 1e-12


def test_coupled_acceptance_of_extreme_laws_is_finite():
    assert theory.coupled_acceptance([1 - 1e-300, 1e-300], [1e-300, 1 - 1e-300]) == pytest.approx(0, abs=1e-12)


def test_block_rule_keeps_more_than_the_token_rule():
    p, q = [[1 / 3, 2 / 3]] * 2, [[2 / 3, 1 / 3]] * 2
    assert theory.token_rule_expected_accepted(p, q) == pytest.approx(10 / 9)
    assert theory.block_rule_expected_accepted(p, q) == pytest.approx(11 / 9)


@given(st.lists(pairs(), min_size=1, max_size=3).filter(lambda ps: len({len(p) for p, _ in ps}) == 1))
def test_block_rule_between_the_token_rule_and_the_bound(chain):
    p, q = (np.stack(side) for side in zip(*chain, strict=True))
    token, block = theory.token_rule_expected_accepted(p, q), theory.block_rule_expected_accepted(p, q)
    # No rule keeps a prefix more often than the overlap of the two laws of that prefix allows.
    bound = 0.0
    for depth in range(1, len(p) + 1):
        drafts = itertools.product(range(p.shape[1]), repeat=depth)
        bound += sum(min(np.prod([law[d][x] for d, x in enumerate(xs)]) for law in (p, q)) for xs in drafts)
    assert token <= block + 1e-9
    assert block <= bound + 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens(1.2, 3),
        lambda: theory.expected_tokens(float("nan"), 3),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.expected_tokens_from_survival([0.5, 0.6]),
        lambda: theory.constant_alpha_speedup(0.5, -0.1, 3),
        lambda: theory.predicted_speedup([0.5], 0.1, 0.0),
        lambda: theory.overlap([0.5, 0.5], [1.0]),
        lambda: theory.overlap([0.5, 0.6], [0.5, 0.5]),
        lambda: theory.total_variation([1.5, -0.5], [0.5, 0.5]),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()
