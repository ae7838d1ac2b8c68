"""Every reported figure, derived from the counts that the decoding loop carries. Plain numpy.

All figures are ratios of sums over rows (one row is one prompt), never means of per-row ratios: a mean of ratios weighs
a prompt of three tokens like one of three hundred. A ratio whose denominator is 0 is undefined and reported as None.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Num

PER_ROW = ("rounds", "drafted", "accepted", "emitted")
PER_DEPTH = ("attempts", "acceptances", "overlap_sum")


@dataclasses.dataclass(frozen=True, eq=False)
class CountTable:
    """The counts of B finished rows, on the host.

    Attributes:
        rounds: target calls of each row.
        drafted: drafted tokens put before the verifier.
        accepted: drafted tokens accepted.
        emitted: tokens the user received.
        attempts: per depth 1..γ, drafts that were valid and that the rule reached.
        acceptances: per depth, those that were accepted.
        overlap_sum: per depth, Σ over attempts of the overlap Σ min(p, q) there.
    """

    rounds: Num[np.ndarray, "B"]
    drafted: Num[np.ndarray, "B"]
    accepted: Num[np.ndarray, "B"]
    emitted: Num[np.ndarray, "B"]
    attempts: Num[np.ndarray, "B G"]
    acceptances: Num[np.ndarray, "B G"]
    overlap_sum: Num[np.ndarray, "B G"]

    @classmethod
    def of(cls, counts: Any) -> "CountTable":
        """From a mapping, or anything with these names as attributes; device arrays are fetched.

        Raises:
            ValueError: shapes that do not belong together.
        """
        get = counts.__getitem__ if isinstance(counts, Mapping) else lambda name: getattr(counts, name)
        arrays = {name: np.asarray(get(name)) for name in PER_ROW + PER_DEPTH}
        rows = arrays["rounds"].shape
        if len(rows) != 1 or any(arrays[name].shape != rows for name in PER_ROW):
            raise ValueError(f"per-row counts must be [B]; got shapes {[arrays[name].shape for name in PER_ROW]}")
        depth = arrays["attempts"].shape
        if len(depth) != 2 or depth[:1] != rows or any(arrays[name].shape != depth for name in PER_DEPTH):
            raise ValueError(
                f"per-depth counts must be [B, γ]; got shapes {[arrays[name].shape for name in PER_DEPTH]}"
            )
        return cls(**arrays)

    @classmethod
    def concatenate(cls, tables: Iterable[Any]) -> "CountTable":
        """The rows of several calls in one table; depths are padded with zeros to the largest γ."""
        tables = [table if isinstance(table, cls) else cls.of(table) for table in tables]
        depth = max(table.attempts.shape[1] for table in tables)
        pad = lambda a: np.pad(a, ((0, 0), (0, depth - a.shape[1])))  # noqa: E731
        joined = {name: np.concatenate([getattr(t, name) for t in tables]) for name in PER_ROW}
        return cls(**joined, **{name: np.concatenate([pad(getattr(t, name)) for t in tables]) for name in PER_DEPTH})


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with its bootstrap percentile interval; None where undefined."""

    estimate: float | None
    low: float | None
    high: float | None


def ratio(numerator, denominator) -> float | None:
    """numerator / denominator as a float, or None when the denominator is 0."""
    return None if denominator == 0 else float(numerator / denominator)


def block_efficiency(counts: CountTable) -> float | None:
    """τ: tokens emitted per target call."""
    return ratio(counts.emitted.sum(), counts.rounds.sum())


def acceptance_rate(counts: CountTable) -> float | None:
    """α pooled over depths: acceptances / attempts."""
    return ratio(counts.acceptances.sum(), counts.attempts.sum())


def acceptance_per_depth(counts: CountTable) -> list[float | None]:
    """[γ] α of each depth, conditional on reaching it."""
    return [ratio(a, n) for a, n in zip(counts.acceptances.sum(0), counts.attempts.sum(0), strict=True)]


