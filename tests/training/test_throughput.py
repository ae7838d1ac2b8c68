import pytest

from specjax.training import throughput


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when the test says so."""
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    peaks = iter([100.0, 50.0, 25.0])
    monkeypatch.setattr(throughput, "measure_peak_flops", lambda: next(peaks))

    def wait(seconds):
        now[0] += seconds

    return wait


def test_pauses_and_what_happens_before_the_start_do_not_count(clock):
    watch = throughput.Throughput()
    clock(10)
    watch.count(1000)  # the compiling step
    assert watch.read() is None and watch.overall() is None
    watch.start()
    clock(2)
    watch.count(10)
    watch.pause()
    clock(30)
    watch.start()
    clock(3)
    watch.count(10)
    assert watch.read() == 4
    clock(1)
    watch.count(8)
    assert watch.read() == 8
    assert watch.overall() == pytest.approx(28 / 6)


def test_peak_is_measured_again_when_it_is_old(clock):
    watch = throughput.Throughput(refresh_seconds=60)
    assert watch.peak == 100
    watch.start()
    clock(61)
    watch.pause()
    watch.start()
    assert watch.peak == 50
    watch.pause()
    watch.start()
    assert watch.peak == 50
