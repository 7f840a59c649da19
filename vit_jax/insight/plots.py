"""Figures of a model, of results by class and of runs; `charts` draws a report's.

Figures are Matplotlib's. Those of a model are as wide as a column of a paper, with text of 7
points. Colour maps are viridis and cividis, which the colour-blind can read and which stay ordered
in grey.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vit_jax.insight.levels import levels
from vit_jax.insight.runs import group_seeds, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.typing import RcKeyType

    from vit_jax.insight.runs import Group, Run

WIDTH = 3.25  # inches, of a figure of a model
FONT_SIZE = 7  # points, in it
_STYLE: dict[RcKeyType, Any] = {
    "figure.dpi": 300,
    "font.size": FONT_SIZE,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "axes.titlepad": 2.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
}
# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow and its like.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_BLUE, _ORANGE, _BLACK = _COLORS[0], _COLORS[1], _COLORS[4]
_PALE_BLUE = "#9CC7E3"
_DASHES = ("solid", "dashed", "dotted")
FEW = 20  # rows; a curve of fewer has dots
_MAX_TILES = 16  # in a row or column of a mosaic
_MAX_LAYERS = 24
_MAX_NUMBERS = 12  # of ticks
_TALLEST = 2.0  # height over width of a panel; taller pictures are drawn narrower
_NUMBERED = 20  # classes; a confusion matrix of more has no numbers in its cells


def styles(groups: Sequence[Group]) -> dict[str, tuple[str, str]]:
    """{run: its colour and dash} on a page: runs of one group share the colour."""
    return {
        run.name: (style(i)[0], _DASHES[j % len(_DASHES)] if len(group.runs) > 1 else style(i)[1])
        for i, group in enumerate(groups)
        for j, run in enumerate(group.runs)
    }


def style(i: int) -> tuple[str, str]:
    """The colour and the dash (`solid`, `dashed`, `dotted`) of run number `i`; 21 runs differ."""
    return _COLORS[i % len(_COLORS)], _DASHES[i % len(_DASHES)]


def short(name: str, longest: int = 24) -> str:
    """`name` for a label: cut in the middle if long, without signs that would begin a formula."""
    name = " ".join(name.encode(errors="replace").decode().split())
    name = re.sub(r"[$\\]+", "_", name)
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


@contextlib.contextmanager
def paper_style() -> Iterator[None]:
    """Figures of a model are drawn within this context, by `as_file` too."""
    import matplotlib  # takes a second to import

    with matplotlib.rc_context(_STYLE):
        yield


def as_file(figure: Figure, form: str = "png") -> bytes:
    """The content of the figure's file; `form`: png, pdf or svg."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that the font lacks are drawn as boxes
        for _ in range(2):  # the layout needs the places of labels, known only after it
            figure.draw_without_rendering()
        figure.savefig(content, format=form)
    return content.getvalue()


def _figure(height: float, width: float = WIDTH, **fields: Any) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **fields)
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    return figure


def as_rgb(images: np.ndarray) -> np.ndarray:
    """Images (..., C) with three channels: the first three, or the mean of fewer, as grey."""
    if images.shape[-1] >= 3:
        return images[..., :3]
    grey = images.mean(axis=-1, keepdims=True).astype(images.dtype)
    return np.repeat(grey, 3, axis=-1)


