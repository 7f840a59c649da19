"""The figures of a model: images, each with its numbers in a file of the same name.

A model that lacks what a figure shows is told so by a text instead of the figure's files.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.base import files
from vit_jax.data import Source
from vit_jax.evaluators.features import principal_components
from vit_jax.insight import plots
from vit_jax.insight.attention_maps import name_of_shares, patch_distances
from vit_jax.insight.figure_names import FIGURE_NAMES
from vit_jax.insight.measured import (
    MIN_IMAGES,
    Attention,
    Maps,
    Measured,
    alignment,
    measure,
    norm_table,
    with_size,
)
from vit_jax.insight.tables import as_csv
from vit_jax.models.contract import about
from vit_jax.transfer import read_pretrained, with_image_size
from vit_jax.transfer.fit import position_tables
from vit_jax.transfer.pretrained import Pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COMPONENTS = 28  # of the filters
OUTLIER_FACTOR = 3  # times the median norm of the layer's patches
_NEEDS_IMAGES = "needs images; give files, folders or --data=NAME:SPLIT"

# What a function gives: a figure, or several by name; its numbers, as arrays or as rows of a table.
Made = tuple["Figure | dict[str, Figure]", Mapping[str, Any] | list[Sequence[Any]]]


@dataclasses.dataclass
class Subject:
    """The arrays that figures show.

    seen: measurements over images; None: none were given.
    other, other_name: measurements of a second model, and its source; else of the model itself.
    """

    pretrained: Pretrained
    seen: Measured | None = None
    other: Measured | None = None
    other_name: str = ""

    @functools.cached_property
    def model(self) -> nn.Module:
        return with_size(self.pretrained)

    def grids(self, seen: Measured) -> Any:
        """The grids of patches of the measured images; one if all are equal."""
        return [self.model.grid] if seen.grids is None else seen.grids


def filters_of(pretrained: Pretrained) -> np.ndarray | str:
    """The filters that see the pixels, float32 (filters, height, width, channels), as applied.

    A ViT's are the columns of its patch embedding; hybrids', BiTs' and EfficientNets' are the
    kernels of the root convolution. A text says why a model has none.
    """
    found = about(pretrained.model).filters(pretrained.params)
    return found if isinstance(found, str) else np.moveaxis(np.asarray(found, np.float32), -1, 0)


def positions_of(pretrained: Pretrained) -> dict[str, np.ndarray] | str:
    """The position embeddings of the patches, {"stem" or "layer N": float32 (S, D)}.

    A text says why the model has none.
    """
    model, image_size = pretrained.model, pretrained.spec.image_size
    if why := about(model).why_no_positions:
        return why
    if image_size is None:
        return "the model takes images of any size; choose one with --image_size"
    found = position_tables({**pretrained.params, **pretrained.model_state})
    tables = {"stem": next(iter(found.values()), None)}
    if model.positions_at == "layers":
        tables = {f"layer {i}": found[f"encoder/layer_{i}/"] for i in range(model.depth)}
    build, prefix = model.positions(image_size).build_checked, model.num_prefix_tokens
    return {name: np.asarray(build(given))[0, prefix:] for name, given in tables.items()}


def _filters(subject: Subject) -> Made | str:
    found = filters_of(subject.pretrained)
    if isinstance(found, str):
        return found
    rows = found.reshape(len(found), -1)
    components, shares = principal_components(rows, MAX_COMPONENTS)
    if not len(components):
        return "all its filters are the same"
    components = components.reshape(-1, *found.shape[1:])
    figure = plots.draw_filters(components, shares, len(found))
    return figure, {"components": components, "share_of_variance": shares, "filters": found}


def _positions(subject: Subject) -> Made | str:
    from sklearn.metrics.pairwise import cosine_similarity

    found = positions_of(subject.pretrained)
    if isinstance(found, str):
        return found
    similarity = {name: cosine_similarity(x).astype(np.float32) for name, x in found.items()}
    name, first = next(iter(similarity.items()))
    title = "" if name == "stem" else f"positions of {name} of {len(found)}"
    figure = plots.draw_positions(first, subject.model.grid, title)
    arrays = {name.replace(" ", "_"): x for name, x in similarity.items()}
    return figure, {"grid": np.array(subject.model.grid), **arrays}


def _distance(subject: Subject, seen: Measured, attention: Attention) -> Made:
    model, grids = subject.model, subject.grids(seen)
    uniform = float(np.mean([patch_distances(grid, model.token_stride).mean() for grid in grids]))
    height, width = model.image_size
    size = "px" if seen.grids is not None else f"px of {width} x {height}"
    labels = "uniform attention", f"attention distance ({size})"
    shares = attention.shares.mean(axis=0)
    return _by_head("distance_px", attention.distances, uniform, labels, prefix_share=shares)


def _entropy(subject: Subject, seen: Measured, attention: Attention) -> Made:
    tokens = subject.model.num_prefix_tokens + np.prod(subject.grids(seen), axis=1)
    between = " to ".join(f"{n:,}" for n in np.unique([tokens.min(), tokens.max()]))
    labels = f"uniform over {between} tokens", "entropy of attention (bits)"
    uniform = float(np.log2(tokens).mean())
    return _by_head("entropy_bits", attention.entropies, uniform, labels)


def _by_head(
    name: str, values_ILH: np.ndarray, uniform: float, labels: tuple[str, str], **others: np.ndarray
) -> Made:
    """Mean and deviation of the values NAME_UNIT; the table has `others` (L, H) too."""
    mean = values_ILH.mean(axis=0)
    spread = values_ILH.std(axis=0, ddof=min(1, len(values_ILH) - 1))  # 0 for a single image
    columns = {name: mean, f"deviation_{name.rpartition('_')[2]}": spread, **others}
    rows = [(*place, *(x[place] for x in columns.values())) for place in np.ndindex(mean.shape)]
    figure = plots.draw_heads_by_layer(mean, spread, uniform, *labels)
    return figure, [("layer", "head", *columns), *rows]


def _rollout(subject: Subject, seen: Measured, attention: Attention) -> Made:
    where = name_of_shares(about(subject.model))
    figure = plots.draw_rollouts(seen.images, attention.rollouts, where)
    return figure, {"rollout": attention.rollouts} | seen.shown


def _heads(subject: Subject, seen: Measured, attention: Attention) -> Made:
    where = name_of_shares(about(subject.model))
    pairs = enumerate(zip(seen.images, attention.heads, strict=True), start=1)
    figures = {f"heads_{i}": plots.draw_heads(*pair, where) for i, pair in pairs}
    return figures, {"attention": attention.heads} | seen.shown


def _features(subject: Subject, seen: Measured) -> Made | str:
    rows = np.concatenate([x.reshape(-1, x.shape[-1]) for x in seen.features])
    components, shares = principal_components(rows, 3)
    if len(components) < 3:
        return f"its {len(rows)} patches span fewer than three directions; give more images"
    projected = (rows - rows.mean(axis=0, keepdims=True)) @ components.T
    ends = np.cumsum([x.shape[0] * x.shape[1] for x in seen.features])
    parts = zip(np.split(projected, ends[:-1]), seen.features, strict=True)
    made = [part.reshape(*x.shape[:2], 3) for part, x in parts]
    maps: Maps = made if isinstance(seen.features, list) else np.stack(made)
    figure = plots.draw_features(seen.images, maps)
    return figure, {"components": maps, "share_of_variance": shares} | seen.shown


def _norms(subject: Subject, seen: Measured) -> Made:
    table = norm_table(seen, subject.model.num_prefix_tokens, OUTLIER_FACTOR)
    rows = enumerate(zip(*table.values(), strict=True))
    figure = plots.draw_norms(table, OUTLIER_FACTOR)
    return figure, [("layer", *table), *((i, *row) for i, row in rows)]


def _similarity(subject: Subject, seen: Measured) -> Made | str:
    found = alignment(seen.grams, (subject.other or seen).grams)
    if found is None:
        return f"needs {MIN_IMAGES} readable images in a batch; give more"
    own = subject.pretrained.source
    first, second = (plots.short(name, 20) for name in (own, subject.other_name or own))
    names = f"layer of {first}", f"layer of {second}"
    rows = ((*place, value) for place, value in np.ndenumerate(found))
    return plots.draw_similarity(found, names), [("layer", "other_layer", "cka"), *rows]


def _of_images(draw: Callable[[Subject, Measured], Made | str]) -> Callable[[Subject], Made | str]:
    """The function of a figure from one that needs measurements."""

    def figure(subject: Subject) -> Made | str:
        return _NEEDS_IMAGES if subject.seen is None else draw(subject, subject.seen)

    return figure


def _of_attention(
    draw: Callable[[Subject, Measured, Attention], Made],
) -> Callable[[Subject], Made | str]:
    """The function of a figure from one that needs measurements of attention."""

    def figure(subject: Subject) -> Made | str:
        seen, why = subject.seen, about(subject.pretrained.model).why_no_weights
        if why or seen is None or seen.attention is None:
            return why or _NEEDS_IMAGES
        return draw(subject, seen, seen.attention)

    return figure


_FUNCTIONS = (_filters, _positions, _of_attention(_distance), _of_attention(_rollout),
              _of_attention(_heads), _of_images(_features), _of_attention(_entropy),
              _of_images(_norms), _of_images(_similarity))  # fmt: skip
FIGURES: dict[str, Callable[[Subject], Made | str]] = dict(
    zip(FIGURE_NAMES, _FUNCTIONS, strict=True)
)
_OF_PARAMETERS = ("filters", "positions")


def needs_images(names: Iterable[str]) -> bool:
    """Whether any of the figures `names` shows what a model does with images."""
    return any(name.partition(".")[0] not in _OF_PARAMETERS for name in names)


def write_figures(
    subject: Subject, names: Iterable[str], output: epath.Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Write the figures `names` into the folder `output`, as PNGs unless a name has an ending.

    Returns:
      ({figure: names of its files}, {figure left out: reason}).
    """
    written, reasons = {}, {}
    for chosen in names:
        name, _, form = chosen.partition(".")
        form = form or "png"
        with plots.paper_style():
            made = FIGURES[name](subject)
            if isinstance(made, str):
                reasons[chosen] = made
                continue
            drawn, numbers = made
            named = drawn if isinstance(drawn, dict) else {name: drawn}
            contents = {f"{n}.{form}": plots.as_file(figure, form) for n, figure in named.items()}
        if isinstance(numbers, list):
            contents[f"{name}.csv"] = as_csv(numbers)
        else:
            contents[f"{name}.npz"] = _npz(numbers)
        with files.whole_folder(output):
            for file, content in contents.items():
                files.write_whole(output / file, content)
        written[chosen] = sorted(contents)
    return written, reasons


