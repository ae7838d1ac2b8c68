"""What a person watches while something runs: TensorBoard event files and a progress bar."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

# "group/name": TensorBoard shows one collapsible group per first part.
_TAG = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.=-]+)+")


class EventWriter:
    """Writes TensorBoard event files; does nothing where there is no folder to write to.

    Tags read "group/name", e.g. "loss/train". The step of a value is whatever its curve should be drawn over:
    optimizer steps or tokens. Use as a context manager, so that the last events reach the disk.

    Args:
        logdir: folder of the event files, made if missing; None to write nothing.
        resume_step: where given, TensorBoard forgets what earlier files in the folder hold from this step on. A run
            resumed from a checkpoint passes the first step that it will write again.

    Raises:
        ValueError: the folder cannot be made; or, when writing, a tag without a group.
    """

    def __init__(self, logdir: str | os.PathLike | None, resume_step: int | None = None):
        self._writer = None
        if logdir is None:
            return
        try:
            os.makedirs(logdir, exist_ok=True)
            # Files are named by the second; without more, a run resumed within it would write over the earlier file.
            suffix = f".{time.time_ns():020d}"
            self._writer = SummaryWriter(str(logdir), purge_step=resume_step, flush_secs=10, filename_suffix=suffix)
        except OSError as error:
            raise ValueError(f"cannot write events to {logdir}: {error.strerror}; give another folder") from None

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        """Writes numbers (Python, numpy or JAX scalars). None and non-finite values have no point on a curve and are
        left out: an acceptance rate before anything was drafted is undefined, not 0."""
        for tag, value in values.items():
            _check_tag(tag)
            if self._writer is None or value is None:
                continue
            value = float(value)
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, int(step))

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes Markdown."""
        _check_tag(tag)
        if self._writer is not None:
            self._writer.add_text(tag, text, int(step))

    def table(self, tag: str, values: Mapping[str, Any], step: int = 0) -> None:
        """Writes a mapping, such as a config, as a table; nested mappings become dotted names."""
        rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in _flatten(values)]
        self.text(tag, "\n".join(["| name | value |", "|---|---|", *rows]), step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is pending. Closing again, or writing afterwards, does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Progress:
    """A progress bar on stderr where that is a terminal; elsewhere, such as in a log file, a line every `interval` s.

    While it is open, print through `write`, so that the bar and what is printed do not run into each other. The bar is
    erased when it closes, and one line with what was done and how long it took stays. Where stderr is no terminal,
    short work (under one interval) prints that last line only.

        with Progress(steps, "train") as progress:
            for step in range(steps):
                ...
                progress.update(loss=loss)

    Args:
        total: how many units there are, or None if that is unknown.
        description: what is being done, in front of the bar.
        unit: what is counted.
        interval: seconds between two lines where stderr is no terminal.
        enabled: False prints nothing at all, e.g. in all processes but the first.
    """

    def __init__(
        self,
        total: int | None,
        description: str,
        unit: str = "step",
        interval: float = 30.0,
        enabled: bool = True,
    ):
        self.count = 0
        self._total, self._description, self._unit, self._interval = total, description, unit, interval
        self._enabled, self._figures = enabled, ""
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(
                total=total, desc=description, unit=f" {unit}", leave=False, dynamic_ncols=True, file=sys.stderr
            )

    def update(self, units: int = 1, **figures: Any) -> None:
        """Counts units done; `figures` (numbers or text) are shown beside the bar until the next call with any."""
        self.count += units
        if figures:
            self._figures = ", ".join(f"{name} {_short(value)}" for name, value in figures.items())
        if self._bar is not None:
            if figures:
                self._bar.set_postfix_str(self._figures, refresh=False)
            self._bar.update(units)
        elif self._enabled and time.monotonic() - self._last_line >= self._interval:
            self._last_line = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Prints to stdout, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Erases the bar and leaves one line. Closing again does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._enabled:
            self._enabled = False
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self._start
        done = f"{self.count:,}" if self._total is None else f"{self.count:,} / {self._total:,}"
        rate = f"{_short(self.count / seconds)} {self._unit}s/s" if seconds > 0 else ""
        parts = [f"{self._description}: {done} {self._unit}s", f"{seconds:.1f} s", rate, self._figures]
        return ", ".join(part for part in parts if part)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise ValueError(f"a tag reads group/name, in letters, digits and _.=-; got {tag!r}")


def _flatten(values: Mapping[str, Any], prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", "<br>")


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    value = float(value)
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.3g}"
