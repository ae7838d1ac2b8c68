"""Tokens per second and FLOP utilisation of a training loop, without its pauses."""

import time

from specjax.peak_flops import measure_peak_flops


class Throughput:
    """A stopwatch that runs only while steps run: compilation, evaluation and saving are left out.

    Args:
        refresh_seconds: how often, at most, the machine's peak is measured again (in a pause).

    Attributes:
        peak: float32 matmul FLOPs per second, as last measured.
    """

    def __init__(self, refresh_seconds: float = 10.0):
        self.refresh_seconds = refresh_seconds
        self._measure_peak()
        self._started = None
        self._window = [0, 0.0]  # tokens, seconds since the last reading
        self._total = [0, 0.0]

    def start(self) -> None:
        """Starts or continues; nothing must be running on the device."""
        if time.monotonic() - self._peak_time > self.refresh_seconds:
            self._measure_peak()
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stops; the last step must have finished."""
        if self._started is not None:
            self._add_seconds()
            self._started = None

    def count(self, tokens: int) -> None:
        """Adds a finished step, when running."""
        if self._started is not None:
            self._window[0] += tokens
            self._total[0] += tokens

    def read(self) -> float | None:
        """Tokens per second since the last reading; None when nothing ran."""
        if self._started is not None:
            self._add_seconds()
            self._started = time.perf_counter()
        tokens, seconds = self._window
        self._window = [0, 0.0]
        return tokens / seconds if tokens and seconds else None

    def overall(self) -> float | None:
        """Tokens per second of the whole run."""
        tokens, seconds = self._total
        return tokens / seconds if tokens and seconds else None

    def _add_seconds(self):
        seconds = time.perf_counter() - self._started
        self._window[1] += seconds
        self._total[1] += seconds

    def _measure_peak(self):
        self.peak = measure_peak_flops()
        self._peak_time = time.monotonic()
