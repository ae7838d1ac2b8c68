"""A sample in colour: which tokens were drafted and accepted, which the target corrected, which were the bonus."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from specjax.decoding import Origin

# Foreground codes that stay apart on light and dark terminals and for colour-blind readers: the tokens that the target
# added are also bold (bonus) or underlined (correction), so that the colour is never the only sign.
_CODES = {Origin.PROMPT: "2", Origin.DRAFTED: "36", Origin.CORRECTION: "33;4", Origin.BONUS: "35;1"}
_NAMES = {
    Origin.PROMPT: "prompt",
    Origin.DRAFTED: "drafted and accepted",
    Origin.CORRECTION: "correction",
    Origin.BONUS: "bonus",
}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def colour_enabled(stream: Any = None) -> bool:
    """Whether to colour what goes to `stream` (standard output by default): a terminal, and NO_COLOR not set.

    References:
        https://no-color.org
    """
    stream = sys.stdout if stream is None else stream
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def trace(pieces: Iterable[tuple[str, int]], colour: bool | None = None) -> str:
    """The text of a sample with each piece in the colour of its origin.

    Args:
        pieces: (text, origin), origin a `specjax.decoding.Origin` or its integer.
        colour: None asks `colour_enabled`. Without colour the plain text comes back.

    Returns:
        Printable text. Control characters other than newline and tab are written as \\x1b and the like, so that no
        sampled text can drive the terminal.

    Raises:
        ValueError: an unknown origin.
    """
    colour = colour_enabled() if colour is None else colour
    return "".join(_paint(text, origin, colour) for text, origin in pieces)


def legend(pieces: Iterable[tuple[str, int]] = (), colour: bool | None = None) -> str:
    """One line that names each colour, with the number of pieces of that origin where there are any."""
    colour = colour_enabled() if colour is None else colour
    origins = [_checked(origin) for _, origin in pieces]
    parts = []
    for origin, name in _NAMES.items():
        count = f" {origins.count(origin)}" if origins else ""
        parts.append(_paint(name, origin, colour) + count)
    return " · ".join(parts)


def _paint(text, origin, colour):
    code = _CODES[_checked(origin)]
    text = text.translate(_CONTROL)
    if not colour or not text:
        return text
    # Each line is closed by itself, so that an underline does not run to the terminal's edge.
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def _checked(origin):
    if int(origin) not in _CODES:
        raise ValueError(f"origin must be one of {sorted(map(int, Origin))}; got {origin!r}")
    return Origin(int(origin))
