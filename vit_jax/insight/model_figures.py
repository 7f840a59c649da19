"""The figures of a model: pictures, each with its numbers in a file of the same name.

A model that lacks what a figure shows is told so by a text instead of the figure's files.
"""

import csv
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax import files
from vit_jax.data import Source
from vit_jax.errors import InputError
from vit_jax.evaluators.features import principal_components
from vit_jax.insight import draw, parameters
from vit_jax.insight.attention_maps import name_of_shares, patch_distances
from vit_jax.insight.measured import Measured, align, measure, norm_table, with_size
from vit_jax.insight.similarity import MIN_IMAGES
from vit_jax.models.contract import about
from vit_jax.transfer.pretrained import Pretrained

OUTLIER_FACTOR = 3  # times the median norm of the layer's patches

Files = dict[str, bytes]


@dataclasses.dataclass
class Subject:
    """What figures are made of.

    name, other_name: of the models, in labels.
    seen: measurements over pictures; None: none were given. other: those of a second model.
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
        assert self.seen is not None  # figures that need pictures are not asked for without them
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
    figure = draw.draw_filters(components, shares, len(found))
    return {
        "filters.png": draw.as_png(figure),
        "filters.npz": _npz(components=components, share_of_variance=shares, filters=found),
    }


def _positions(subject: Subject) -> Files | str:
    found = parameters.positions_of(subject.pretrained)
    if isinstance(found, str):
        return found
    similarity = {name: parameters.cosine_similarity(x) for name, x in found.items()}
    name, first = next(iter(similarity.items()))
    title = "" if name == "stem" else f"positions of {name} of {len(found)}"
    figure = draw.draw_positions(first, subject.model.grid, title)
    arrays = {name.replace(" ", "_"): x for name, x in similarity.items()}
    return {
        "positions.png": draw.as_png(figure),
        "positions.npz": _npz(grid=np.array(subject.model.grid), **arrays),
    }


def _distance(subject: Subject) -> Files | str:
    values, shares = subject.measured.distances, subject.measured.shares
    distances = patch_distances(subject.model.grid, subject.model.token_stride)
    mean, spread = _mean_and_spread(values)
    size = subject.model.image_size
    figure = draw.draw_distances(mean, spread, float(distances.mean()), size)
    columns = {"distance_px": mean, "deviation_px": spread, "prefix_share": shares.mean(axis=0)}
    return {"distance.png": draw.as_png(figure), "distance.csv": _by_head(columns)}


def _entropy(subject: Subject) -> Files | str:
    mean, spread = _mean_and_spread(subject.measured.entropies)
    grid = subject.model.grid
    num_tokens = subject.model.num_prefix_tokens + grid[0] * grid[1]
    figure = draw.draw_entropies(mean, spread, num_tokens)
    columns = {"entropy_bits": mean, "deviation_bits": spread}
    return {"entropy.png": draw.as_png(figure), "entropy.csv": _by_head(columns)}


def _rollout(subject: Subject) -> Files | str:
    seen, where = subject.measured, name_of_shares(subject.model)
    figure = draw.draw_rollouts(seen.pictures, seen.rollouts, where)
    numbers = _npz(rollout=seen.rollouts, picture=seen.pictures, name=_shown_names(seen))
    return {"rollout.png": draw.as_png(figure), "rollout.npz": numbers}


def _heads(subject: Subject) -> Files | str:
    seen, where = subject.measured, name_of_shares(subject.model)
    found: Files = {}
    for i, (picture, of_heads) in enumerate(zip(seen.pictures, seen.heads, strict=True)):
        figure = draw.draw_heads(picture, of_heads, where)
        found[f"heads_{i + 1}.png"] = draw.as_png(figure)
    numbers = _npz(attention=seen.heads, picture=seen.pictures, name=_shown_names(seen))
    return found | {"heads.npz": numbers}


def _features(subject: Subject) -> Files | str:
    seen = subject.measured
    rows = seen.features.reshape(-1, seen.features.shape[-1])
    components, shares = principal_components(rows, 3)
    if len(components) < 3:
        return f"its {len(rows)} patches span fewer than three directions; give more pictures"
    projected = (rows - rows.mean(axis=0, keepdims=True)) @ components.T
    projected = projected.reshape(*seen.features.shape[:3], 3)
    figure = draw.draw_features(seen.pictures, projected)
    numbers = _npz(components=projected, share_of_variance=shares, picture=seen.pictures,
                   name=_shown_names(seen))  # fmt: skip
    return {"features.png": draw.as_png(figure), "features.npz": numbers}


def _norms(subject: Subject) -> Files | str:
    num_prefix = subject.model.num_prefix_tokens
    table = norm_table(subject.measured.norms, num_prefix, OUTLIER_FACTOR)
    rows = zip(range(len(table["median"])), *table.values(), strict=True)
    return {
        "norms.png": draw.as_png(draw.draw_norms(table, OUTLIER_FACTOR)),
        "norms.csv": _csv(("layer", *table), rows),
    }


def _similarity(subject: Subject) -> Files | str:
    found = align(subject.measured, subject.other)
    if found is None:
        return f"needs {MIN_IMAGES} readable pictures in a batch; give more"
    names = ("layer", "layer")
    if subject.other is not None:
        names = (f"layer of {subject.name}", f"layer of {subject.other_name}")
    rows = ((i, j, value) for (i, j), value in np.ndenumerate(found))
    return {
        "similarity.png": draw.as_png(draw.draw_similarity(found, names)),
        "similarity.csv": _csv(("layer", "other_layer", "cka"), rows),
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


def needs_pictures(names: Iterable[str]) -> bool:
    """Whether any of the figures `names` shows what a model does with pictures."""
    return any(name not in _OF_PARAMETERS for name in names)


def left_out(model: nn.Module, names: Iterable[str], has_pictures: bool) -> dict[str, str]:
    """{figure: reason} for those of `names` that need attention, or pictures, that are not there.

    `write_figures` finds the others.
    """
    no_attention = about(model).why_no_weights
    reasons = {}
    for name in names:
        if name in _OF_ATTENTION and no_attention:
            reasons[name] = no_attention
        elif name not in _OF_PARAMETERS and not has_pictures:
            reasons[name] = "needs pictures; give files, folders or --data=NAME:SPLIT"
    return reasons


def write_figures(
    subject: Subject, names: Iterable[str], output: epath.Path
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Write the figures `names` into the folder `output`.

    Returns:
      ({figure: names of its files}, {figure left out: reason}).
    """
    written, reasons = {}, {}
    for name in names:
        made = FIGURES[name](subject)
        if isinstance(made, str):
            reasons[name] = made
            continue
        output.mkdir(parents=True, exist_ok=True)
        for file, content in made.items():
            files.write_whole(output / file, content)
        written[name] = sorted(made)
    return written, reasons


