"""Plots for studies, in colours that the colour-blind can tell apart."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Okabe and Ito's colours, without yellow, which is too light for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"

Curves = Mapping[str, Sequence[tuple[float, Sequence[float]]]]


def draw_curves(points: Curves, *, x_label: str, y_label: str) -> bytes:
    """Plot curves over a logarithmic axis as a PNG: means as lines, single values as dots.

    `points`: {name of the curve: [(x, values at x)]}.
    """
    return draw_panels({y_label: points}, x_label=x_label)


def draw_panels(panels: Mapping[str, Curves], *, x_label: str) -> bytes:
    """`draw_curves` side by side over one kind of axis: {label of the y axis: its curves}.

    A curve has the same colour in each panel.
    """
    figure, all_axes = _start_figure(len(panels))
    names = list(dict.fromkeys(name for points in panels.values() for name in points))
    for axes, (y_label, points) in zip(all_axes, panels.items(), strict=True):
        for name, places in points.items():
            colour, marker = _style(names.index(name))
            means = [sum(values) / len(values) for _, values in places]
            axes.plot([x for x, _ in places], means, label=name, color=colour)
            dots = [(x, value) for x, values in places for value in values]
            axes.plot(*zip(*dots, strict=True), marker, color=colour, markersize=4)
        axes.set_xscale("log")
        ticks = sorted({x for places in points.values() for x, _ in places})
        axes.set_xticks(ticks, labels=[f"{x:,g}" for x in ticks])
        axes.minorticks_off()
        _finish(axes, x_label, y_label)
    return _as_png(figure)


class ScalingCurve(NamedTuple):
    """A law to draw: its value over the compute, and its band, all in per cent of accuracy."""

    law: Callable[[np.ndarray], np.ndarray]
    band: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    first: float
    last: float
    held_out: tuple[float, float]


class ScalingPanel(NamedTuple):
    """Runs by cost.

    points: {family: [(cost, accuracy in per cent)]}.
    front: the points that no run beats at the same cost or less, by cost.
    laws: {family: its law}.
    """

    x_label: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    front: Sequence[tuple[float, float]]
    laws: Mapping[str, ScalingCurve]


def draw_scaling(panels: Sequence[ScalingPanel], *, y_label: str) -> bytes:
    """Plot accuracy over cost as a PNG: runs, their Pareto front, laws with their bands."""
    figure, all_axes = _start_figure(len(panels))
    for axes, panel in zip(all_axes, panels, strict=True):
        for i, (name, points) in enumerate(panel.points.items()):
            colour, marker = _style(i)
            axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5, label=name)
            if name not in panel.laws:
                continue
            curve = panel.laws[name]
            at = np.geomspace(curve.first, curve.last, 100)
            low, high = curve.band(at)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(at, curve.law(at), color=colour, linewidth=1.2, label=f"law of {name}")
            axes.plot(*curve.held_out, "o", color=colour, markersize=11, markerfacecolor="none",
                      label="held out" if name == list(panel.laws)[-1] else None)  # fmt: skip
        axes.plot(*zip(*panel.front, strict=True), "--", color="#555555", linewidth=1,
                  label="Pareto front")  # fmt: skip
        axes.set_xscale("log")
        seen = [y for points in panel.points.values() for _, y in points]
        margin = 0.15 * (max(seen) - min(seen)) or 1.0
        axes.set_ylim(min(seen) - margin, max(seen) + margin)  # bands may be far wider
        _finish(axes, panel.x_label, y_label)
    return _as_png(figure)


def _start_figure(num_panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6 if num_panels == 1 else 5 * num_panels, 4), layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def _style(number: int) -> tuple[str, str]:
    return _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]


def _finish(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _as_png(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
