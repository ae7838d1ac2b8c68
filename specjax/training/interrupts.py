"""SIGTERM and Ctrl-C as a request that the loop answers between two steps."""

import signal
import threading


class Interrupts:
    """Context manager: inside it, the first SIGTERM or SIGINT is remembered and a second SIGINT interrupts at once.

    The handlers that were installed before are back when it ends. Outside the main thread, where Python allows no
    handlers, it does nothing.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _remember(self, number, _):
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def leave(self) -> None:
        """Ends the program the way the signal asked for: KeyboardInterrupt, or SystemExit with status 128 + number."""
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
