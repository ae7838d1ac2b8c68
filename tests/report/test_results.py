"""Rows keep their stable keys, whatever is known."""

import numpy as np
import pytest

from specjax.report import results
from specjax.report.metrics import CountTable

SETTING = dict(
    drafter="independent",
    objective="forward_kl",
    verifier="token",
    lossless=True,
    temperature=1.0,
    batch=2,
    draft_length=2,
)
COUNTS = CountTable(
    rounds=np.array([10, 10]),
    drafted=np.array([20, 20]),
    accepted=np.array([12, 8]),
    emitted=np.array([22, 18]),
    attempts=np.array([[10, 8], [10, 4]]),
    acceptances=np.array([[8, 4], [4, 4]]),
    overlap_sum=np.array([[8.0, 4.0], [4.0, 4.0]]),
)


def test_a_full_row():
    row = results.comparison_row(
        **SETTING,
        counts=COUNTS,
        tokens_per_second=300.0,
        baseline_tokens_per_second=200.0,
        predicted_speedup=1.4,
        cost_ratio=0.05,
        context=128,
    )
    assert tuple(row) == (*results.ROW_KEYS, "context")
    assert row["speedup"] == 1.5
    assert row["block_efficiency"] == row["emitted_tokens"] / row["target_calls"] == 2.0
    assert row["acceptance_rate"] == 20 / 32 == row["overlap"]


def test_what_is_unknown_is_none():
    row = results.comparison_row(**SETTING)
    assert tuple(row) == results.ROW_KEYS
    for key in results.ROW_KEYS[7:]:
        assert row[key] is None
    assert results.comparison_row(**SETTING, tokens_per_second=3.0)["speedup"] is None
    row = results.comparison_row(**SETTING, tokens_per_second=3.0, baseline_tokens_per_second=0.0)
    assert row["speedup"] is None


def test_a_derived_column_cannot_be_passed_in():
    with pytest.raises(ValueError, match="speedup"):
        results.comparison_row(**SETTING, speedup=9.0)


def test_checks():
    assert results.check("a", np.bool_(True)) == {"name": "a", "passed": True, "value": None, "limit": None}
    assert results.check_at_least("a", 1.6, 1.6)["passed"] and not results.check_at_least("a", 1.5, 1.6)["passed"]
    assert results.check_at_most("a", 1.6, 1.6)["passed"] and not results.check_at_most("a", 1.7, 1.6)["passed"]
    assert (
        results.check_between("a", 1.0, 0.9, 1.1)["passed"] and not results.check_between("a", 1.2, 0.9, 1.1)["passed"]
    )


@pytest.mark.parametrize("value", [None, float("nan")])
def test_an_undefined_value_passes_no_check(value):
    checks = (results.check_at_least("a", value, 0), results.check_at_most("a", value, 0))
    assert not any(c["passed"] for c in (*checks, results.check_between("a", value, 0, 1)))
