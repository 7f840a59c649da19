"""Plots for studies, in colours that the colour-blind can tell apart."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.studies.engine import Measured

# Okabe and Ito's colours, without yellow, which is too light for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"

Panels = dict[str, dict[str, list[tuple[float, list[float]]]]]


def find_curves(table: Mapping[str, Mapping[str, Mapping[str, Measured]]]) -> tuple[Panels, str]:
    """({measure: {row: [(x, values in percent at x)]}}, unit of x) of the rows with values.

    `table`: {measure: {row: {column: cell}}}. Its columns are numbers with a common unit, such as
    "100 images"; if they are not, or fewer than two, there are no curves.
    """
    columns = dict.fromkeys(c for rows in table.values() for cells in rows.values() for c in cells)
    found = [re.fullmatch(r"(\d+(?:\.\d+)?) (.+)", column) for column in columns]
    numbers = {match[0]: float(match[1]) for match in found if match}
    units = {match[2] for match in found if match}
    if len(numbers) < max(2, len(columns)) or len(units) > 1:
        return {}, ""
    panels: Panels = {}
    for measure, rows in table.items():
        for row, cells in rows.items():
            places = sorted((numbers[column], [100 * value for value in cell.known])
                            for column, cell in cells.items() if cell.known)  # fmt: skip
            if places:
                panels.setdefault(measure, {})[row] = places
    return panels, units.pop()


def draw_table(table: Mapping[str, Mapping[str, Mapping[str, Measured]]]) -> bytes | None:
    """Plot a table as curves over its columns, as a PNG: means as lines, single values as dots.

    None if there is nothing to plot; see `find_curves`. A row has one colour in all panels.
    """
    panels, unit = find_curves(table)
    if not panels:
        return None
    figure, all_axes = _start_figure(len(panels))
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (measure, curves) in zip(all_axes, panels.items(), strict=True):
        for name, places in curves.items():
            colour, marker = _style(names.index(name))
            means = [sum(values) / len(values) for _, values in places]
            axes.plot([x for x, _ in places], means, label=name, color=colour)
            dots = [(x, value) for x, values in places for value in values]
            axes.plot(*zip(*dots, strict=True), marker, color=colour, markersize=4)
        ticks = sorted({x for places in curves.values() for x, _ in places})
        _finish(axes, unit, measure)
        axes.set_xticks(ticks, labels=[f"{x:,g}" for x in ticks])
        axes.minorticks_off()
    return _as_png(figure)


class ScalingCurve(NamedTuple):
    """A law to draw, in percent of accuracy.

    at: compute, (N,); accuracy, low, high: the law and its band there, (N,).
    held_out: compute and accuracy of the run that was held out.
    """

    at: np.ndarray
    accuracy: np.ndarray
    low: np.ndarray
    high: np.ndarray
    held_out: tuple[float, float]


class ScalingPanel(NamedTuple):
    """Runs by cost.

    points: {family: [(cost, accuracy in percent)]}.
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
            if law := panel.laws.get(name):
                axes.fill_between(law.at, law.low, law.high, color=colour, alpha=0.15, linewidth=0)
                axes.plot(law.at, law.accuracy, color=colour, linewidth=1.2, label=f"law of {name}")
                axes.plot(*law.held_out, "o", color=colour, markersize=11, markerfacecolor="none",
                          label="held out" if name == list(panel.laws)[-1] else None)  # fmt: skip
        axes.plot(*zip(*panel.front, strict=True), "--", color="#555555", linewidth=1,
                  label="Pareto front")  # fmt: skip
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
    axes.set_xscale("log")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _as_png(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
