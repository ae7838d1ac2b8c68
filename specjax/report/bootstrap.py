"""How sure a speed-up is: an interval over prompts for a ratio of two throughputs."""

import numpy as np
from jaxtyping import Num

from specjax.report.metrics import Interval


def bootstrap_speedup(
    tokens,
    seconds,
    baseline_tokens,
    baseline_seconds,
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """(Σ tokens / Σ seconds) / (Σ baseline tokens / Σ baseline seconds), with a percentile interval over prompts.

    Each resample draws prompts with replacement and takes both runs of every prompt it draws, so what makes a prompt
    slow for both cancels. Sums come before ratios: a mean of the prompts' own speed-ups would weigh a prompt of three
    tokens like one of three hundred.

    Args:
        tokens, seconds, baseline_tokens, baseline_seconds: per prompt; a prompt with several turns or repeats comes in
            as one sum.
        seed: of the resampling; the interval is a function of its arguments alone.
        resamples: number of draws.
        level: coverage of the interval.

    Returns:
        None where nothing was emitted or no time passed; of one prompt, the estimate without an interval.

    Raises:
        ValueError: arrays of different length, which cannot be of the same prompts.
    """
    columns = [np.asarray(column, float) for column in (tokens, seconds, baseline_tokens, baseline_seconds)]
    sizes = [column.size for column in columns]
    if len(set(sizes)) > 1:
        raise ValueError(f"paired runs need the same prompts; got {', '.join(map(str, sizes))} of them")
    table = np.stack(columns)
    estimate = _speedup(table.sum(1, keepdims=True))[0]
    if not np.isfinite(estimate):
        return Interval(None, None, None)
    if sizes[0] < 2:
        return Interval(float(estimate), None, None)
    picks = np.random.default_rng(seed).integers(0, sizes[0], (resamples, sizes[0]))
    drawn = _speedup(table[:, picks].sum(-1))
    low, high = np.quantile(drawn[np.isfinite(drawn)], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high))


def _speedup(sums: Num[np.ndarray, "4 R"]) -> Num[np.ndarray, "R"]:
    """NaN or infinite where a denominator is 0."""
    tokens, seconds, baseline_tokens, baseline_seconds = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        return tokens * baseline_seconds / (seconds * baseline_tokens)