def survival_per_depth(counts: CountTable, unreached: float | None = None) -> list[float | None]:
    """[γ] probability that the first d drafts are all accepted: the running product of the conditional rates.

    Rounds cut short by the budget, a stop token or a short proposal count up to where they were cut (the product-limit
    estimate), so they do not pull the deeper figures down. From the first depth never attempted on it is `unreached`:
    unknown (None), or 0 for a prediction, which must not count on it.
    """
    survival, product = [], 1.0
    for rate in acceptance_per_depth(counts):
        product = None if rate is None or product is None else product * rate
        survival.append(unreached if product is None else product)
    return survival


def overlap(counts: CountTable) -> float | None:
    """Overlap Σ min(p, q) averaged over attempted positions."""
    return ratio(counts.overlap_sum.sum(), counts.attempts.sum())


def summary(counts: CountTable) -> dict[str, Any]:
    """All figures by their report names; JSON-ready."""
    return {
        "emitted_tokens": int(counts.emitted.sum()),
        "target_calls": int(counts.rounds.sum()),
        "drafted_tokens": int(counts.drafted.sum()),
        "accepted_tokens": int(counts.accepted.sum()),
        "block_efficiency": block_efficiency(counts),
        "acceptance_rate": acceptance_rate(counts),
        "acceptance_per_depth": acceptance_per_depth(counts),
        "survival_per_depth": survival_per_depth(counts),
        "overlap": overlap(counts),
    }


def bootstrap_ratio(numerator, denominator, *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> Interval:
    """Σ numerator / Σ denominator with a percentile interval from resampling rows.

    Args:
        numerator, denominator: [B] sums of each row; a row keeps both together.
        seed: of the resampling; the interval is a function of its arguments alone.
        resamples: number of bootstrap draws.
        level: coverage of the interval.
    """
    numerator, denominator = np.asarray(numerator, float), np.asarray(denominator, float)
    picks = _resampled_rows(len(numerator), seed, resamples)
    return _interval(
        ratio(numerator.sum(), denominator.sum()), numerator[picks].sum(-1), denominator[picks].sum(-1), level
    )


def bootstrap_block_efficiency(counts: CountTable, **kwargs) -> Interval:
    """τ with its interval over prompts."""
    return bootstrap_ratio(counts.emitted, counts.rounds, **kwargs)


def compare_rejection(
    ours: CountTable, reference: CountTable, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> dict[str, Interval]:
    """Rejection rates 1 - α of two runs over the same prompts, row by row.

    The runs are paired: each resample takes the same prompts from both, so what makes a prompt hard for both cancels.

    Returns:
        `difference` = ours - reference; `ratio` = ours / reference; `reduction` = 1 - ratio (0.25 is 25 % less).

    Raises:
        ValueError: the runs have different numbers of rows.
    """
    if len(ours.rounds) != len(reference.rounds):
        raise ValueError(f"paired runs need the same prompts; got {len(ours.rounds)} and {len(reference.rounds)} rows")
    picks = np.concatenate([np.arange(len(ours.rounds))[None], _resampled_rows(len(ours.rounds), seed, resamples)])
    rates = []
    for run in (ours, reference):
        attempts = run.attempts.sum(1).astype(float)
        rejected = attempts - run.acceptances.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            rates.append(rejected[picks].sum(-1) / attempts[picks].sum(-1))  # entry 0 is the sample itself
    a, b = rates
    one = np.ones_like(a)
    return {
        "difference": _interval(_first(a - b, one), (a - b)[1:], one[1:], level),
        "ratio": _interval(_first(a, b), a[1:], b[1:], level),
        "reduction": _interval(_first(b - a, b), (b - a)[1:], b[1:], level),
    }


def _first(numerator, denominator):
    return None if np.isnan(numerator[0]) or np.isnan(denominator[0]) else ratio(numerator[0], denominator[0])


def _resampled_rows(rows, seed, resamples):
    return np.random.default_rng(seed).integers(0, rows, (resamples, rows)) if rows else np.zeros((resamples, 0), int)


def _interval(estimate, numerators, denominators, level):
    defined = np.isfinite(numerators) & np.isfinite(denominators) & (denominators != 0)
    if estimate is None or not defined.any():
        return Interval(estimate, None, None)
    low, high = np.quantile(numerators[defined] / denominators[defined], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high))
