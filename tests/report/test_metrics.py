"""Figures from counts: sums before ratios, None where undefined, intervals that cover."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax import theory
from specjax.report import metrics
from specjax.report.metrics import CountTable


def simulated(alpha, rows=40, gamma=4, rounds=30, seed=0, spread=0.0):
    """Counts of the token rule with a conditional rate of its own per row, alpha ± spread, at every depth."""
    rng = np.random.default_rng(seed)
    rate = np.clip(alpha + rng.uniform(-spread, spread, rows), 0, 1)
    accept = rng.random((rows, rounds, gamma)) < rate[:, None, None]
    kept = np.cumprod(accept, -1)
    reached = np.concatenate([np.ones((rows, rounds, 1), int), kept[..., :-1]], -1)
    attempts, acceptances = reached.sum(1), kept.sum(1)
    return CountTable.of(
        {
            "rounds": np.full(rows, rounds),
            "drafted": np.full(rows, rounds * gamma),
            "accepted": acceptances.sum(1),
            "emitted": acceptances.sum(1) + rounds,
            "attempts": attempts,
            "acceptances": acceptances,
            "overlap_sum": attempts * rate[:, None],
        }
    )


def empty(rows=2, gamma=3):
    per_row, per_depth = np.zeros(rows, int), np.zeros((rows, gamma), int)
    return CountTable(per_row, per_row, per_row, per_row, per_depth, per_depth, per_depth * 1.0)


@given(st.floats(0.1, 0.95), st.integers(1, 6), st.integers(0, 100))
def test_figures_agree_with_each_other(alpha, gamma, seed):
    counts = simulated(alpha, gamma=gamma, seed=seed)
    survival = metrics.survival_per_depth(counts)
    if None not in survival:
        # Rounds that are never cut short: τ is 1 + the survival, exactly.
        assert theory.expected_tokens_from_survival(survival) == pytest.approx(metrics.block_efficiency(counts))
    assert metrics.overlap(counts) == pytest.approx(alpha)
    for rate, attempts, kept in zip(
        metrics.acceptance_per_depth(counts), counts.attempts.sum(0), counts.acceptances.sum(0), strict=True
    ):
        assert rate is None if attempts == 0 else rate == kept / attempts


def test_ratio_of_sums_not_mean_of_ratios():
    counts = CountTable.of(
        {
            "rounds": np.array([1, 99]),
            "drafted": np.array([1, 99]),
            "accepted": np.array([1, 0]),
            "emitted": np.array([2, 99]),
            "attempts": np.array([[1], [99]]),
            "acceptances": np.array([[1], [0]]),
            "overlap_sum": np.array([[1.0], [9.9]]),
        }
    )
    assert metrics.acceptance_rate(counts) == 0.01
    assert metrics.block_efficiency(counts) == 1.01
    assert metrics.overlap(counts) == pytest.approx(0.109)


def test_cut_rounds_do_not_lower_survival():
    # Ten rounds accept both drafts; ten more accept the first and were cut before the second.
    counts = CountTable.of(
        dict(rounds=[20], drafted=[30], accepted=[30], emitted=[50], attempts=[[20, 10]], acceptances=[[20, 10]])
        | {"overlap_sum": [[20.0, 10.0]]}
    )
    assert metrics.survival_per_depth(counts) == [1.0, 1.0]


@pytest.mark.parametrize("counts", [empty(), empty(gamma=0), empty(rows=0)])
def test_nothing_drafted_is_undefined_not_an_error(counts):
    summary = metrics.summary(counts)
    assert summary["acceptance_rate"] is None and summary["overlap"] is None and summary["block_efficiency"] is None
    assert all(value is None for value in summary["survival_per_depth"])
    for interval in metrics.compare_rejection(counts, counts).values():
        assert interval == metrics.Interval(None, None, None)


def test_target_only_has_a_block_efficiency_of_one():
    counts = CountTable.of(
        dict(rounds=[5], drafted=[0], accepted=[0], emitted=[5])
        | {name: np.zeros((1, 0)) for name in ("attempts", "acceptances", "overlap_sum")}
    )
    assert metrics.block_efficiency(counts) == 1.0 and metrics.acceptance_rate(counts) is None


def test_counts_from_device_arrays_and_joined():
    counts = simulated(0.6, gamma=2)
    names = metrics.PER_ROW + metrics.PER_DEPTH
    on_device = types.SimpleNamespace(**{name: jnp.asarray(getattr(counts, name)) for name in names})
    joined = CountTable.concatenate([on_device, simulated(0.8, gamma=4, rows=3)])
    assert joined.attempts.shape == (43, 4)
    assert joined.emitted.sum() == counts.emitted.sum() + simulated(0.8, gamma=4, rows=3).emitted.sum()
    assert not joined.attempts[:40, 2:].any()


def test_shapes_that_do_not_belong_together_are_refused():
    counts = simulated(0.6)
    fields = {name: getattr(counts, name) for name in metrics.PER_ROW + metrics.PER_DEPTH}
    with pytest.raises(ValueError, match="per-row"):
        CountTable.of(fields | {"emitted": np.zeros(3)})
    with pytest.raises(ValueError, match="per-depth"):
        CountTable.of(fields | {"attempts": np.zeros((40, 2))})
    with pytest.raises(ValueError, match="same prompts"):
        metrics.compare_rejection(counts, simulated(0.6, rows=3))


def test_bootstrap_interval_covers_and_is_reproducible():
    # Exact binomial tail: at most 169 of 200 intervals at true coverage 0.93 covering has probability below 1e-4.
    covered = 0
    for seed in range(200):
        counts = simulated(0.7, rows=60, rounds=8, seed=seed, spread=0.2)
        truth = theory.expected_tokens(np.linspace(0.5, 0.9, 20001), 4).mean()
        interval = metrics.bootstrap_block_efficiency(counts, resamples=400)
        assert interval.low <= interval.estimate <= interval.high
        covered += interval.low <= truth <= interval.high
    assert covered >= 170
    assert metrics.bootstrap_block_efficiency(counts) == metrics.bootstrap_block_efficiency(counts)
    assert metrics.bootstrap_block_efficiency(counts) != metrics.bootstrap_block_efficiency(counts, seed=1)


def test_rejection_of_paired_runs():
    hard, easy = simulated(0.6, seed=1), simulated(0.8, seed=2)
    compared = metrics.compare_rejection(easy, hard)
    rejection = [1 - metrics.acceptance_rate(c) for c in (easy, hard)]
    assert compared["difference"].estimate == pytest.approx(rejection[0] - rejection[1])
    assert compared["ratio"].estimate == pytest.approx(rejection[0] / rejection[1])
    assert compared["reduction"].estimate == pytest.approx(1 - compared["ratio"].estimate)
    assert compared["reduction"].low == pytest.approx(1 - compared["ratio"].high)
    assert 0.3 < compared["reduction"].low < compared["reduction"].high < 0.7  # the true reduction is 0.5
    same = metrics.compare_rejection(hard, hard)
    assert (same["difference"].low, same["difference"].high) == (0, 0)  # paired: identical runs differ by nothing
    assert (same["ratio"].low, same["ratio"].high) == (1, 1)


def test_a_reference_without_rejections_has_no_ratio():
    perfect = simulated(1.0)
    compared = metrics.compare_rejection(simulated(0.5), perfect)
    assert compared["ratio"] == metrics.Interval(None, None, None)
    assert compared["difference"].estimate > 0
