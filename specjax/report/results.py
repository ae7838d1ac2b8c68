"""The records every report is made of: comparison rows with stable keys, and checks."""

from typing import Any, SupportsFloat

import numpy as np

from specjax.report import metrics
from specjax.report.metrics import CountTable, ratio

ROW_KEYS = (
    "drafter",
    "objective",
    "verifier",
    "lossless",
    "temperature",
    "batch",
    "draft_length",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "predicted_speedup",
    "block_efficiency",
    "acceptance_rate",
    "cost_ratio",
    "emitted_tokens",
    "target_calls",
    "overlap",
)


def comparison_row(
    *,
    drafter: str,
    objective: str | None,
    verifier: str,
    lossless: bool,
    temperature: float,
    batch: int,
    draft_length: int,
    counts: CountTable | None = None,
    tokens_per_second: float | None = None,
    baseline_tokens_per_second: float | None = None,
    predicted_speedup: float | None = None,
    cost_ratio: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """One flat record of `results.rows`.

    Args:
        drafter: name of the family or of the checkpoint; "none" for target-only decoding.
        objective: how the drafter was trained; None where there is nothing to train.
        verifier, lossless: the rule's name, and whether it keeps the target's law.
        temperature, batch, draft_length: setting of the run.
        counts: counts of the run; None leaves what derives from them undefined.
        tokens_per_second: emitted tokens over seconds without prefill.
        baseline_tokens_per_second: the fastest target-only setting of the same run.
        predicted_speedup, cost_ratio: from `specjax.theory` and from measurement.
        **extra: further columns, after the stable ones.

    Returns:
        All of ROW_KEYS in order, then the extra ones; None where a value has no meaning. `target_calls` counts row by
        row, so that block_efficiency = emitted_tokens / target_calls in any batch.

    Raises:
        ValueError: an extra column with a stable name.
    """
    derived = metrics.summary(counts) if counts is not None else {}
    taken = sorted(set(extra) & set(ROW_KEYS))
    if taken:
        raise ValueError(f"{', '.join(taken)} is derived from the counts and timings; pass those instead")
    known = tokens_per_second is not None and baseline_tokens_per_second is not None
    given = {
        "drafter": drafter,
        "objective": objective,
        "verifier": verifier,
        "lossless": lossless,
        "temperature": temperature,
        "batch": batch,
        "draft_length": draft_length,
        "tokens_per_second": tokens_per_second,
        "baseline_tokens_per_second": baseline_tokens_per_second,
        "speedup": ratio(tokens_per_second, baseline_tokens_per_second) if known else None,
        "predicted_speedup": predicted_speedup,
        "cost_ratio": cost_ratio,
    }
    return {key: given[key] if key in given else derived.get(key) for key in ROW_KEYS} | extra


def check(name: str, passed: bool | np.bool_, value: Any = None, limit: Any = None) -> dict[str, Any]:
    """One record of `results.checks`."""
    return {"name": name, "passed": bool(passed), "value": value, "limit": limit}


def check_at_least(name: str, value: SupportsFloat | None, limit: float) -> dict[str, Any]:
    """A check that value >= limit; an undefined value or NaN fails."""
    return check(name, value is not None and value >= limit, value, f">= {limit:.4g}")


def check_at_most(name: str, value: SupportsFloat | None, limit: float) -> dict[str, Any]:
    """A check that value <= limit; an undefined value or NaN fails."""
    return check(name, value is not None and value <= limit, value, f"<= {limit:.4g}")


def check_between(name: str, value: SupportsFloat | None, low: float, high: float) -> dict[str, Any]:
    """A check that low <= value <= high; an undefined value or NaN fails."""
    return check(name, value is not None and low <= value <= high, value, f"{low:.4g} to {high:.4g}")
