"""Plots for studies."""

import io
from collections.abc import Mapping, Sequence


def draw_curves(
    points: Mapping[str, Sequence[tuple[float, Sequence[float]]]], *, x_label: str, y_label: str
) -> bytes:
    """Plot curves over a logarithmic axis as a PNG: means as lines, single values as dots.

    `points`: {name of the curve: [(x, values at x)]}.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, places in points.items():
        means = [sum(values) / len(values) for _, values in places]
        (line,) = axes.plot([x for x, _ in places], means, label=name)
        dots = [(x, value) for x, values in places for value in values]
        axes.plot(*zip(*dots, strict=True), "o", color=line.get_color(), markersize=4)
    axes.set_xscale("log")
    ticks = sorted({x for places in points.values() for x, _ in places})
    axes.set_xticks(ticks, labels=[f"{x:,g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