def measure_chosen(
    pretrained: Pretrained, source: Source, *, examples: int, **how: Any
) -> Measured:
    """`measure` for at most `examples` images of `source`, evenly spaced.

    Raises:
      InputError: if no image can be read.
    """
    count = min(examples, source.num_examples)
    record_ids = np.arange(count, dtype=np.int64) * source.num_examples // count
    found = measure(pretrained, source, record_ids=record_ids, **how)
    if not len(found.pictures):
        raise InputError("none of the first pictures could be read; give others")
    return found


def _mean_and_spread(values_ILH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample standard deviation over the images; the latter is 0 for a single one."""
    spread = values_ILH.std(axis=0, ddof=min(1, len(values_ILH) - 1))
    return values_ILH.mean(axis=0), spread


def _by_head(columns: Mapping[str, np.ndarray]) -> bytes:
    """A CSV file with a row for each layer and head, of columns (L, H)."""
    shape = next(iter(columns.values())).shape
    rows = ((i, j, *(x[i, j] for x in columns.values())) for i, j in np.ndindex(*shape))
    return _csv(("layer", "head", *columns), rows)


def _csv(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(x if isinstance(x, int) else f"{float(x):.6g}" for x in row)
    return text.getvalue().encode()


def _npz(**arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def _shown_names(seen: Measured) -> np.ndarray:
    return np.array(seen.names[: len(seen.pictures)])
