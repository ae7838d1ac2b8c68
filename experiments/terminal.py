"""A terminal, or a pipe in its place: text to standard output, remarks to standard error, lines from standard input."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable

from specjax.command_line import discard
from specjax.decoding import Origin
from specjax.pretrained import TextGeneration, TextRun, TextStream
from specjax.report.colour import colour_enabled, legend, trace
from specjax.training.interrupts import Interrupts

END_OF_LINE = ("\n", Origin.PROMPT)
ROUNDS_BETWEEN_LOOKS = 16  # target calls of a batch before Ctrl-C is noticed


class Terminal:
    """Where text goes to and comes from.

    Args:
        colour: tokens in the colour of their origin, where standard output is a terminal.

    Attributes:
        first_text: the time.perf_counter() at which the first text was shown, or None.
        closed: whether nobody reads the text any more, as behind `| head`; from then on nothing is shown.
    """

    def __init__(self, colour: bool):
        self.colour, self.first_text, self.closed = colour and colour_enabled(), None, False
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # an output that cannot show a character shows a question mark
        self._escape = sys.stdout.isatty()  # a file gets the text as it is; no text may drive a terminal
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives `input` its line editing)

    def say(self, line: str) -> None:
        try:
            print(line, file=sys.stderr, flush=True)
        except BrokenPipeError:
            discard(sys.stderr)

    def show(self, segments) -> None:
        """Some text, without an end of line."""
        if self.first_text is None and any(origin != Origin.PROMPT for _, origin in segments):
            self.first_text = time.perf_counter()
        if self.closed:
            return
        try:
            sys.stdout.write(trace(segments, self.colour) if self._escape else "".join(text for text, _ in segments))
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            discard(sys.stdout)

    def ask(self) -> str | None:
        """The next line of input; None at its end. ValueError for a line that is not UTF-8."""
        if sys.stdin.isatty():
            try:
                return input("> ")
            except EOFError:
                self.say("")
                return None
            except KeyboardInterrupt:
                self.say("")
                raise
        line = sys.stdin.buffer.readline()
        try:
            return line.decode("utf-8").rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise ValueError(f"this line of input is not UTF-8 (byte {error.start}); it was skipped") from None

    def stream(self, begin: Callable[[], TextStream]) -> tuple[TextStream, Interrupts]:
        """Shows the text of the stream that `begin` starts, until its end, Ctrl-C or the end of who reads it.

        Returns:
            the stream, and the signals that came meanwhile. A second Ctrl-C does not wait for the end of a round.
        """
        shown = 0
        with Interrupts() as interrupts:
            stream = begin()
            try:
                for piece in stream if interrupts.received is None else ():
                    shown += len(piece.segments)
                    self.show(piece.segments)
                    if interrupts.received is not None or self.closed:
                        break
            except KeyboardInterrupt:
                interrupts.received = signal.SIGINT
            result = stream.result()
            self.show((*result.segments[shown:], END_OF_LINE))
        self.conclude(result)
        return stream, interrupts

    def conclude(self, result: TextGeneration) -> None:
        """What happened to one text, in one line."""
        if self.colour:
            self.say(legend(result.segments, colour=True))
        ended = {"stop": "stopped", "length": "at its limit", "running": "interrupted"}[result.finish]
        ended = ended if result.stop_string is None else f"stopped by {result.stop_string!r}"
        known = f" ({result.reused_tokens} of them known)" if result.reused_tokens else ""
        figures = "no tokens"
        if len(result.tokens):
            speed, tau = result.tokens_per_second, result.block_efficiency
            figures = f"{len(result.tokens)} tokens, {speed:.1f} tokens/s, τ {tau:.2f}"
        prompt = f"prompt of {result.prompt_tokens} tokens{known} in {result.prefill_seconds:.2f} s"
        self.say(f"[{figures}; {ended}; {prompt}]")

    def finish_batch(self, run: TextRun, names: list[str]) -> Interrupts:
        """The texts of a batch, shown when all of them have ended or Ctrl-C has come.

        Returns:
            the signals that came meanwhile. A second Ctrl-C does not wait for the end of the rounds.
        """
        with Interrupts() as interrupts:
            try:
                while run.running and interrupts.received is None:
                    run.advance(ROUNDS_BETWEEN_LOOKS)
            except KeyboardInterrupt:
                interrupts.received = signal.SIGINT
            for name, result in zip(names, run.results(), strict=True):
                self.say(name)
                self.show((*result.segments, END_OF_LINE))
                self.conclude(result)
        return interrupts
