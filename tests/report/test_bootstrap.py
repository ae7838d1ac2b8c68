"""The interval of a speed-up: ratio of sums, paired prompts, coverage."""

import numpy as np
import pytest

from specjax.report.bootstrap import bootstrap_speedup
from specjax.report.metrics import Interval


def test_sums_come_before_ratios():
    """Prompts of very different length: the mean of ratios (2.75) and the ratio of sums (1.30) are far apart."""
    tokens, seconds, baseline = [100, 1], [80.0, 1 / 5], [100.0, 1.0]
    interval = bootstrap_speedup(*map(np.array, (tokens, seconds, tokens, baseline)))
    assert interval.estimate == pytest.approx(101 / 80.2) and interval.low <= interval.estimate <= interval.high


def test_texts_of_different_length_count_by_their_own_tokens():
    interval = bootstrap_speedup(*map(np.array, ([30, 30], [1.0, 1.0], [10, 10], [1.0, 1.0])))
    assert interval == Interval(3.0, 3.0, 3.0)


def test_prompts_are_paired():
    """A hard prompt is slow for both: the ratio is the same for every prompt, so nothing is uncertain."""
    seconds = np.array([1.0, 50.0, 3.0, 0.1])
    tokens = np.array([10, 20, 7, 5])
    interval = bootstrap_speedup(tokens, seconds / 2, tokens, seconds)
    assert interval.low == pytest.approx(2) and interval.high == pytest.approx(2)


def test_coverage():
    """200 experiments of 40 prompts, nominal 0.95. At a true coverage of 0.93, 172 or fewer hits have probability
    0.0005 (binomial)."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        tokens = rng.integers(20, 100, 40)
        seconds, baseline = tokens * rng.uniform(0.5, 1.5, 40), tokens * rng.uniform(1, 3, 40)  # truth: 2 / 1
        interval = bootstrap_speedup(tokens, seconds, tokens, baseline, resamples=400)
        assert interval.low < interval.estimate < interval.high
        hits += interval.low <= 2 <= interval.high
    assert 173 <= hits < 200
    assert interval == bootstrap_speedup(tokens, seconds, tokens, baseline, resamples=400)


def test_what_has_no_interval():
    assert bootstrap_speedup(*map(np.array, ([5], [1.0], [5], [2.0]))) == Interval(2.0, None, None)
    assert bootstrap_speedup(*map(np.array, ([5, 5], [0.0, 0.0], [5, 5], [2.0, 1.0]))) == Interval(None, None, None)
    with pytest.raises(ValueError, match="same prompts; got 2, 2, 1, 2"):
        bootstrap_speedup(*map(np.array, ([5, 5], [1.0, 1.0], [5], [2.0, 2.0])))
