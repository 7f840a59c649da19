"""Predictions of a pretrained model: classes, captions or features.

Axes: B images, N tokens, D width, C classes.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import transfer
from vit_jax.base import files
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.data import Source
from vit_jax.data.images.given import open_images
from vit_jax.data.words import check_labels, read_prompts
from vit_jax.devices.mesh import make_mesh
from vit_jax.inference.captions import write_captions
from vit_jax.inference.labels import with_labels
from vit_jax.inference.outputs import (
    OF_CLASSES,
    OF_LAYERS,
    check_classes,
    in_own_shape,
    on_all,
    outputs,
    why_unread,
    without_masked,
)
from vit_jax.inference.parts import facts_of_model
from vit_jax.models.zero_shot import TextSide, need_text_side
from vit_jax.transfer.pretrained import Pretrained, class_names

_BATCH_SIZE = 64


def predict(
    images: Any,
    source: "epath.PathLike | Pretrained | Predictor",
    *,
    output: str = "classes",
    layer: int | None = None,
    top: int | None = None,
    beams: int = 1,
    image_size: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    labels: Sequence[str] | None = None,
    prompts: str | Sequence[str] | None = None,
) -> list[Any] | np.ndarray:
    """Classify images, write captions, or compute features of any layer.

        vit_jax.predict("cat.jpg", "runs/mine")[0]["classes"][0]["name"]
        model = vit_jax.read_pretrained("ViT-B/16@augreg")      # read once, use often
        x = vit_jax.predict([image, array], model, output="dense", layer=6)   # (2, 14, 14, 768)

    Args:
      images: one image or a list: paths of files and folders, Pillow images, and arrays of uint8
        pixels, (H, W), (H, W, C) or (N, H, W, C). Sizes may differ: images are resized and cropped
        as the model's evaluation does.
      source: a source of `load_pretrained`, or a model from `read_pretrained` or `load_predictor`.
      output: "classes": for each image {"file", "classes": [{"name", "index", "probability"}]};
        "captions": {"file", "captions": [{"caption", "log_probability"}]}, by a run that learned to
        write them; "probabilities" or "logits": (N, C); "features": (N, D), one vector per image;
        "dense": (N, rows, columns, D), one vector per patch; "attention": (N, H, T, T), the weights
        that each of T tokens (rows) gives to each token, prefix tokens first. Pictures in their own
        shape differ in rows, columns and T: the last two are lists of N arrays.
      layer: for the last three: the layer, counted from 0, negative from the end. None: the
        model's final output, or the last layer's attention. A layer's output is not yet
        normalised; its "features" are the class token if the model classifies that, else the mean
        of the patches.
      top: number of classes, None: 5; or of captions, None: 1.
      beams: of the search for captions, which is greedy with 1.
      image_size: another size than the model's own; positions are resampled.
      batch_size: images at once, over all devices; None: up to 64.
      labels: the classes in words, for a model with a text tower; two or more, such as "a cat".
      prompts: texts with {} for a label, or a file of such lines; None: PROMPTS of `data.words`.

    Returns:
      A list for "classes" and "captions", else float32 arrays. An image that cannot be read has the
      key "error" in a list, or NaN in an array, and is named in a warning.

    Raises:
      InputError: a ValueError; names the argument.
    """
    faults = Faults()
    faults.need_known("output", output, ("classes", "captions", *OF_CLASSES, *OF_LAYERS))
    faults.need(
        layer is None or output in OF_LAYERS,
        f"layer={layer}: goes with output={' or '.join(OF_LAYERS)}; leave it out",
    )
    faults.need_positive("top", 1 if top is None else top)
    faults.need_positive("beams", beams)
    collect_faults(faults)
    pretrained = _read(source, labels, prompts, image_size)
    found = open_images(images, pretrained.spec.reading)
    if batch_size is None:
        ways, needed = jax.device_count(), min(found.num_examples, _BATCH_SIZE)
        batch_size = -(-needed // ways) * ways
    how: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    if output == "classes":
        return list(classify(pretrained, found, top=top or 5, **how))
    if output == "captions":
        return list(write_captions(pretrained, found, beams=beams, top=top or 1, **how))
    parts = outputs(pretrained, found, what=output, layer=layer, **how)
    batches = [(without_masked(x, batch), batch) for x, batch in parts]
    if "grid" not in batches[0][1]:
        return np.concatenate([x for x, _ in batches])
    pairs = (pair for x, batch in batches for pair in zip(x, batch["grid"], strict=True))
    return [in_own_shape(*pair, pretrained.model.num_prefix_tokens) for pair in pairs]


def _read(
    source: "epath.PathLike | Pretrained | Predictor",
    labels: Sequence[str] | None,
    prompts: str | Sequence[str] | None,
    image_size: int | Sequence[int] | None = None,
) -> Pretrained:
    """The model of the arguments of `predict`."""
    if labels is None and prompts is not None:
        raise InputError("prompts: needs labels, such as labels=['a cat', 'a dog']")
    words = None if labels is None else (check_labels(labels), read_prompts(prompts))
    of_source = source.pretrained if isinstance(source, Predictor) else source
    pretrained = transfer.read_pretrained(of_source)
    if image_size is not None:
        pretrained = transfer.with_image_size(pretrained, image_size)
    return pretrained if words is None else with_labels(pretrained, *words)


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model whose weights stay on the devices: `predict` without its `source`, for many calls."""

    pretrained: Pretrained

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """`facts_of_model` of files; its digest of all weights takes longer than a question."""
        return facts_of_model(self.pretrained)

    def __call__(self, images: Any, **how: Any) -> list[Any] | np.ndarray:
        """predict(images, this model, **how)."""
        return predict(images, self.pretrained, **how)