def _chosen(number: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `number`, evenly spaced with both ends."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).round().astype(int))


def _numbers(number: int) -> np.ndarray:
    """Places of ticks: every number below `number`, or of many only some."""
    return np.arange(0, number, -(-number // _MAX_NUMBERS))


def _draw_mosaic(
    axes: Axes, tiles: np.ndarray, rows: np.ndarray, columns: np.ndarray, **how: Any
) -> AxesImage:
    """Draw tiles (R, C, r, c) with gaps and the numbers of their rows and columns."""
    gap = _gap(tiles)
    padded = np.pad(tiles.astype(float), ((0, 0),) * 2 + ((0, gap),) * 2, constant_values=np.nan)
    mosaic = np.concatenate(list(np.concatenate(list(padded), axis=1)), axis=1)[:-gap, :-gap]
    image = axes.imshow(mosaic, cmap="viridis", vmax=1, interpolation="nearest", **how)
    for numbers, side, set_ticks in (
        (rows, tiles.shape[2], axes.set_yticks),
        (columns, tiles.shape[3], axes.set_xticks),
    ):
        centres = np.arange(len(numbers)) * (side + gap) + (side - 1) / 2
        shown = _numbers(len(numbers))
        set_ticks(centres[shown], map(str, numbers[shown]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _gap(tiles: np.ndarray) -> int:
    """The distance of tiles (R, C, r, c) in a mosaic."""
    return max(1, round(max(tiles.shape[2:]) / 10))


def _aspect(tiles: np.ndarray) -> float:
    """Height over width of a mosaic of tiles (R, C, r, c)."""
    (rows, columns, height, width), gap = tiles.shape, _gap(tiles)
    return rows * (height + gap) / (columns * (width + gap))


def draw_filters(components: np.ndarray, shares: np.ndarray, num_filters: int) -> Figure:
    """Principal components (k, height, width, channels) of filters, each on its own scale.

    Mid-grey is zero. `shares` (k,): of the variance.
    """
    columns = min(7, len(components))
    rows = -(-len(components) // columns)
    side = (WIDTH - 0.1) / columns * components.shape[1] / components.shape[2]
    figure = _figure(0.25 + rows * side)
    for i, component in enumerate(components):
        axes = figure.add_subplot(rows, columns, i + 1)
        scaled = 0.5 + component / (2 * np.abs(component).max())
        axes.imshow(as_rgb(scaled), interpolation="nearest")
        axes.set_axis_off()
    figure.suptitle(
        f"{len(components)} principal components of {num_filters} filters: "
        f"{shares.sum():.0%} of the variance"
    )
    return figure


def draw_positions(similarity_SS: np.ndarray, grid: tuple[int, int], title: str = "") -> Figure:
    """A grid of grids: the similarity of the position at a tile's place to all positions."""
    rows, columns = (_chosen(side, _MAX_TILES) for side in grid)
    tiles = similarity_SS.reshape(*grid, *grid)[rows][:, columns]
    figure = _figure(0.45 + (WIDTH - 0.85) * _aspect(tiles))
    axes = figure.add_subplot(xlabel="patch column", ylabel="patch row", title=title)
    image = _draw_mosaic(axes, tiles, rows, columns)
    figure.colorbar(image, ax=axes, label="cosine similarity", fraction=0.06, pad=0.02)
    return figure


def draw_heads_by_layer(
    mean_LH: np.ndarray, spread_LH: np.ndarray, uniform: float, label: str, unit: str
) -> Figure:
    """A dot for each head with its spread as a bar, and the mean over the heads as a line.

    `uniform`: the value of uniform attention, a dashed line with this `label`. `unit`: the label of
    the values.
    """
    figure = _figure(2.4)
    axes = figure.add_subplot(xlabel="layer", ylabel=unit)
    depth, heads = mean_LH.shape
    shifts = np.linspace(-0.25, 0.25, heads) if heads > 1 else np.zeros(1)
    x_LH = np.arange(depth)[:, None] + shifts[None]
    axes.errorbar(
        x_LH.ravel(), mean_LH.ravel(), spread_LH.ravel(), fmt="o", color=_BLUE, markersize=2,
        elinewidth=0.5, ecolor=_PALE_BLUE, label="head ± deviation",
    )  # fmt: skip
    axes.plot(mean_LH.mean(axis=1), "-", color=_ORANGE, label="mean of heads")
    axes.axhline(uniform, linestyle="--", color=_BLACK, linewidth=0.8, label=label)
    axes.set_xticks(_numbers(depth))
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_ylim(bottom=0)  # fixes the top too, so everything must be drawn before
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_norms(table: dict[str, np.ndarray], outlier_factor: float) -> Figure:
    """Norms of tokens by layer, and the share of outliers.

    `table`: {"median", "p5", "p95", "largest", "outlier_share", "prefix"}, each (L,); "prefix", the
    mean of the class token and its like, is NaN for a model without any.
    """
    figure = _figure(2.9)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    layers = np.arange(len(table["median"]))
    above.fill_between(
        layers, table["p5"], table["p95"], color=_PALE_BLUE, label="5 to 95 %", linewidth=0
    )
    above.plot(layers, table["median"], "-o", color=_BLUE, label="median of the patches")
    above.plot(layers, table["largest"], "--^", color=_ORANGE, label="largest patch")
    if np.isfinite(table["prefix"]).all():
        above.plot(layers, table["prefix"], ":s", color=_BLACK, label="prefix tokens")
    above.set_yscale("log")
    above.set_ylabel("norm of a token")
    below.bar(layers, 100 * table["outlier_share"], width=0.6, color=_ORANGE)
    below.set_ylim(0, max(1.0, 110 * table["outlier_share"].max()))
    below.set_ylabel("outliers (%)")
    below.set_xlabel(f"layer (outliers: over {outlier_factor:g} times the median)")
    below.set_xticks(_numbers(len(layers)))
    below.set_xlim(-0.5, len(layers) - 0.5)
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.align_ylabels()
    return figure


def draw_similarity(alignment_LM: np.ndarray, names: tuple[str, str]) -> Figure:
    """The alignment of each pair of layers; `names`: labels of the rows and columns."""
    height, width = alignment_LM.shape
    figure = _figure(0.45 + (WIDTH - 0.85) * min(max(height / width, 0.6), 1.6))
    axes = figure.add_subplot(ylabel=names[0], xlabel=names[1])
    image = axes.imshow(alignment_LM, cmap="viridis", vmin=0, vmax=1, origin="lower",
                        interpolation="nearest", aspect="auto")  # fmt: skip
    axes.set_yticks(_numbers(height))
    axes.set_xticks(_numbers(width))
    figure.colorbar(image, ax=axes, label="centred kernel alignment", fraction=0.06, pad=0.02)
    return figure


def _draw_panels(
    heads: Sequence[str], rows: Sequence[Sequence[tuple[np.ndarray, dict[str, Any]]]], label: str
) -> Figure:
    """Rows of images under the titles `heads`, and a colour bar with `label` for the last one."""
    shapes = [row[0][0].shape[:2] for row in rows]
    width = (WIDTH - 0.06 * len(heads)) / len(heads)
    sides = [width * min(rows / columns, _TALLEST) for rows, columns in shapes]
    figure = _figure(0.55 + sum(sides) + 0.05 * len(rows))
    panels = figure.subplots(len(rows), len(heads), squeeze=False, height_ratios=sides)
    coloured: list[AxesImage] = []
    for row, (height, width), row_axes in zip(rows, shapes, panels, strict=True):
        for (content, how), axes in zip(row, row_axes, strict=True):
            shown = axes.imshow(content, extent=(0, width, height, 0), **how)
            if "cmap" in how:
                coloured.append(shown)
            axes.set_axis_off()
    for title, axes in zip(heads, panels[0], strict=True):
        axes.set_title(title)
    figure.colorbar(coloured[-1], ax=list(panels.flat), label=label, location="bottom", aspect=40,
                    fraction=0.06, pad=0.02)  # fmt: skip
    return figure


def draw_rollouts(images: Iterable[np.ndarray], maps: Iterable[np.ndarray], where: str) -> Figure:
    """Attention rollout beside each image, as heat and as a mask.

    `images`: n of uint8 (H, W, C); `maps`: n of (rows, columns); `where` the tokens it starts from.
    """
    heat, rows = {"cmap": "viridis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}, []
    for image, own in zip(map(as_rgb, images), maps, strict=True):
        share = own / np.maximum(own.max(), 1e-30)
        mask = np.asarray(jax.image.resize(share, image.shape[:2], "bilinear"))[..., None]
        rows.append([(image, {}), (share, heat), (np.uint8(image * mask), {})])
    label = f"rollout from the {where} (share of the largest)"
    return _draw_panels(("image", "rollout", "as a mask"), rows, label)


def draw_features(images: Iterable[np.ndarray], components: Collection[np.ndarray]) -> Figure:
    """The first three principal components, n of (rows, columns, 3), of patch features.

    Together as red, green and blue, and each by itself; scaled from the 2nd to the 98th percentile
    over all images.
    """
    of_patches = np.concatenate([x.reshape(-1, 3) for x in components])
    low, high = np.percentile(of_patches, (2, 98), axis=0)
    scaled = [np.clip((x - low) / np.maximum(high - low, 1e-30), 0, 1) for x in components]
    one = {"cmap": "cividis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    rows = [
        [(image, {}), (colours, {"interpolation": "nearest"})]
        + [(colours[..., i], one) for i in range(3)]
        for image, colours in zip(map(as_rgb, images), scaled, strict=True)
    ]
    heads = ("image", "1-3 as RGB", "1", "2", "3")
    return _draw_panels(heads, rows, "component (2nd to 98th percentile)")


def draw_heads(image: np.ndarray, maps: np.ndarray, where: str) -> Figure:
    """The attention of every head (L, H, rows, columns) for one image (H, W, C).

    At most 24 layers of 16 heads are drawn, evenly spaced.
    """
    layers, heads = _chosen(len(maps), _MAX_LAYERS), _chosen(maps.shape[1], _MAX_TILES)
    tiles = maps[layers][:, heads]
    tiles = tiles / np.maximum(tiles.max(axis=(2, 3), keepdims=True), 1e-30)
    share = 0.28 if _aspect(tiles) > 1 / 2.2 else 0.2
    height = (1 - share) * (WIDTH - 0.4) * _aspect(tiles)
    figure = _figure(0.55 + min(max(height, 0.9), 6))
    left, right = figure.subplots(1, 2, width_ratios=(share, 1 - share))
    left.imshow(as_rgb(image))
    left.set_axis_off()
    left.set_anchor("N")
    mosaic = _draw_mosaic(right, tiles, layers, heads, vmin=0)
    right.set_xlabel("head")
    right.set_ylabel("layer")
    label = f"attention of the {where} (share of the largest)"
    figure.colorbar(mosaic, ax=[left, right], location="bottom", aspect=40, fraction=0.06, pad=0.02,
                    panchor=False, label=label)  # fmt: skip
    return figure


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """A confusion matrix: the share of each true class that is taken for each class.

    `counts`: int (C, C), images by true class and predicted class.
    """
    from sklearn.metrics import ConfusionMatrixDisplay

    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = _figure(2.2 + 0.36 * len(names), 3 + 0.42 * len(names), dpi=120)
    ConfusionMatrixDisplay(share, display_labels=[*map(short, names)]).plot(
        ax=figure.add_subplot(), cmap="Blues", include_values=len(names) <= _NUMBERED,
        values_format=".0%", xticks_rotation="vertical", im_kw={"vmin": 0, "vmax": 1},
        text_kw={"fontsize": 8},
    )  # fmt: skip
    return figure


def draw_pairs(pairs: Sequence[tuple[str, str, int]], num_pairs: int) -> Figure:
    """Bars for the most frequent confusions (true class, predicted class, images), in that order.

    `num_pairs`: the number of different confusions, drawn or not.
    """
    figure = _figure(1.2 + 0.26 * len(pairs), 8, dpi=120)
    figure.suptitle(f"most frequent of {num_pairs:,} confusions: true class → predicted class")
    axes = figure.add_subplot(xlabel="images")
    names = [f"{short(true)} → {short(predicted)}" for true, predicted, _ in pairs]
    axes.barh(range(len(pairs)), [count for _, _, count in pairs])
    axes.set_yticks(range(len(pairs)), names)
    axes.invert_yaxis()
    axes.locator_params(axis="x", integer=True)
    return figure


def draw_runs(runs: Sequence[Run], metrics: Sequence[str]) -> Figure:
    """A panel for each metric with the curves of all runs over the step.

    Runs that differ in the seed only are one curve, their mean, with a band of one deviation.
    """
    columns, groups = min(len(metrics), 2), group_seeds(runs)
    rows = -(-len(metrics) // columns)
    figure = _figure(3.4 * rows + 0.35 + 0.22 * len(groups), 5.5 * columns, dpi=120)
    lines: dict[int, Any] = {}
    for i, metric in enumerate(metrics):
        axes = figure.add_subplot(
            rows, columns, i + 1, xlabel="step", ylabel=metric.replace("/", " ")
        )
        for place, group in enumerate(groups):
            color, dash = style(place)
            steps, mean, deviation = mean_curve(group, metric).T
            marker = "o" if len(steps) < FEW else None  # a single point has no line
            (lines[place],) = axes.plot(
                steps, mean, linestyle=dash, color=color, marker=marker, markersize=3
            )
            if len(group.runs) > 1:
                band = mean - deviation, mean + deviation
                axes.fill_between(steps, *band, color=color, alpha=0.15, linewidth=0)
            for text, value in levels(group.runs, metric).items():
                axes.axhline(value, color=color, linestyle="dotted", linewidth=1)
                axes.annotate(text, (0, value), xycoords=("axes fraction", "data"), fontsize=7)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
    seeds = [f" (mean ± deviation, {g.counted})" * (len(g.runs) > 1) for g in groups]
    names = [short(group.name, 60) + said for group, said in zip(groups, seeds, strict=True)]
    figure.legend([*lines.values()], names, loc="outside lower center", fontsize=9)
    return figure
