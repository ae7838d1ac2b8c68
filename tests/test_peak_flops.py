"""The machine's peak: quick to measure, and of the right order."""

import time

import jax
import pytest

from specjax import peak_flops


def test_peak_is_quick_and_plausible():
    start = time.perf_counter()
    peak = peak_flops.measure_peak_flops(256, 3)
    assert 1e8 < peak < 1e16
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("backend, products", [("cpu", 1), ("gpu", 32)])
def test_the_best_call_counts_with_all_its_products(backend, products, monkeypatch):
    seconds = iter([3.0, 0.5, 2.0])
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(peak_flops, "_seconds", lambda function, argument: next(seconds))
    assert peak_flops.measure_peak_flops(8, 3) == products * 2 * 8**3 / 0.5
    assert next(seconds, None) is None