def draw_figures(
    pretrained: Pretrained,
    output: epath.Path,
    images: Source | None,
    names: Sequence[str],
    *,
    compare_to: str | None = None,
    progress: bool = True,
    **how: int,
) -> dict[str, Any]:
    """Measure a model over images and write the figures `names`; see `api.figures`.

    `how`: the other arguments of `measure`.
    """
    subject, plain = Subject(pretrained), [name.partition(".")[0] for name in names]
    if images is not None:
        subject.seen = measure(pretrained, images, progress=progress, **how)
        if compare_to is not None and "similarity" in plain:
            other, size = read_pretrained(compare_to), pretrained.spec.image_size
            if other.spec.image_size is None and size is not None:
                other = with_image_size(other, size)
            subject.other = measure(other, images, progress=progress, **how)
            subject.other_name = compare_to
    written, reasons = write_figures(subject, names, output)
    return {"figures": written, "left_out": reasons}


def _npz(arrays: Mapping[str, Any]) -> bytes:
    """The file of these arrays; a list gives NAME_1, NAME_2, ..."""
    content = io.BytesIO()
    named: dict[str, Any] = {}
    for name, x in arrays.items():
        is_list = isinstance(x, list)
        named |= {f"{name}_{i}": own for i, own in enumerate(x, 1)} if is_list else {name: x}
    np.savez_compressed(content, **named)
    return content.getvalue()
