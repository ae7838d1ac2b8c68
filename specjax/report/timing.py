"""Timing on a machine whose speed drifts: what is compared runs in turns, and ratios are taken turn by turn."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

MIN_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median and spread of one thunk's repeats.

    Attributes:
        median: seconds.
        iqr: interquartile range, seconds.
        repeats: number of measurements.
    """

    median: float
    iqr: float
    repeats: int


def interleave(
    thunks: Mapping[str, Callable[[], Any]], repeats: int = MIN_REPEATS, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each thunk, measured A B C, A B C, ...

    Args:
        thunks: what to time. A thunk returns the arrays that its work ends in; the clock stops when they are ready.
            Work that its result does not depend on is not waited for.
        repeats: turns, at least 5.
        warmup: untimed calls of each thunk first, so that nothing compiles on the clock; at least 1.

    Returns:
        One list of `repeats` seconds per name; entry i of every list is from the same turn.

    Raises:
        ValueError: fewer than 5 repeats or no warm-up.
    """
    if repeats < MIN_REPEATS or warmup < 1:
        raise ValueError(f"repeats must be at least {MIN_REPEATS} and warmup at least 1; got {repeats} and {warmup}")
    for thunk in thunks.values():
        for _ in range(warmup):
            jax.block_until_ready(thunk())
    seconds: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(repeats):
        for name, thunk in thunks.items():
            seconds[name].append(seconds_of(thunk))
    return seconds


def seconds_of(thunk: Callable[[], Any]) -> float:
    """Seconds of one call, until the arrays that it returns are ready."""
    start = time.perf_counter()
    jax.block_until_ready(thunk())
    return time.perf_counter() - start


def timing(seconds: Collection[float]) -> Timing:
    """Median and interquartile range of one list of seconds."""
    low, median, high = np.quantile(np.asarray(seconds, float), [0.25, 0.5, 0.75])
    return Timing(float(median), float(high - low), len(seconds))


def median_of_ratios(numerator: Collection[float], denominator: Collection[float]) -> float:
    """Median over turns of the ratio within a turn: what drifts between turns cancels.

    Raises:
        ValueError: lists of different length, which cannot come from the same turns.
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"paired ratios need lists of one length; got {len(numerator)} and {len(denominator)}")
    return float(np.median(np.asarray(numerator, float) / np.asarray(denominator, float)))
