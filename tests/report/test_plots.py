"""Figures show what they were given: lines, gaps, labels with units; nothing leaks into global state."""

import io

import matplotlib
import numpy as np
import pytest

from specjax.report import plots

FIGURES = {
    "per_depth": lambda: plots.per_depth(
        {"a": [0.9, 0.7, None], "b": [0.5]}, {"a": [0.9, 0.8]}, quantity="survival", title="T"
    ),
    "speedup": lambda: plots.speedup_by_draft_length([0, 4], {"a": [1.0, 2.0]}, {"a": [1.0, 1.9], "b": [None, 1.0]}),
    "width": lambda: plots.width_curve({4: ([1, 2, 32], [0.01, 0.011, 0.2]), 1: ([1, 2, 32], [0.009, None, 0.1])}),
    "expected": lambda: plots.expected_tokens_curves(
        [0.1, 0.9],
        {"with": {4: [1.1, 4.1], 2: [1.1, 2.7]}, "without": {4: [1.1, 3.4], 2: [1.1, 1.9]}},
        [
            {"acceptance_rate": 0.5, "block_efficiency": 1.8, "draft_length": 4},
            {"acceptance_rate": 0.6, "block_efficiency": 1.9, "draft_length": 7},
            {"acceptance_rate": None, "block_efficiency": 1.0, "draft_length": 0},
        ],
    ),
    "training": lambda: plots.training_curves(
        {"a": ([0, 10], [3.0, 2.0])}, quantity="loss (nats)", title="T", log=True
    ),
    "bars": lambda: plots.bars({"a": 1.0, "b": None}, quantity="speed-up (×)", title="T", reference=1),
    "nothing": lambda: plots.per_depth({}, quantity="survival", title="T"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_render_with_labelled_axes(name):
    before = dict(matplotlib.rcParams)
    figure = FIGURES[name]()
    assert dict(matplotlib.rcParams) == before
    for index, axes in enumerate(figure.axes):
        assert axes.get_xlabel() and axes.get_title(loc="left")
        assert index or name == "bars" or axes.get_ylabel()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_undefined_values_are_gaps():
    line = FIGURES["per_depth"]().axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(line.get_ydata(), [0.9, 0.7, np.nan])


def test_width_curve_is_in_milliseconds_by_batch():
    axes = FIGURES["width"]().axes[0]
    assert [line.get_label() for line in axes.lines] == ["batch 1", "batch 4"]
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [10, 11, 200])


def test_measured_points_have_the_colour_of_their_curve():
    for axes in FIGURES["expected"]().axes:
        by_label = {line.get_label(): line for line in axes.lines}
        assert by_label["measured, γ = 4"].get_color() == by_label["γ = 4"].get_color()
        assert "measured, other γ" in by_label and len(axes.lines) == 4  # the undefined point is left out


def test_measured_and_predicted_share_a_colour():
    lines = {line.get_label(): line for line in FIGURES["speedup"]().axes[0].lines}
    assert lines["a, measured"].get_color() == lines["a, predicted"].get_color() != lines["b, predicted"].get_color()
    assert "target-only" in lines
