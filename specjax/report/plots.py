"""The figures of a report. Each function returns a matplotlib Figure and touches neither a display nor global state."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter, ScalarFormatter

# Okabe and Ito's colours, told apart by colour-blind readers, the lightest left out; markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
}
_OPAQUE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_styled = matplotlib.rc_context(_STYLE)  # as a decorator: the style holds inside a call and nowhere else


@_styled
def per_depth(
    series: Mapping[str, Collection[float | None]],
    expected: Mapping[str, Collection[float | None]] | None = None,
    *,
    quantity: str,
    title: str,
) -> Figure:
    """A rate in [0, 1] against depth in the draft, one line per run.

    Args:
        series: values for depths 1..γ by name; None leaves a gap.
        expected: by the same names, what theory predicts: a broad pale line under the measured one.
        quantity: what the values are, for the axis: "survival", "acceptance rate".
        title: of the figure.
    """
    figure, axes = _figure(title, "depth in the draft (tokens)", f"{quantity} (%)")
    for index, (name, values) in enumerate(series.items()):
        _line(axes, index, np.arange(1, len(values) + 1), values, label=name)
        theory = (expected or {}).get(name)
        if theory is not None:
            colour = COLOURS[index % len(COLOURS)]
            depths = np.arange(1, len(theory) + 1)
            axes.plot(depths, theory, color=colour, linewidth=9, alpha=0.25, label=f"{name}, expected")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


@_styled
def speedup_by_draft_length(
    draft_lengths: Collection[int],
    measured: Mapping[str, Collection[float | None]],
    predicted: Mapping[str, Collection[float | None]] | None = None,
    *,
    title: str = "Speed-up against draft length",
) -> Figure:
    """Measured speed-up (solid, with markers) and predicted (dashed) against γ; a line at 1 marks target-only decoding.

    Args:
        draft_lengths: γ of each value.
        measured: by name of the setting; values in the order of `draft_lengths`.
        predicted: by the same names, where a prediction exists.
    """
    figure, axes = _figure(title, "draft length γ (tokens)", "speed-up over target-only (×)")
    names = list(dict.fromkeys([*measured, *(predicted or {})]))
    for index, name in enumerate(names):
        if name in measured:
            _line(axes, index, draft_lengths, measured[name], label=f"{name}, measured")
        if name in (predicted or {}):
            _line(axes, index, draft_lengths, predicted[name], label=f"{name}, predicted", linestyle="--", marker="")
    axes.axhline(1, color="#666666", linewidth=1.2, linestyle=":", label="target-only")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


@_styled
def width_curve(
    curves: Mapping[int, tuple[Collection[int], Collection[float]]], *, title: str = "Cost of a wider target forward"
) -> Figure:
    """Seconds of one target forward against its width in tokens, one line per batch size; both axes logarithmic.

    Args:
        curves: (widths, seconds) by batch size.
    """
    figure, axes = _figure(title, "width of the forward (tokens per row)", "time per forward (ms)")
    ticks = sorted({int(width) for widths, _ in curves.values() for width in widths})
    for index, (batch, (widths, seconds)) in enumerate(sorted(curves.items())):
        _line(axes, index, widths, [None if s is None else s * 1e3 for s in seconds], label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    low, high = axes.get_ylim()
    leading = (1, 2, 3, 4, 5, 6, 8) if high / low < 10 else (1, 2, 5) if high / low < 300 else (1,)
    steps = [m * 10.0**e for e in range(-4, 6) for m in leading]
    axes.yaxis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    axes.yaxis.set_major_formatter(_plain_numbers)
    axes.yaxis.set_minor_locator(NullLocator())
    _legend(axes)
    return figure


@_styled
def expected_tokens_curves(
    alphas: Collection[float],
    panels: Mapping[str, Mapping[int, Collection[float]]],
    measured: Sequence[Mapping[str, Any]] = (),
    *,
    title: str = "Tokens per target call",
) -> Figure:
    """τ against α, one line per γ and one panel per formula, with measured points laid over.

    Args:
        alphas: α of each value.
        panels: values by γ, by title of the panel.
        measured: records with `acceptance_rate`, `block_efficiency` and `draft_length`; a point has the colour of its
            γ, or is grey where no curve has that γ.
    """
    figure = Figure(figsize=(5.2 * len(panels), 4.6))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    points = [r for r in measured if r.get("acceptance_rate") is not None and r.get("block_efficiency") is not None]
    for axes, (name, curves) in zip(grid, panels.items(), strict=True):
        axes.set_title(name, fontweight="normal")
        axes.set_xlabel("acceptance rate α (%)")
        axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
        order = {gamma: index for index, gamma in enumerate(sorted(curves))}
        for gamma, index in order.items():
            _line(axes, index, alphas, curves[gamma], label=f"γ = {gamma}", marker="")
        drawn = set()
        for point in points:
            gamma = point["draft_length"]
            known = gamma in order
            text = f"measured, γ = {gamma}" if known else "measured, other γ"
            axes.plot(
                point["acceptance_rate"],
                point["block_efficiency"],
                linestyle="",
                marker=MARKERS[order[gamma] % len(MARKERS)] if known else "*",
                color=COLOURS[order[gamma] % len(COLOURS)] if known else "#666666",
                markeredgecolor="black",
                markersize=8,
                label=None if text in drawn else text,
                zorder=3,
            )
            drawn.add(text)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")
    grid[0].set_ylabel("tokens per target call τ")
    return figure


@_styled
def training_curves(
    series: Mapping[str, tuple[Collection[float], Collection[float | None]]],
    *,
    quantity: str,
    title: str,
    log: bool = False,
    steps: str = "training step",
) -> Figure:
    """A quantity against the training step, or against another count, one line per run.

    Args:
        series: (steps, values) by name.
        quantity: label of the axis, with its unit.
        log: logarithmic values.
        steps: label of the other axis.
    """
    figure, axes = _figure(title, steps, quantity)
    for index, (name, (at, values)) in enumerate(series.items()):
        _line(axes, index, at, values, label=name, marker="" if len(at) > 30 else None)
    if log:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    _legend(axes)
    return figure


@_styled
def bars(values: Mapping[str, float | None], *, quantity: str, title: str, reference: float | None = None) -> Figure:
    """One horizontal bar per setting, its value written at its end; a dotted line at `reference` (1 for a speed-up)."""
    figure = Figure(figsize=(8, 1.4 + 0.42 * len(values)))
    axes = figure.subplots()
    names = list(values)
    lengths = [0.0 if values[name] is None else float(values[name]) for name in names]
    axes.barh(names, lengths, color=COLOURS[0], height=0.65)
    for index, name in enumerate(names):
        text = "–" if values[name] is None else f"{values[name]:.2f}"
        axes.annotate(
            text, (lengths[index], index), xytext=(4, 0), textcoords="offset points", va="center", bbox=_OPAQUE
        )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    if reference is not None:
        axes.axvline(reference, color="#333333", linewidth=1.2, linestyle=":")
    axes.set_title(title)
    axes.set_xlabel(quantity)
    return figure


def _figure(title, xlabel, ylabel) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.6))
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _line(axes, index, x, y, *, label, linestyle="-", marker=None):
    y = np.array([np.nan if value is None else value for value in y], float)
    marker = MARKERS[index % len(MARKERS)] if marker is None else marker
    axes.plot(x, y, color=COLOURS[index % len(COLOURS)], linestyle=linestyle, marker=marker, label=label)


def _legend(axes):
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _plain_numbers(value, _):
    return f"{value:g}"
