"""Plots for studies, in colours that the colour-blind can tell apart."""

import io
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.studies.law import Prediction, pareto_front
from vit_jax.studies.tables import Measured, say_deviations

# Okabe and Ito's colours, without yellow, which is too light for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = tuple(zip(_COLOURS, "osD^vPX", strict=True))  # and markers

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


def draw_table(table: Mapping[str, Mapping[str, Mapping[str, Measured]]]) -> dict[str, bytes]:
    """Plot a table over its columns: means with deviations over seeds, values as dots.

    Rows are curves where the columns are numbers, see `find_curves`, else points side by side. A
    row has one colour in all panels. No files if there are fewer than two cells to plot.
    """
    panels, unit = find_curves(table)
    columns = [
        *dict.fromkeys(c for rows in table.values() for cells in rows.values() for c in cells)
    ]
    if not panels:
        panels = {
            measure: {
                row: [(columns.index(column), [100 * value for value in cell.known])
                      for column, cell in cells.items() if cell.known]
                for row, cells in rows.items()
            }
            for measure, rows in table.items()
        }  # fmt: skip
    if sum(len(places) for curves in panels.values() for places in curves.values()) < 2:
        return {}
    figure, all_axes = _start_figure(len(panels))
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for axes, (measure, curves) in zip(all_axes, panels.items(), strict=True):
        for name, places in curves.items():
            colour, marker = _STYLES[names.index(name) % len(_STYLES)]
            aside = 0 if unit else 0.5 * (names.index(name) + 0.5) / len(names) - 0.25
            means = [statistics.fmean(values) for _, values in places]
            deviations = [statistics.stdev(v) if len(v) > 1 else np.nan for _, v in places]
            axes.errorbar([x + aside for x, _ in places], means, deviations, label=name, capsize=3,
                          color=colour, fmt="-" if unit else "_")  # fmt: skip
            dots = [(x + aside, value) for x, values in places for value in values]
            axes.plot(*zip(*dots, strict=True), marker, color=colour, markersize=4, alpha=0.6)
        ticks = sorted({x for places in curves.values() for x, _ in places})
        _finish(axes, unit, measure, is_log=bool(unit))
        labels = [f"{x:,g}" if unit else columns[int(x)] for x in ticks]
        axes.set_xticks(ticks, labels, rotation=0 if unit else 20)
        if not unit:
            axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.minorticks_off()
    cells = (c for rows in table.values() for columns in rows.values() for c in columns.values())
    figure.supxlabel(say_deviations(cells), fontsize=8)
    return _as_files(figure)


def draw_scaling(
    panels: Mapping[str, Sequence[tuple[str, float, float]]],
    laws: Mapping[str, Prediction],
    y_label: str,
) -> dict[str, bytes]:
    """Plot accuracy over cost: runs, their Pareto front, laws with their bands.

    Args:
      panels: {label of the costs: [(family, cost, error)]}; empty ones are left out.
      laws: {family: its law} of the costs in the first panel.
    """
    panels = {label: points for label, points in panels.items() if points}
    figure, all_axes = _start_figure(len(panels))
    for axes, (x_label, points) in zip(all_axes, panels.items(), strict=True):
        for i, family in enumerate(dict.fromkeys(family for family, _, _ in points)):
            colour, marker = _STYLES[i % len(_STYLES)]
            x = [cost for name, cost, _ in points if name == family]
            y = [100 * (1 - error) for name, _, error in points if name == family]
            axes.plot(x, y, marker, color=colour, markersize=5, label=family)
            law = laws.get(family) if axes is all_axes[0] else None
            if law is not None:
                at = np.geomspace(min(x), 1.5 * max(x), 100)
                high, low = (100 * (1 - error) for error in law.fit.band(at))
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.plot(at, 100 * (1 - law.fit.law.predict(at)), color=colour, linewidth=1.2,
                          label=f"law of {family}")  # fmt: skip
                axes.plot(law.compute, 100 * (1 - law.measured), "o", color=colour, markersize=11,
                          markerfacecolor="none",
                          label="held out" if law is list(laws.values())[-1] else None)  # fmt: skip
        x = [cost for _, cost, _ in points]
        y = [100 * (1 - error) for _, _, error in points]
        front = pareto_front(x, [error for _, _, error in points])
        axes.plot([x[i] for i in front], [y[i] for i in front], "--", color="#555555", linewidth=1,
                  label="Pareto front")  # fmt: skip
        margin = 0.15 * (max(y) - min(y)) or 1.0
        axes.set_ylim(min(y) - margin, max(y) + margin)  # bands may be far wider
        _finish(axes, x_label, y_label)
    return _as_files(figure)


def _start_figure(num_panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6 if num_panels == 1 else 5 * num_panels, 4), layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def _finish(axes: Any, x_label: str, y_label: str, *, is_log: bool = True) -> None:
    if is_log:
        axes.set_xscale("log")
    axes.set(xlabel=x_label, ylabel=y_label.replace("/", " "))
    axes.grid(alpha=0.3)
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize=8)


def _as_files(figure: Any) -> dict[str, bytes]:
    found = {f"study.{form}": io.BytesIO() for form in ("png", "pdf")}
    for name, content in found.items():
        figure.savefig(content, format=name[-3:], dpi=150)
    return {name: content.getvalue() for name, content in found.items()}
