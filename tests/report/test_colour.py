"""The coloured sample: the text survives, and colour only where it is wanted."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding import Origin
from specjax.report import colour

printable = st.text(st.characters(blacklist_categories=("Cc", "Cs")) | st.sampled_from("\n\t"))
pieces = st.lists(st.tuples(printable, st.integers(0, 3)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def strip(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@given(pieces)
def test_colour_changes_nothing_but_colour(sample):
    plain = "".join(text for text, _ in sample)
    assert colour.trace(sample, colour=False) == plain
    assert strip(colour.trace(sample, colour=True)) == plain


@given(pieces)
def test_every_line_closes_its_colour(sample):
    for line in colour.trace(sample, colour=True).split("\n"):
        assert line.count("\x1b[") == 2 * line.count("\x1b[0m")


def test_origins_look_different_and_enums_are_taken():
    looks = {colour.trace([("x", origin)], colour=True) for origin in range(4)}
    assert len(looks) == len(Origin) == 4
    for origin in Origin:
        assert colour.trace([("x", origin)], colour=True) == colour.trace([("x", int(origin))], colour=True)
    with pytest.raises(ValueError, match="origin must be one of"):
        colour.trace([("x", 4)], colour=True)


def test_sampled_text_cannot_drive_the_terminal():
    text = colour.trace([("a\x1b[2J\x07\r\x9bb\n", Origin.DRAFTED)], colour=False)
    assert text == "a\\x1b[2J\\x07\\x0d\\x9bb\n"


def test_colour_needs_a_terminal_and_no_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colour.colour_enabled(Terminal()) and not colour.colour_enabled(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.colour_enabled(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not colour.colour_enabled(Terminal())


def test_legend_names_and_counts():
    plain = colour.legend([("a", 1), ("b", 1), ("c", 3)], colour=False)
    assert plain == "prompt 0 · drafted and accepted 2 · correction 0 · bonus 1"
    assert strip(colour.legend(colour=True)) == "prompt · drafted and accepted · correction · bonus"
