"""Reports are strict JSON, complete or absent, and say the same in both files."""

import dataclasses
import enum
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from specjax.report import writer

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


def refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")


def write(workdir, results, **kwargs):
    return writer.write_report(
        workdir, experiment="trial", config={"seed": 1}, environment={}, results=results, **kwargs
    )


@given(values)
def test_anything_becomes_strict_json(value):
    text = json.dumps(writer.jsonable(value), allow_nan=False)
    assert json.loads(text, parse_constant=refuse) == writer.jsonable(value)


def test_conversions():
    class Colour(enum.Enum):
        RED = "red"

    @dataclasses.dataclass(frozen=True)
    class Pair:
        low: float
        high: float

    assert writer.jsonable(
        {
            "nan": float("nan"),
            "inf": np.float32(np.inf),
            "array": jnp.arange(3),
            "nans": np.array([[1.0, np.nan]]),
            "bfloat16": jnp.ones(2, jnp.bfloat16),
            "scalar": np.int64(4),
            "true": np.bool_(True),
            "enum": Colour.RED,
            "pair": Pair(0.5, np.nan),
            "path": pathlib.Path("a/b"),
            "dtype": jnp.dtype("float32"),
            3: (1, 2),
        }
    ) == {
        "nan": None,
        "inf": None,
        "array": [0, 1, 2],
        "nans": [[1.0, None]],
        "bfloat16": [1.0, 1.0],
        "scalar": 4,
        "true": True,
        "enum": "red",
        "pair": {"low": 0.5, "high": None},
        "path": "a/b",
        "dtype": "float32",
        "3": [1, 2],
    }
    with pytest.raises(TypeError, match="cannot hold a function"):
        writer.jsonable(lambda: None)


def test_files_of_a_report(tmp_path):
    figure = Figure()
    figure.subplots().plot([1, 2])
    results = {
        "seconds": 1.5,
        "rows": [{"drafter": "a|b", "speedup": float("nan")}, {"drafter": "c", "speedup": 2.0}],
        "checks": [{"name": "exact", "passed": True, "value": 0, "limit": None}],
        "nested": {"tokens": 3, "inner": [{"depth": 1}]},
        "nothing": [],
    }
    report = write(tmp_path / "deep" / "run", results, plots={"curve": figure})
    folder = tmp_path / "deep" / "run"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*")) == [
        "plots/curve.png",
        "report.json",
        "report.md",
    ]
    assert json.loads((folder / "report.json").read_text(), parse_constant=refuse) == report
    assert list(report) == ["experiment", "config", "environment", "results"]
    assert (folder / "plots" / "curve.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "report.md").read_text()
    for part in (
        "# trial",
        "| a\\|b | – |",
        "| c | 2.000 |",
        "| exact | yes | 0 | – |",
        "plots/curve.png",
        "| seconds | 1.500 |",
    ):
        assert part in text
    assert text.index("## Rows") < text.index("## Checks") < text.index("## Nested") < text.index("## Config")


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    write(tmp_path, {"value": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(self, text, **kwargs):
        self.write_bytes(text[: len(text) // 2].encode())
        raise OSError("disk full")

    monkeypatch.setattr(pathlib.Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, {"value": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_before_the_rename_leaves_the_old_report(tmp_path, monkeypatch):
    write(tmp_path, {"value": 1})

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, {"value": 2})
    assert json.loads((tmp_path / "report.json").read_text())["results"] == {"value": 1}


def test_results_that_cannot_be_written_leave_no_file(tmp_path):
    with pytest.raises(TypeError):
        write(tmp_path, {"value": object()})
    assert not list(tmp_path.iterdir())