def load_predictor(
    source: epath.PathLike | Pretrained,
    labels: Sequence[str] | None = None,
    prompts: str | Sequence[str] | None = None,
) -> Predictor:
    """Read a model and keep its weights on all devices.

        predictor = vit_jax.load_predictor("runs/mine")
        name = predictor("cat.jpg")[0]["classes"][0]["name"]

    Args:
      source, labels, prompts: as in `predict`.

    Raises:
      InputError: the source cannot be read, or names the argument.
    """
    pretrained, mesh = _read(source, labels, prompts), make_mesh()
    held = dict(pretrained.params), dict(pretrained.model_state)
    params, model_state = on_all(mesh, held)
    read = pretrained.read_text_side

    @functools.cache
    def read_texts() -> TextSide:
        side = need_text_side(read, pretrained.source)
        return side._replace(params=on_all(mesh, dict(side.params)))

    on_devices = pretrained._replace(params=params, model_state=model_state)
    return Predictor(on_devices._replace(read_text_side=read and read_texts))


def classify(
    pretrained: Pretrained,
    source: Source,
    *,
    batch_size: int,
    top: int | None,
    thresholds: np.ndarray | float = 0.0,
    progress: bool = True,
) -> Iterator[dict[str, Any]]:
    """Classify images: {"file": ..., "classes": [{"name", "index", "probability"}, ...]} for each.

    `classes` holds the `top` most probable classes (None: all) in descending order, without those
    below `thresholds`, a probability for all or float (C,). An image that cannot be read, or is
    smaller than a crop, yields {"file": ..., "error": ...}.

    Raises:
      InputError: if the model has no classes, or has never learned them.
    """
    found_by_batch = outputs(
        pretrained, source, batch_size=batch_size, what="probabilities", progress=progress
    )
    records = itertools.count()
    for x, batch in found_by_batch:
        named = name_rows(pretrained, source, records, batch["mask"])
        yield from classified(pretrained, named, x, top, thresholds)


def name_rows(
    pretrained: Pretrained, source: Source, records: Iterable[int], mask_B: np.ndarray
) -> Iterator[dict[str, Any]]:
    """{"file": ...} of each record, with the key "error" if it could not be read."""
    for mask, record in zip(mask_B, records, strict=False):  # which may be endless
        row = {"file": source.record_name(record)}
        yield row if mask else row | {"error": why_unread(pretrained, source, record)}


def classified(
    pretrained: Pretrained,
    rows: Iterable[dict[str, Any]],
    probabilities_BC: np.ndarray,
    top: int | None,
    thresholds: np.ndarray | float = 0.0,
) -> Iterator[dict[str, Any]]:
    """The rows of `name_rows` with their classes, see `classify`."""
    names = class_names(pretrained.spec, pretrained.model.num_classes)
    known_BC = np.where(probabilities_BC >= thresholds, probabilities_BC, -1)
    last = -min(top or len(names), len(names))
    of_last_B = np.partition(known_BC, last)[:, last]
    for row, known, of_last in zip(rows, known_BC, of_last_B, strict=True):
        if "error" in row:
            yield row
            continue
        best = np.flatnonzero(known >= max(of_last, 0))  # to sort no more than these
        best = best[np.argsort(-known[best], kind="stable")][:top]
        classes = [
            {"name": names[i], "index": int(i), "probability": float(known[i])} for i in best
        ]
        yield row | {"classes": classes}


def read_thresholds(given: str, pretrained: Pretrained) -> np.ndarray | float:
    """The number `given`, or float (C,) from the classes.csv of that name.

    A class without images has no threshold in that file; it gets 1/2.

    Raises:
      InputError: it is neither, or lacks a class of the model.
    """
    check_classes(pretrained)
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(given)) <= 1:
            return number
    try:
        text = files.absolute(given).read_text().removeprefix("\ufeff")  # as spreadsheets save it
    except OSError as e:
        needs = "needs a probability from 0 to 1, or a file"
        raise InputError(f"--thresholds={given}: {e.strerror}; {needs}") from None
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    names = class_names(pretrained.spec, pretrained.model.num_classes)
    found = {row.get("class"): row.get("threshold") for row in rows}
    lacking = [name for name in names if found.get(name) is None]
    if lacking:
        raise InputError(
            f"--thresholds={given}: has no threshold of {lacking[0]!r}; needs the classes.csv that "
            "`evaluate --output` wrote for a multilabel evaluator of validation data"
        )
    return np.array([float(found[name] or 0.5) for name in names])
