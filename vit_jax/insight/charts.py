"""Charts of a report: Bokeh figures that zoom, with linear and logarithmic axes.

Bokeh draws them and is embedded whole in the page; the page's controls only set properties of the
figures. Needs an optional package: `pip install -e '.[report]'`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

    from vit_jax.insight.compare import RunRecord

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow and its like.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dashed", "dotted")
SMOOTHED = (5, 21)  # rows that a smoothed curve averages over; odd, so that the mean is centred
_POINTS = 10_000  # of all curves of a chart together
_CURVE_POINTS = 100, 2_000  # of a curve: at least and at most
_FEW = 20  # rows; a curve of fewer has dots
_HEIGHT, _BAR = 280, 30  # pixels


class Style(NamedTuple):
    """How the curves of a run look: a colour, and `solid`, `dashed` or `dotted`."""

    color: str
    dash: str


class Chart(NamedTuple):
    """A chart on the page.

    title: its metric or what it shows.
    every: one row of that many is drawn; 1: all.
    legend: [(name, colour)] of a chart whose colours are not those of the runs.
    """

    title: str
    figure: Figure
    every: int = 1
    legend: Sequence[tuple[str, str]] = ()


def style(i: int) -> Style:
    """The style of run number `i`; 21 runs differ."""
    return Style(_COLORS[i % len(_COLORS)], _DASHES[i % len(_DASHES)])


def smooth(values: np.ndarray, rows: int) -> np.ndarray:
    """The mean over `rows` neighbouring values, centred; fewer at both ends.

    `values`: float (N,); `rows` is odd. Near an end the window shrinks on both sides alike, so the
    first and the last value stay.
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    places = np.arange(len(values))
    half = np.minimum(rows // 2, np.minimum(places, len(values) - 1 - places))
    return (sums[places + half + 1] - sums[places - half]) / (2 * half + 1)


def draw_curves(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[Chart]:
    """A chart for each metric, over the step; all charts zoom along the step together."""
    charts: list[Chart] = []
    for metric in metrics:
        share = charts[0].figure.x_range if charts else None
        charts.append(_draw_curve(runs, metric, share))
    return charts


def _draw_curve(runs: Sequence[RunRecord], metric: str, x_range: Any) -> Chart:
    from bokeh.models import ColumnDataSource, Line, Scatter

    plot = _figure(_HEIGHT, **({} if x_range is None else {"x_range": x_range}))
    plot.xaxis.axis_label = "step"
    room = int(np.clip(_POINTS // len(runs), *_CURVE_POINTS))
    longest = max(len(run.curves.get(metric, ())) for run in runs)
    every = -(-longest // room)
    for i, run in enumerate(runs):
        if metric not in run.curves:
            continue
        steps, values = (np.array(x) for x in zip(*run.curves[metric], strict=True))
        columns = {"value": values} | {f"mean_{n}": smooth(values, n) for n in SMOOTHED}
        kept = _thin(len(steps), every)
        data = {"step": steps[kept].astype(np.int32)}
        data |= {name: column[kept].astype(np.float32) for name, column in columns.items()}
        source = ColumnDataSource(data)
        color, dash = style(i)
        line: dict[str, Any] = {"x": "step", "y": "value", "line_color": color, "line_dash": dash}
        dots = Scatter(x="step", y="value", size=5, line_color=color, fill_color=color)
        of_run = {"name": run.name, "tags": [{"run": i}]}
        glyphs: list[tuple[Any, dict[str, Any]]] = [(Line(**line, line_width=2), of_run)]
        if len(steps) < _FEW:  # a single point has no line
            glyphs.append((dots, of_run))
        if len(steps) > 2:  # else smoothing changes nothing
            pale = {"name": f"{run.name}, as logged", "tags": [{"run": i, "raw": True}]}
            glyphs.append((Line(**line, line_alpha=0.35), pale | {"visible": False}))
        for glyph, fields in glyphs:
            plot.add_glyph(source, glyph, **fields)
    _add_hover(plot, metric)
    return Chart(metric, plot, every)


def _thin(number: int, every: int) -> np.ndarray:
    """The places of one row of `every`, and of the last."""
    return np.union1d(np.arange(0, number, every), [number - 1])


def draw_times(names: Sequence[str], seconds: Sequence[Mapping[str, float]]) -> Chart:
    """A bar for each run, made of its times in seconds by kind, {kind: seconds}."""
    from bokeh.models import ColumnDataSource, FactorRange

    kinds = list(dict.fromkeys(kind for times in seconds for kind in times))
    labels = [f"{i + 1}: {plain(name)}" for i, name in enumerate(names)]
    plot = _figure(100 + _BAR * len(names), y_range=FactorRange(factors=labels[::-1]))
    colors = [style(i).color for i in range(len(kinds))]
    columns = {kind: [times.get(kind, 0.0) for times in seconds] for kind in kinds}
    source = ColumnDataSource({"run": labels, **columns})
    plot.hbar_stack(kinds, y="run", height=0.7, color=colors, source=source, line_color="white")
    plot.xaxis.axis_label = "seconds"
    plot.x_range.start = 0
    return Chart("where the time went", plot, legend=list(zip(kinds, colors, strict=True)))


def plain(name: str, longest: int = 24) -> str:
    """A label within a figure: `name`, cut in the middle if long; $$ would begin a formula."""
    name = re.sub(r"\$+|\\", "_", " ".join(name.split()))
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def _figure(height: int, **fields: Any) -> Figure:
    from bokeh.plotting import figure

    plot = figure(
        height=height, min_width=200, sizing_mode="stretch_width", toolbar_location="above",
        tools="box_zoom,pan,wheel_zoom,reset,save", active_drag="box_zoom", output_backend="svg",
        **fields,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.stylesheets = ["@media print { :host { visibility: hidden; } }"]
    plot.outline_line_color = None
    plot.grid.grid_line_color = "#dddddd"
    return plot


def _add_hover(plot: Figure, metric: str) -> None:
    from bokeh.models import HoverTool

    plot.add_tools(
        HoverTool(
            tooltips=[("run", "$name"), ("step", "@step{0,0}"), (metric, "@value{%.5g}")],
            formatters={"@value": "printf"},
            line_policy="nearest",
        )
    )


def embed(charts: Sequence[Chart]) -> tuple[list[str], str, str]:
    """The HTML of each chart; as JavaScript, what draws them all, and Bokeh itself."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)
    if not charts:
        return [], "", library
    script, divs = components([chart.figure for chart in charts], wrap_script=False)
    return list(divs), script, library
