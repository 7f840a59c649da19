"""Figures of a model, as wide as a column of a paper.

Text has 7 points at this width. Colour maps are viridis and cividis, which the colour-blind can
read and which stay ordered in grey.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.25  # inches
FONT_SIZE = 7  # points
_DPI = 300
_STYLE = {
    "font.size": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "axes.titlesize": FONT_SIZE,
    "axes.titlepad": 2.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
}
# Of Okabe & Ito 2008, whose colours the colour-blind can tell apart.
_BLUE, _ORANGE, _BLACK = "#0072B2", "#D55E00", "#000000"
_MAX_TILES = 16  # in a row or column of a mosaic
_MAX_LAYERS = 24
_MAX_NUMBERS = 12  # of ticks


@contextlib.contextmanager
def _style() -> Iterator[None]:
    import matplotlib  # takes a second to import

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that the font lacks
        yield


def _styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    @functools.wraps(draw)
    def styled(*args, **kwargs):
        with _style():
            return draw(*args, **kwargs)

    return styled


def as_png(figure: Figure) -> bytes:
    """The figure as a PNG of 300 pixels an inch."""
    png = io.BytesIO()
    with _style():
        for _ in range(2):  # the layout needs the places of labels, known only after it
            figure.draw_without_rendering()
        figure.savefig(png, format="png")
    return png.getvalue()


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    return figure


def as_rgb(pictures: np.ndarray) -> np.ndarray:
    """Pictures (..., C) with three channels: the first three, or the mean of fewer, as grey."""
    if pictures.shape[-1] >= 3:
        return pictures[..., :3]
    grey = pictures.mean(axis=-1, keepdims=True).astype(pictures.dtype)
    return np.repeat(grey, 3, axis=-1)


def _chosen(number: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `number`, evenly spaced with both ends."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).round().astype(int))


def _mosaic(tiles: np.ndarray) -> np.ndarray:
    """Tiles (R, C, r, c) as one map, separated by lines of NaN."""
    gap = _gap(tiles)
    padded = np.pad(tiles.astype(float), ((0, 0),) * 2 + ((0, gap),) * 2, constant_values=np.nan)
    rows = np.concatenate(list(padded), axis=1)
    return np.concatenate(list(rows), axis=1)[:-gap, :-gap]


def _gap(tiles: np.ndarray) -> int:
    return max(1, round(max(tiles.shape[2:]) / 10))


def _number_tiles(axes: Axes, tiles: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """Number the tiles (R, C, r, c) of a mosaic at their centres; of many only some."""
    for numbers, side, set_ticks in (
        (rows, tiles.shape[2], axes.set_yticks),
        (columns, tiles.shape[3], axes.set_xticks),
    ):
        centres = np.arange(len(numbers)) * (side + _gap(tiles)) + (side - 1) / 2
        step = -(-len(numbers) // _MAX_NUMBERS)
        set_ticks(centres[::step], [str(n) for n in numbers[::step]])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@_styled
def draw_filters(components: np.ndarray, shares: np.ndarray, num_filters: int) -> Figure:
    """Principal components (k, height, width, channels) of filters, each on its own scale.

    Mid-grey is zero. `shares` (k,): of the variance.
    """
    columns = min(7, len(components))
    rows = -(-len(components) // columns)
    figure = _figure(
        0.25 + rows * (WIDTH - 0.1) / columns * components.shape[1] / components.shape[2]
    )
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


@_styled
def draw_positions(similarity_SS: np.ndarray, grid: tuple[int, int], title: str = "") -> Figure:
    """A grid of grids: the similarity of the position at a tile's place to all positions."""
    tiles = similarity_SS.reshape(*grid, *grid)
    rows, columns = (_chosen(side, _MAX_TILES) for side in grid)
    tiles = tiles[rows][:, columns]
    mosaic = _mosaic(tiles)
    figure = _figure(0.45 + (WIDTH - 0.85) * mosaic.shape[0] / mosaic.shape[1])
    axes = figure.add_subplot()
    image = axes.imshow(mosaic, cmap="viridis", vmax=1, interpolation="nearest")
    _number_tiles(axes, tiles, rows, columns)
    axes.set_xlabel("patch column")
    axes.set_ylabel("patch row")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="cosine similarity", fraction=0.06, pad=0.02)
    return figure


