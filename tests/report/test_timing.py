"""What is compared runs in turns, compiled and finished before the clock is read."""

import jax
import jax.numpy as jnp
import pytest

from specjax.report import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that thunks advance by hand."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_thunks_take_turns_after_warming_up(clock):
    calls = []

    def thunk(name, seconds):
        def call():
            calls.append(name)
            # The first call is slow, as one that compiles is.
            clock.now += 100 if calls.count(name) == 1 else seconds
            return jnp.zeros(())

        return call

    seconds = timing.interleave({"a": thunk("a", 2.0), "b": thunk("b", 4.0)}, repeats=6)
    assert calls == ["a", "b"] * 7
    assert seconds == {"a": [2.0] * 6, "b": [4.0] * 6}


def test_the_clock_stops_when_results_are_ready(clock, monkeypatch):
    waited = []

    def wait(value):
        waited.append(value)
        clock.now += 3.0
        return value

    monkeypatch.setattr(jax, "block_until_ready", wait)
    assert timing.interleave({"a": lambda: "result"}, warmup=2)["a"] == [3.0] * 5
    assert waited == ["result"] * 7


@pytest.mark.parametrize("settings", [{"repeats": 4}, {"warmup": 0}])
def test_too_few_repeats_are_refused(settings):
    with pytest.raises(ValueError, match="repeats must be at least 5"):
        timing.interleave({"a": lambda: 0}, **settings)


def test_paired_ratios_cancel_a_drifting_machine():
    # The machine slows down tenfold in the course; b takes twice as long as a throughout, but a's last turn stumbled.
    drift = [1.0, 1.0, 1.0, 10.0, 10.0]
    a = [*drift[:4], 90.0]
    b = [2 * d for d in drift]
    assert timing.median_of_ratios(b, a) == 2.0
    with pytest.raises(ValueError, match="one length"):
        timing.median_of_ratios([1.0], [1.0, 2.0])


def test_timing_states_median_and_spread():
    assert timing.timing([1.0, 2.0, 3.0, 4.0, 100.0]) == timing.Timing(3.0, 2.0, 5)
