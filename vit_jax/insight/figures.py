"""Pictures of tables and curves, as PNG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_NAME = 24  # letters
_DPI = 120
_NUMBERED = 20  # a heat map of more columns has no numbers in its cells


def draw_heat_map(
    counts: np.ndarray, row_names: Sequence[str], column_names: Sequence[str]
) -> bytes:
    """A confusion matrix: the colour is the share of the row, the number is the count.

    `counts`: int (rows, columns), images by true class and predicted class.
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows, columns = counts.shape
    figure = _figure(3 + 0.42 * columns, 2.2 + 0.36 * rows)
    axes = figure.add_subplot()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(columns), map(_short, column_names), rotation=45, ha="right",
                    rotation_mode="anchor")  # fmt: skip
    axes.set_yticks(range(rows), map(_short, row_names))
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if columns <= _NUMBERED:
        for (i, j), count in np.ndenumerate(counts):
            if count:
                color = "white" if share[i, j] > 0.5 else "black"
                axes.text(j, i, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    return _png(figure)


def draw_pairs(pairs: Sequence[tuple[str, str, int]], num_pairs: int) -> bytes:
    """Bars for the most frequent confusions (true class, predicted class, images), in that order.

    `num_pairs`: the number of different confusions, drawn or not.
    """
    figure = _figure(8, 1.2 + 0.26 * max(len(pairs), 1))
    axes = figure.add_subplot()
    names = [f"{_short(true)} → {_short(predicted)}" for true, predicted, _ in pairs]
    axes.barh(range(len(pairs)), [count for _, _, count in pairs])
    axes.set_yticks(range(len(pairs)), names)
    axes.invert_yaxis()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("images")
    axes.set_title(f"most frequent of {num_pairs:,} confusions: true class → predicted class",
                   fontsize=10)  # fmt: skip
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    """A figure of that size in inches."""
    from matplotlib.figure import Figure  # takes a second to import

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that the font lacks are drawn as boxes
        figure.savefig(png, format="png", dpi=_DPI)
    return png.getvalue()


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    """`name` for a tick: cut if it is long; a dollar sign would begin a formula."""
    name = " ".join(name.encode(errors="backslashreplace").decode().split())
    name = name if len(name) <= longest else name[: longest - 1] + "…"
    return name.replace("$", r"\$")


def draw_runs(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], names: Sequence[str]
) -> bytes:
    """A panel for each metric with the curves of all runs over the step.

    `panels`: {metric: {run: [(step, value)]}}; `names`: all runs, which keep their colours.
    """
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = _figure(5.5 * columns, 3.4 * rows + 0.35 + 0.22 * len(names))
    lines = {}
    for i, (metric, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for name, points in curves.items():
            steps, values = zip(*points, strict=True)
            color = f"C{names.index(name) % 10}"
            style = ("-", "--", ":", "-.")[names.index(name) // 10 % 4]
            marker = "o" if len(points) < 20 else None  # a single point has no line
            (lines[name],) = axes.plot(
                steps, values, style, color=color, marker=marker, markersize=3
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    shown = [name for name in names if name in lines]
    figure.legend([lines[name] for name in shown], [_short(name, 60) for name in shown],
                  loc="outside lower center", fontsize=9)  # fmt: skip
    return _png(figure)