def _draw_heads_by_layer(
    axes: Axes, mean_LH: np.ndarray, spread_LH: np.ndarray, uniform: float, label: str
) -> None:
    """A dot for each head with its spread as a bar, and the mean over the heads as a line.

    `uniform`: the value of uniform attention, a dashed line with this `label`.
    """
    depth, heads = mean_LH.shape
    layers = np.arange(depth)
    shifts = np.linspace(-0.25, 0.25, heads) if heads > 1 else np.zeros(1)
    x_LH = layers[:, None] + shifts[None]
    axes.errorbar(
        x_LH.ravel(), mean_LH.ravel(), spread_LH.ravel(), fmt="o", color=_BLUE, markersize=2,
        elinewidth=0.5, ecolor="#9CC7E3", label="head ± deviation",
    )  # fmt: skip
    axes.plot(*_widened(layers, mean_LH.mean(axis=1)), "-", color=_ORANGE, label="mean of heads")
    axes.axhline(uniform, linestyle="--", color=_BLACK, linewidth=0.8, label=label)
    axes.set_xlabel("layer")
    _whole_layers(axes, depth)
    axes.set_ylim(bottom=0)  # fixes the top too, so everything must be drawn before


def _whole_layers(axes: Axes, depth: int) -> None:
    axes.set_xticks(np.arange(0, depth, -(-depth // _MAX_NUMBERS)))
    axes.set_xlim(-0.5, depth - 0.5)


def _widened(layers: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """[layers, *values], each (L,); a single layer becomes two places, so that a line has length.

    The places are as far apart as a bar is wide.
    """
    if len(layers) > 1:
        return [layers, *values]
    return [layers + np.array([-0.3, 0.3]), *(np.repeat(x, 2) for x in values)]


@_styled
def draw_distances(
    mean_LH: np.ndarray, spread_LH: np.ndarray, uniform: float, image_size: tuple[int, int]
) -> Figure:
    """Mean attention distances in pixels by layer and head; `uniform`: of uniform attention.

    `image_size`: height and width in pixels.
    """
    figure = _figure(2.4)
    axes = figure.add_subplot()
    _draw_heads_by_layer(axes, mean_LH, spread_LH, uniform, "uniform attention")
    height, width = image_size
    axes.set_ylabel(f"attention distance (px of {width} x {height})")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@_styled
def draw_entropies(mean_LH: np.ndarray, spread_LH: np.ndarray, num_tokens: int) -> Figure:
    """Entropies of attention in bits by layer and head."""
    figure = _figure(2.4)
    axes = figure.add_subplot()
    uniform = float(np.log2(num_tokens))
    _draw_heads_by_layer(axes, mean_LH, spread_LH, uniform, f"uniform over {num_tokens:,} tokens")
    axes.set_ylabel("entropy of attention (bits)")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@_styled
def draw_norms(table: dict[str, np.ndarray], outlier_factor: float) -> Figure:
    """Norms of tokens by layer, and the share of outliers.

    `table`: {"median", "p5", "p95", "largest", "outlier_share", "prefix"}, each (L,); "prefix", the
    mean of the class token and its like, is NaN for a model without any.
    """
    figure = _figure(2.9)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    layers = np.arange(len(table["median"]))
    band = _widened(layers, table["p5"], table["p95"])
    above.fill_between(*band, color="#9CC7E3", label="5 to 95 %", linewidth=0)
    above.plot(layers, table["median"], "-o", color=_BLUE, label="median of the patches")
    above.plot(layers, table["largest"], "--^", color=_ORANGE, label="largest patch")
    if np.isfinite(table["prefix"]).all():
        above.plot(layers, table["prefix"], ":s", color=_BLACK, label="prefix tokens")
    above.set_yscale("log")
    _plain_log_ticks(above)
    above.set_ylabel("norm of a token")
    below.bar(layers, 100 * table["outlier_share"], width=0.6, color=_ORANGE)
    below.set_ylim(0, max(1.0, 110 * table["outlier_share"].max()))
    if not table["outlier_share"].any():
        below.text(0.5, 0.5, "none", transform=below.transAxes, ha="center", va="center")
    below.set_ylabel("outliers (%)")
    below.set_xlabel(f"layer (outliers: over {outlier_factor:g} times the median)")
    _whole_layers(below, len(layers))
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.align_ylabels()
    return figure


def _plain_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@_styled
def draw_similarity(alignment_LM: np.ndarray, names: tuple[str, str]) -> Figure:
    """The alignment of each pair of layers; `names`: labels of the rows and columns."""
    height, width = alignment_LM.shape
    figure = _figure(0.45 + (WIDTH - 0.85) * min(max(height / width, 0.6), 1.6))
    axes = figure.add_subplot()
    image = axes.imshow(alignment_LM, cmap="viridis", vmin=0, vmax=1, origin="lower",
                        interpolation="nearest", aspect="auto")  # fmt: skip
    axes.set_yticks(np.arange(0, height, -(-height // _MAX_NUMBERS)))
    axes.set_xticks(np.arange(0, width, -(-width // _MAX_NUMBERS)))
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    figure.colorbar(image, ax=axes, label="centred kernel alignment", fraction=0.06, pad=0.02)
    return figure


def _resized(maps: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Maps (n, rows, columns) resized to (n, height, width), bilinearly."""
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    return np.stack([
        np.asarray(Image.fromarray(np.asarray(one, np.float32)).resize(size[::-1], bilinear))
        for one in maps
    ])  # fmt: skip


def _panels(
    heads: Sequence[str], rows: Sequence[Sequence[tuple[np.ndarray, dict[str, Any]]]], label: str
) -> Figure:
    """Rows of images under the titles `heads`, and a colour bar with `label` for the last one."""
    height, width = rows[0][0][0].shape[:2]
    side = (WIDTH - 0.06 * len(heads)) / len(heads) * height / width
    figure = _figure(0.55 + len(rows) * (side + 0.05))
    panels = figure.subplots(len(rows), len(heads), squeeze=False)
    image = None
    for row, row_axes in zip(rows, panels, strict=True):
        for (content, how), axes in zip(row, row_axes, strict=True):
            shown = axes.imshow(content, extent=(0, width, height, 0), **how)
            image = shown if "cmap" in how else image
            axes.set_axis_off()
    for title, axes in zip(heads, panels[0], strict=True):
        axes.set_title(title)
    figure.colorbar(image, ax=list(panels.flat), label=label, location="bottom", aspect=40,
                    fraction=0.06, pad=0.02)  # fmt: skip
    return figure


@_styled
def draw_rollouts(pictures: np.ndarray, maps: np.ndarray, where: str) -> Figure:
    """Attention rollout beside each picture, as heat and as a mask.

    `pictures`: uint8 (n, H, W, C); `maps`: (n, rows, columns); `where` the tokens it starts from.
    """
    pictures = as_rgb(pictures)
    shares = maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), 1e-30)
    heat = {"cmap": "viridis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    masks = np.clip(_resized(shares, pictures.shape[1:3]), 0, 1)[..., None]
    rows = [
        [(picture, {}), (share, heat), (np.uint8(picture * mask), {})]
        for picture, share, mask in zip(pictures, shares, masks, strict=True)
    ]
    label = f"rollout from the {where} (share of the largest)"
    return _panels(("picture", "rollout", "as a mask"), rows, label)


@_styled
def draw_features(pictures: np.ndarray, components: np.ndarray) -> Figure:
    """The first three principal components (n, rows, columns, 3) of patch features.

    Together as red, green and blue, and each by itself; scaled from the 2nd to the 98th percentile
    over all pictures.
    """
    low, high = np.percentile(components, (2, 98), axis=(0, 1, 2))
    scaled = np.clip((components - low) / np.maximum(high - low, 1e-30), 0, 1)
    one = {"cmap": "cividis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    rows = [
        [(picture, {}), (colours, {"interpolation": "nearest"})]
        + [(colours[..., i], one) for i in range(3)]
        for picture, colours in zip(as_rgb(pictures), scaled, strict=True)
    ]
    heads = ("picture", "1-3 as RGB", "1", "2", "3")
    return _panels(heads, rows, "component (2nd to 98th percentile)")


@_styled
def draw_heads(picture: np.ndarray, maps: np.ndarray, where: str) -> Figure:
    """The attention of every head (L, H, rows, columns) for one picture (H, W, C).

    At most 24 layers of 16 heads are drawn, evenly spaced.
    """
    layers, heads = _chosen(len(maps), _MAX_LAYERS), _chosen(maps.shape[1], _MAX_TILES)
    shown = maps[layers][:, heads]
    mosaic = _mosaic(shown / np.maximum(shown.max(axis=(2, 3), keepdims=True), 1e-30))
    share = 0.28 if mosaic.shape[1] < 2.2 * mosaic.shape[0] else 0.2
    height = (1 - share) * (WIDTH - 0.4) * mosaic.shape[0] / mosaic.shape[1]
    figure = _figure(0.55 + min(max(height, 0.9), 6))
    left, right = figure.subplots(1, 2, width_ratios=(share, 1 - share))
    left.imshow(as_rgb(picture))
    left.set_axis_off()
    left.set_anchor("N")
    image = right.imshow(mosaic, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    _number_tiles(right, shown, layers, heads)
    right.set_xlabel("head")
    right.set_ylabel("layer")
    label = f"attention of the {where} (share of the largest)"
    figure.colorbar(image, ax=[left, right], location="bottom", aspect=40, fraction=0.06, pad=0.02,
                    panchor=False, label=label)  # fmt: skip
    return figure
