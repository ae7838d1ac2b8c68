"""Tables: every line of one width, nothing undefined printed as a number."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specjax.report import tables

cells = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(blacklist_categories=("Cc", "Cs", "M")))
)
records = st.lists(st.dictionaries(st.sampled_from("abcd"), cells), min_size=1).filter(lambda rs: any(rs))


@given(records)
def test_text_columns_line_up(rows):
    lines = tables.text_table(rows, labels={"a": "γ", "b": "速度"}).split("\n")
    assert len(lines) == len(rows) + 2
    width = tables._width(lines[1])
    assert all(tables._width(line) <= width for line in lines)


@given(records)
def test_markdown_rows_have_all_their_cells(rows):
    lines = tables.markdown_table(rows).split("\n")
    unescaped = [line.replace("\\\\", "").replace("\\|", "") for line in lines]
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in unescaped}) == 1


def test_alignment_by_hand():
    rows = [{"drafter": "none", "speedup": 1.0, "draft_length": 0}, {"drafter": "独立", "speedup": None}]
    assert (
        tables.text_table(rows)
        == "drafter  speed-up  γ\n-------  --------  -\nnone        1.000  0\n独立            –  –"
    )


def test_numbers_share_a_sensible_precision():
    assert tables.format_column([0.5, 1.25, None]) == ["0.500", "1.250", "–"]
    assert tables.format_column([1234.5678, 0.5]) == ["1,234.6", "0.5"]
    assert tables.format_column([1e-12, 0.5]) == ["1e-12", "0.5"]
    assert tables.format_column([0.0021483, 0.04]) == ["0.00215", "0.04000"]  # seconds of a step
    assert tables.format_column([0.0]) == ["0.000"]
    assert tables.format_column([1.5e11]) == ["1.5e+11"]
    assert tables.format_column([12345, True, False]) == ["12,345", "yes", "no"]
    assert tables.format_column([float("nan"), float("inf")]) == ["–", "inf"]
    assert tables.format_column([[0.5, None], (), {"low": 0.25}]) == ["0.500, –", "–", "low 0.250"]


def test_array_scalars_print_like_python_numbers():
    rows = [{"a": np.float32(0.5), "b": np.int64(3), "c": jnp.float32(0.25), "d": np.bool_(True)}]
    assert tables.text_table(rows).split("\n")[-1].split() == ["0.500", "3", "0.250", "yes"]


def test_columns_can_be_chosen_and_are_otherwise_in_order_of_appearance():
    rows = [{"b": 1}, {"a": 2, "b": 3}]
    assert tables.text_table(rows).split("\n")[0].split() == ["b", "a"]
    assert tables.text_table(rows, columns=["a"]).split("\n")[0] == "a"
