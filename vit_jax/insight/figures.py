"""The figures of a model: images, each with its numbers in a file of the same name.

A model that lacks what a figure shows is told so by a text instead of the figure's files.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Mapping

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax import files
from vit_jax.evaluators.features import principal_components
from vit_jax.inference import layers
from vit_jax.insight import parameters, plots
from vit_jax.insight.attention_maps import name_of_shares, patch_distances
from vit_jax.insight.measured import MIN_IMAGES, Measured, alignment, norm_table, with_size
from vit_jax.insight.tables import as_csv
from vit_jax.transfer.pretrained import Pretrained

OUTLIER_FACTOR = 3  # times the median norm of the layer's patches

Files = dict[str, bytes]


@dataclasses.dataclass
class Subject:
    """What figures are made of.

    name, other_name: of the models, in labels.
    seen: measurements over images; None: none were given. other: those of a second model.
    """

    pretrained: Pretrained
    name: str = "model"
    seen: Measured | None = None
    other: Measured | None = None
    other_name: str = ""

    @functools.cached_property
    def model(self) -> nn.Module:
        return with_size(self.pretrained)

    @property
    def measured(self) -> Measured:
        assert self.seen is not None  # figures that need images are not asked for without them
        return self.seen


def _filters(subject: Subject) -> Files | str:
    found = parameters.filters_of(subject.pretrained)
    if isinstance(found, str):
        return found
    rows = found.reshape(len(found), -1)
    components, shares = principal_components(rows, parameters.MAX_COMPONENTS)
    if not len(components):
        return "all its filters are the same"
    components = components.reshape(-1, *found.shape[1:])
    figure = plots.draw_filters(components, shares, len(found))
    return {
        "filters.png": plots.as_png(figure),
        "filters.npz": _npz(components=components, share_of_variance=shares, filters=found),
    }


def _positions(subject: Subject) -> Files | str:
    found = parameters.positions_of(subject.pretrained)
    if isinstance(found, str):
        return found
    similarity = {name: parameters.cosine_similarity(x) for name, x in found.items()}
    name, first = next(iter(similarity.items()))
    title = "" if name == "stem" else f"positions of {name} of {len(found)}"
    figure = plots.draw_positions(first, subject.model.grid, title)
    arrays = {name.replace(" ", "_"): x for name, x in similarity.items()}
    return {
        "positions.png": plots.as_png(figure),
        "positions.npz": _npz(grid=np.array(subject.model.grid), **arrays),
    }


def _distance(subject: Subject) -> Files:
    seen, model = subject.measured, subject.model
    uniform = float(patch_distances(model.grid, model.token_stride).mean())
    height, width = model.image_size
    unit = f"attention distance (px of {width} x {height})"
    label = "uniform attention"
    figure, columns = _by_head(seen.distances, "distance_px", uniform, label, unit)
    columns["prefix_share"] = seen.shares.mean(axis=0)
    return {"distance.png": plots.as_png(figure), "distance.csv": _csv_by_head(columns)}


def _entropy(subject: Subject) -> Files:
    rows, columns = subject.model.grid
    num_tokens = subject.model.num_prefix_tokens + rows * columns
    label, unit = f"uniform over {num_tokens:,} tokens", "entropy of attention (bits)"
    values = subject.measured.entropies
    figure, table = _by_head(values, "entropy_bits", float(np.log2(num_tokens)), label, unit)
    return {"entropy.png": plots.as_png(figure), "entropy.csv": _csv_by_head(table)}


def _by_head(values_ILH: np.ndarray, name: str, uniform: float, label: str, unit: str):
    """The figure and the columns (L, H) of values by layer and head: mean and deviation."""
    mean = values_ILH.mean(axis=0)
    spread = values_ILH.std(axis=0, ddof=min(1, len(values_ILH) - 1))  # 0 for a single image
    figure = plots.draw_heads_by_layer(mean, spread, uniform, label, unit)
    return figure, {name: mean, f"deviation_{name.rpartition('_')[2]}": spread}


def _csv_by_head(columns: Mapping[str, np.ndarray]) -> bytes:
    """A CSV file with a row for each layer and head, of columns (L, H)."""
    places = np.ndindex(*next(iter(columns.values())).shape)
    rows = ((*place, *(x[place] for x in columns.values())) for place in places)
    return as_csv([("layer", "head", *columns), *rows])


def _rollout(subject: Subject) -> Files:
    seen = subject.measured
    figure = plots.draw_rollouts(seen.images, seen.rollouts, name_of_shares(subject.model))
    return {"rollout.png": plots.as_png(figure), "rollout.npz": _maps(seen, rollout=seen.rollouts)}


def _heads(subject: Subject) -> Files:
    seen, where = subject.measured, name_of_shares(subject.model)
    found = {
        f"heads_{i}.png": plots.as_png(plots.draw_heads(image, of_heads, where))
        for i, (image, of_heads) in enumerate(zip(seen.images, seen.heads, strict=True), start=1)
    }
    return found | {"heads.npz": _maps(seen, attention=seen.heads)}


def _features(subject: Subject) -> Files | str:
    seen = subject.measured
    rows = seen.features.reshape(-1, seen.features.shape[-1])
    components, shares = principal_components(rows, 3)
    if len(components) < 3:
        return f"its {len(rows)} patches span fewer than three directions; give more images"
    projected = (rows - rows.mean(axis=0, keepdims=True)) @ components.T
    projected = projected.reshape(*seen.features.shape[:3], 3)
    return {
        "features.png": plots.as_png(plots.draw_features(seen.images, projected)),
        "features.npz": _maps(seen, components=projected, share_of_variance=shares),
    }


def _norms(subject: Subject) -> Files:
    table = norm_table(subject.measured.norms, subject.model.num_prefix_tokens, OUTLIER_FACTOR)
    rows = enumerate(zip(*table.values(), strict=True))
    return {
        "norms.png": plots.as_png(plots.draw_norms(table, OUTLIER_FACTOR)),
        "norms.csv": as_csv([("layer", *table), *((i, *row) for i, row in rows)]),
    }


def _similarity(subject: Subject) -> Files | str:
    others = subject.other or subject.measured
    found = alignment(subject.measured.grams, others.grams)
    if found is None:
        return f"needs {MIN_IMAGES} readable images in a batch; give more"
    names = ("layer", "layer")
    if subject.other is not None:
        names = (f"layer of {subject.name}", f"layer of {subject.other_name}")
    rows = ((*place, value) for place, value in np.ndenumerate(found))
    return {
        "similarity.png": plots.as_png(plots.draw_similarity(found, names)),
        "similarity.csv": as_csv([("layer", "other_layer", "cka"), *rows]),
    }


FIGURES: dict[str, Callable[[Subject], Files | str]] = {
    "filters": _filters,
    "positions": _positions,
    "distance": _distance,
    "rollout": _rollout,
    "heads": _heads,
    "features": _features,
    "entropy": _entropy,
    "norms": _norms,
    "similarity": _similarity,
}
_OF_PARAMETERS = ("filters", "positions")
_OF_ATTENTION = ("distance", "rollout", "heads", "entropy")


def needs_images(names: Iterable[str]) -> bool:
    """Whether any of the figures `names` shows what a model does with images."""
    return any(name not in _OF_PARAMETERS for name in names)


def write_figures(
    subject: Subject, names: Iterable[str], output: epath.Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Write the figures `names` into the folder `output`.

    Returns:
      ({figure: names of its files}, {figure left out: reason}).
    """
    no_attention = layers.no_attention(subject.pretrained.model)
    written, reasons = {}, {}
    for name in names:
        if name in _OF_ATTENTION and no_attention:
            reasons[name] = no_attention
            continue
        if needs_images([name]) and subject.seen is None:
            reasons[name] = "needs images; give files, folders or --data=NAME:SPLIT"
            continue
        with plots.paper_style():
            made = FIGURES[name](subject)
        if isinstance(made, str):
            reasons[name] = made
            continue
        output.mkdir(parents=True, exist_ok=True)
        for file, content in made.items():
            files.write_whole(output / file, content)
        written[name] = sorted(made)
    return written, reasons


def _maps(seen: Measured, **arrays: np.ndarray) -> bytes:
    """Arrays as .npz, with the images that they belong to and their names."""
    return _npz(**arrays, image=seen.images, name=np.array(seen.names[: len(seen.images)]))


def _npz(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()
