"""report.json, report.md and plots/*.png, each written whole or not at all."""

import dataclasses
import enum
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specjax.report.tables import label, markdown_table


def write_report(
    workdir: str | os.PathLike,
    *,
    experiment: str,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    results: Mapping[str, Any],
    plots: Mapping[str, Figure] | None = None,
) -> dict[str, Any]:
    """Writes an experiment's report into its workdir.

    Args:
        workdir: made if missing.
        experiment: its name.
        config: plain mapping of the settings.
        environment: from `specjax.report.environment`.
        results: figures and lists of flat records; `rows` and `checks` come first in report.md.
        plots: figure by file name without suffix.

    Returns:
        What report.json holds: strict JSON, with null for NaN, infinity and None.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    report = jsonable({"experiment": experiment, "config": config, "environment": environment, "results": results})
    for name, figure in (plots or {}).items():
        path = workdir / "plots" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        _replace(path, lambda part, figure=figure: figure.savefig(part, format="png"))
    _write_text(workdir / "report.md", markdown(report, list(plots or {})))
    _write_text(workdir / "report.json", json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return report


def jsonable(value: Any) -> Any:
    """The value in JSON's own types: arrays become lists, NaN and infinity None.

    Raises:
        TypeError: something that has no place in a report.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(entry) for entry in sorted(value)]
    if isinstance(value, (os.PathLike, np.dtype)):
        return str(value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return jsonable(array.astype(float).tolist() if array.dtype.kind == "V" else array.tolist())  # V: bfloat16
    raise TypeError(f"a report cannot hold a {type(value).__name__}: {value!r}")


def markdown(report: Mapping[str, Any], plots: list[str] | tuple[str, ...] = ()) -> str:
    """report.md: the same results as tables, then the plots, the settings and the environment."""
    results = dict(report["results"])
    first = {key: results.pop(key) for key in ("rows", "checks") if results.get(key)}
    lines = [f"# {report['experiment']}", ""]
    for key, value in (first | {k: v for k, v in results.items() if _is_section(v)}).items():
        lines += _section(key, value, level=2)
    scalars = {k: v for k, v in results.items() if not _is_section(v) and v not in ([], {})}
    if scalars:
        lines += _section("figures", scalars, level=2)
    if plots:
        lines += ["## Plots", "", *(f"![{label(name)}](plots/{name}.png)\n" for name in plots)]
    for key in ("config", "environment"):
        lines += _section(key, report[key], level=2)
    return "\n".join(lines).rstrip() + "\n"


def _is_section(value):
    records = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    return bool(value) and (isinstance(value, dict) or records)


def _section(key, value, level):
    heading = label(key)
    lines = ["#" * level + " " + heading[:1].upper() + heading[1:], ""]
    if isinstance(value, list):
        return [*lines, markdown_table(value), ""]
    scalars = {k: v for k, v in value.items() if not _is_section(v)}
    if scalars:
        # One row each: unlike quantities do not share a precision, so each is formatted by itself.
        lines += [_pairs(scalars), ""]
    for k, v in value.items():
        if _is_section(v):
            lines += _section(k, v, min(level + 1, 6))
    return lines


def _pairs(mapping):
    tables = [markdown_table([{"name": k, "value": v}]).splitlines() for k, v in mapping.items()]
    return "\n".join(["| name | value |", "| --- | --- |", *(table[2] for table in tables)])


def _write_text(path, text):
    _replace(path, lambda part: part.write_text(text, encoding="utf-8"))


def _replace(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
