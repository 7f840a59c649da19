"""Charts of a report.

Charts are Bokeh's: they zoom, and Bokeh is embedded whole in the page, whose controls only set
properties of the charts. They need an optional package: `pip install -e '.[report]'`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.insight.levels import levels
from vit_jax.insight.plots import FEW, styles
from vit_jax.insight.runs import group_seeds, mean_curve

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

    from vit_jax.insight.runs import Run

SMOOTHED = (5, 21)  # rows that a smoothed curve averages over; odd, so that the mean is centred
_POINTS = 10_000  # of all curves of a chart together
_CURVE_POINTS = 100, 2_000  # of a curve: at least and at most


class Chart(NamedTuple):
    """A chart on the page.

    title: its metric.
    every: one row of that many is drawn; 1: all.
    """

    title: str
    figure: BokehFigure
    every: int


def smooth(values: np.ndarray, rows: int) -> np.ndarray:
    """The mean over `rows` neighbouring values, centred; fewer at both ends.

    `values`: float (N,); `rows` is odd. Near an end the window shrinks on both sides alike, so the
    first and the last value stay.
    """
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    places = np.arange(len(values))
    half = np.minimum(rows // 2, np.minimum(places, len(values) - 1 - places))
    return (sums[places + half + 1] - sums[places - half]) / (2 * half + 1)


def chart_curves(runs: Sequence[Run], metrics: Sequence[str]) -> list[Chart]:
    """A chart for each metric, over the step; all charts zoom along the step together."""
    charts: list[Chart] = []
    for metric in metrics:
        shared = {"x_range": charts[0].figure.x_range} if charts else {}
        charts.append(_chart_curve(runs, metric, **shared))
    return charts


def _chart_curve(runs: Sequence[Run], metric: str, **shared: Any) -> Chart:
    from bokeh.models import ColumnDataSource, HoverTool, Line, Scatter, VArea
    from bokeh.models.renderers import DataRenderer

    chart, groups = _chart(**shared), group_seeds(runs)
    looks = styles(groups)
    chart.xaxis.axis_label = "step"
    room = int(np.clip(_POINTS // len(runs), *_CURVE_POINTS))
    every = -(-max(len(run.curves.get(metric, ())) for run in runs) // room)
    for i, run in enumerate(runs):
        if metric not in run.curves:
            continue
        steps, values = np.array(run.curves[metric]).T
        columns = {"value": values} | {f"mean_{n}": smooth(values, n) for n in SMOOTHED}
        kept = np.union1d(np.arange(0, len(steps), every), [len(steps) - 1])
        data = {name: column[kept].astype(np.float32) for name, column in columns.items()}
        source = ColumnDataSource(data | {"step": steps[kept].astype(np.int32)})
        color, dash = looks[run.name]
        line: dict[str, Any] = {"x": "step", "y": "value", "line_color": color, "line_dash": dash}
        of_run = {"name": run.name, "tags": [{"run": i}]}
        chart.add_glyph(source, Line(**line, line_width=2), **of_run)
        if len(steps) < FEW:  # a single point has no line
            dots = Scatter(x="step", y="value", size=5, line_color=color, fill_color=color)
            chart.add_glyph(source, dots, **of_run)
        pale = {"name": f"{run.name}, as logged", "tags": [{"run": i, "raw": True}]}
        chart.add_glyph(source, Line(**line, line_alpha=0.35), **pale, visible=False)
    tips = [("run", "$name"), ("step", "@step{0,0}"), (metric, "@value{%.5g}")]
    hover = HoverTool(tooltips=tips, formatters={"@value": "printf"}, line_policy="nearest")
    hover.renderers = [each for each in chart.renderers if isinstance(each, DataRenderer)]
    chart.add_tools(hover)
    _draw_levels(chart, runs, metric, {name: look[0] for name, look in looks.items()})
    for group in groups:
        if len(group.runs) > 1:
            steps, mean, deviation = mean_curve(group, metric)[::every].T
            band = {"step": steps, "low": mean - deviation, "high": mean + deviation}
            area = VArea(x="step", y1="low", y2="high", fill_alpha=0.15,
                         fill_color=looks[group.runs[0].name][0])  # fmt: skip
            tags = [{"run": runs.index(group.runs[0]), "band": True}]
            chart.add_glyph(ColumnDataSource(band), area, name=group.name, tags=tags)
    return Chart(metric, chart, every)


def _draw_levels(
    chart: BokehFigure, runs: Sequence[Run], metric: str, colours: Mapping[str, str]
) -> None:
    """Draw the `levels` of each run."""
    from bokeh.models import ColumnDataSource, Line, Text

    for i, run in enumerate(runs):
        for text, value in levels([run], metric).items():
            source = ColumnDataSource({"step": [0, run.step], "value": [value] * 2})
            first = ColumnDataSource({"step": [0], "value": [value], "text": [text]})
            where: dict[str, Any] = {"x": "step", "y": "value"}
            line = Line(**where, line_color=colours[run.name], line_dash="dotted")
            label = Text(**where, text="text", text_font_size="9px", text_color="#555555")
            for data, glyph in (source, line), (first, label):
                chart.add_glyph(
                    data, glyph, name=f"{run.name}, {text}", tags=[{"run": i, "band": True}]
                )


def _chart(**fields: Any) -> BokehFigure:
    from bokeh.plotting import figure

    chart = figure(
        height=280, min_width=200, sizing_mode="stretch_width", toolbar_location="above",
        tools="box_zoom,pan,wheel_zoom,reset,save", active_drag="box_zoom", output_backend="svg",
        **fields,
    )  # fmt: skip
    chart.toolbar.logo = None
    chart.toolbar.stylesheets = ["@media print { :host { visibility: hidden; } }"]
    chart.outline_line_color = None
    chart.grid.grid_line_color = "#dddddd"
    return chart


def embed(charts: Sequence[Chart]) -> tuple[list[str], str, str]:
    """The HTML of each chart; as JavaScript, what draws them all, and Bokeh itself."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)
    if not charts:
        return [], "", library
    script, divs = components([chart.figure for chart in charts], wrap_script=False)
    return list(divs), script, library
