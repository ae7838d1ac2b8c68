"""Records as aligned text for a terminal, and as Markdown."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

UNDEFINED = "–"

# Headings of the stable record keys; any other key is its own heading, with spaces for underscores.
LABELS = {
    "tokens_per_second": "tokens/s",
    "baseline_tokens_per_second": "baseline tokens/s",
    "speedup": "speed-up",
    "predicted_speedup": "predicted",
    "constant_alpha_speedup": "constant α",
    "draft_length": "γ",
    "block_efficiency": "τ",
    "acceptance_rate": "α",
    "cost_ratio": "c",
    "temperature": "T",
    "emitted_tokens": "emitted",
}


def text_table(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, labels: Mapping[str, str] | None = None
) -> str:
    """Records as an aligned table, numbers to the right.

    Args:
        records: flat mappings; a missing key or None prints as "–".
        columns: keys in order; None takes every key in order of first appearance.
        labels: headings by key, on top of `LABELS`.
    """
    headings, cells, numeric = _grid(records, columns, labels)
    widths = [max(map(_width, column)) for column in zip(headings, *cells, strict=True)]
    line = lambda row: "  ".join(map(_pad, row, widths, numeric)).rstrip()  # noqa: E731
    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, cells)])


def markdown_table(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None, labels: Mapping[str, str] | None = None
) -> str:
    """The same as a Markdown table."""
    headings, cells, numeric = _grid(records, columns, labels)
    rule = ["---:" if right else "---" for right in numeric]
    escape = lambda text: text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")  # noqa: E731
    return "\n".join("| " + " | ".join(map(escape, row)) + " |" for row in [headings, rule, *cells])


def label(key: str) -> str:
    """Heading of a key."""
    return LABELS.get(key, key.replace("_", " "))


def format_column(values: Sequence[Any]) -> list[str]:
    """Cells of one column: floats share one precision, so that a column reads at a glance."""
    floats = [abs(v) for v in values if _is_number(v) and not isinstance(v, int) and v == v and abs(v) != float("inf")]
    nonzero = [v for v in floats if v]
    largest = max(floats, default=0)
    if nonzero and (min(nonzero) < 1e-3 or largest >= 1e7):
        spec = ".3g"
    else:
        small = ",.5f" if 0 < largest < 0.1 else ",.3f"  # seconds of a step
        spec = small if largest < 10 else ",.2f" if largest < 100 else ",.1f" if largest < 10_000 else ",.0f"
    return [_format(value, spec) for value in values]


def _format(value, spec):
    if value is None or value != value:
        return UNDEFINED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if _is_number(value):
        return format(float(value), spec)
    if isinstance(value, (list, tuple)):
        return ", ".join(format_column(value)) or UNDEFINED
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in zip(value, format_column(list(value.values())), strict=True))
    return str(value)


def _grid(records, columns, labels):
    if columns is None:
        columns = list(dict.fromkeys(key for record in records for key in record))
    values = [[_plain(record.get(key)) for record in records] for key in columns]
    headings = [{**LABELS, **(labels or {})}.get(key, label(key)) for key in columns]
    numeric = [_holds_numbers(column) for column in values]
    cells = [list(row) for row in zip(*map(format_column, values), strict=True)]
    return headings, cells, numeric


def _plain(value):
    """Numpy and JAX scalars as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _holds_numbers(values):
    present = [value for value in values if value is not None]
    return bool(present) and all(map(_is_number, present))


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _width(text):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text, width, right):
    space = " " * (width - _width(text))
    return space + text if right else text + space
