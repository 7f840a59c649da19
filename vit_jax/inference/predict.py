"""Predictions of a pretrained model: classes or features, batch by batch over all devices.

Axes: B images, N tokens, D width, C classes.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

from vit_jax import transfer
from vit_jax.base import files, tree
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import LOSSES
from vit_jax.data import Source, eval_batches, image_batch, parse_ops, to_value_range
from vit_jax.data.images.given import open_images
from vit_jax.data.loading import why_masked
from vit_jax.data.native import PatchRule
from vit_jax.data.ops import HostOp
from vit_jax.data.words import check_labels, read_prompts
from vit_jax.devices.mesh import batch_sharding, check_batch_size, make_mesh
from vit_jax.evaluators.inputs import fetch
from vit_jax.inference import layers
from vit_jax.inference.labels import with_labels
from vit_jax.models.contract import about
from vit_jax.models.watched import as_map
from vit_jax.transfer.pretrained import Pretrained, class_names, loss_of, ops_for

_OF_CLASSES = ("probabilities", "logits")
_OF_LAYERS = ("features", "dense", "attention")
_BATCH_SIZE = 64


def predict(
    images: Any,
    source: "epath.PathLike | Pretrained | Predictor",
    *,
    output: str = "classes",
    layer: int | None = None,
    top: int = 5,
    image_size: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    labels: Sequence[str] | None = None,
    prompts: str | Sequence[str] | None = None,
) -> list[dict[str, Any]] | np.ndarray:
    """Classify images, or compute features of any layer.

        vit_jax.predict("cat.jpg", "runs/mine")[0]["classes"][0]["name"]
        model = vit_jax.read_pretrained("ViT-B/16@augreg")      # read once, use often
        x = vit_jax.predict([image, array], model, output="dense", layer=6)   # (2, 14, 14, 768)

    Args:
      images: one image or a list: paths of files and folders, Pillow images, and arrays of uint8
        pixels, (H, W), (H, W, C) or (N, H, W, C). Sizes may differ: images are resized and cropped
        as the model's evaluation does.
      source: a source of `load_pretrained`, or a model from `read_pretrained` or `load_predictor`.
      output: "classes": for each image {"file", "classes": [{"name", "index", "probability"}]};
        "probabilities" or "logits": (N, C); "features": (N, D), one vector per image; "dense":
        (N, rows, columns, D), one vector per patch; "attention": (N, H, T, T), the weights that
        each of T tokens (rows) gives to each token, prefix tokens first.
      layer: for the last three: the layer, counted from 0, negative from the end. None: the
        model's final output, or the last layer's attention. A layer's output is not yet
        normalised; its "features" are the class token if the model classifies that, else the mean
        of the patches.
      top: number of classes of "classes".
      image_size: another size than the model's own; positions are resampled.
      batch_size: images at once, over all devices; None: up to 64.
      labels: the classes in words, for a model with a text tower; two or more, such as "a cat".
      prompts: texts with {} for a label, or a file of such lines; None: PROMPTS of `data.words`.

    Returns:
      A list for "classes", else float32 arrays. An image that cannot be read has the key "error"
      instead of "classes", or NaN in an array, and is named in a warning.

    Raises:
      InputError: a ValueError; names the argument.
    """
    faults = Faults()
    faults.need_known("output", output, ("classes", *_OF_CLASSES, *_OF_LAYERS))
    faults.need(
        layer is None or output in _OF_LAYERS,
        f"layer={layer}: goes with output={' or '.join(_OF_LAYERS)}; leave it out",
    )
    faults.need_positive("top", top)
    collect_faults(faults)
    pretrained = _read(source, labels, prompts, image_size)
    found = open_images(images, pretrained.spec.reading)
    if batch_size is None:
        ways, needed = jax.device_count(), min(found.num_examples, _BATCH_SIZE)
        batch_size = -(-needed // ways) * ways
    how: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    if output == "classes":
        return list(classify(pretrained, found, top=top, **how))
    parts = outputs(pretrained, found, what=output, layer=layer, **how)
    return np.concatenate([without_masked(x, batch) for x, batch in parts])


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

    def __call__(self, images: Any, **how: Any) -> list[dict[str, Any]] | np.ndarray:
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
    pretrained = _read(source, labels, prompts)
    held = dict(pretrained.params), dict(pretrained.model_state)
    params, model_state = _on_all(make_mesh(), held)
    return Predictor(pretrained._replace(params=params, model_state=model_state))


def _on_all(mesh: Mesh, variables: tree.PyTree) -> tree.PyTree:
    """`variables` on every device; if they are there, `device_put` is left out: it takes time."""
    everywhere = NamedSharding(mesh, P())
    if all(getattr(x, "sharding", None) == everywhere for x in jax.tree.leaves(variables)):
        return variables
    return jax.device_put(variables, everywhere)


def outputs(
    pretrained: Pretrained, source: Source, *, what: str, layer: int | None = None, **how: Any
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The model's outputs for the records of `source`, in order.

    Args:
      pretrained: the model, with an image size in its spec.
      source: the images.
      what: "probabilities" or "logits" (C,); "features" (D,), the input of the head; "dense", the
        encoder's patch tokens (rows, columns, D); or "attention", the weights (H, N, N) of a layer.
      layer: with the last three, the layer, from 0; None: the model's own output, after its final
        norm, and the last layer's weights.
      how: `batch_size`, `progress` and `record_ids` of `computed`.

    Yields:
      (outputs, float32 (b, ...); {"mask", "label"}, each (b,)); the mask is 0 for a record that
      could not be read.

    Raises:
      InputError: if the model has no such layer, no classes, no attention, or no fixed image size.
    """
    check_size(pretrained)
    if what in _OF_CLASSES:
        check_classes(pretrained)
    spec, model = pretrained.spec, pretrained.model
    loss = loss_of(pretrained) if what == "probabilities" else None
    static = {"mean": spec.mean, "std": spec.std, "loss": loss, "what": what, "layer": layer}
    static |= {"model": model, "image_size": spec.image_size}
    try:
        hash(model)
        compute = functools.partial(_jitted, **static)
    except TypeError:  # a plug-in's model may have a list among its fields
        compute = jax.jit(functools.partial(_compute, **static))
    most, rule = about(model).max_tokens, None
    if most and layer is None and what in (*_OF_CLASSES, "features"):  # other outputs need a square
        rule = PatchRule(about(model).token_stride, most)
    for found, batch in computed(pretrained, source, compute, rule=rule, **how):
        kept = len(batch["mask"])
        yield np.asarray(found[:kept], np.float32), batch


def computed(
    pretrained: Pretrained,
    source: Source,
    compute: Callable[[tree.Params, tree.ModelState, jax.Array], tree.PyTree],
    *,
    batch_size: int,
    progress: bool = True,
    record_ids: np.ndarray | None = None,
    keys: Sequence[str] = ("mask", "label"),
    rule: PatchRule | None = None,
) -> Iterator[tuple[tree.PyTree, dict[str, np.ndarray]]]:
    """The results of `compute`, a jitted function, for batches of the records of `source`.

    Args:
      compute: gets the variables and uint8 images (B, H, W, C), prepared as the model's own.
      batch_size: over all devices, a multiple of their number.
      progress: whether to show a progress bar.
      record_ids: int64 (n,), the records; None: all.
      keys: those of the batch to yield.
      rule: cuts pictures in their own shape into patches; None: images have the model's size.

    Yields:
      (results of the whole batch; the batch's `keys` without the padding, each (b, ...)).
    """
    spec, variables = pretrained.spec, pretrained.variables
    mesh = make_mesh()
    check_batch_size(mesh, batch_size, "batch_size")
    params, model_state = variables["params"], {k: variables[k] for k in variables if k != "params"}
    params, model_state = _on_all(mesh, (params, model_state))
    made = spec.image_size, _host_ops(pretrained, source, rule), "evals.*.ops", rule
    batches = eval_batches(
        source,
        image_batch(batch_size, *made),
        sharding=batch_sharding(mesh),
        record_ids=record_ids,
    )
    left = source.num_examples if record_ids is None else len(record_ids)
    console = Console(stderr=True)
    if progress and console.is_terminal:  # in a file, a bar is only noise
        batches = track(batches, "images", total=-(-left // batch_size), console=console)
    results = (
        (compute(params, model_state, batch["image"]), {k: batch[k] for k in keys})
        for batch in batches
    )
    for found, batch in fetch(results):
        kept = min(left, batch_size)
        left -= kept
        yield found, {k: v[:kept] for k, v in batch.items()}


def _compute(
    params: tree.Params,
    model_state: tree.ModelState,
    images: jax.Array,
    *,
    model: nn.Module,
    image_size: tuple[int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    loss: str | None,
    what: str,
    layer: int | None,
) -> jax.Array:
    """The `outputs` for uint8 images (B, H, W, C)."""
    images = to_value_range(images, mean, std)
    variables = {"params": params, **model_state}
    if what == "attention":
        return layers.choose(layers.attention_weights(model, params, images, model_state), layer)
    if what in _OF_LAYERS and layer is not None:
        x = layers.choose(layers.layer_outputs(model, params, images, model_state), layer)
        return layers.pool(model, x) if what == "features" else as_map(model, x, image_size)
    if what == "features":
        return model.apply(variables, images, method="features")
    if what == "dense":
        return as_map(model, model.apply(variables, images, method="tokens"), image_size)
    logits_BC = model.apply(variables, images)
    return logits_BC if loss is None else LOSSES.find(loss)().probabilities(logits_BC)


_jitted = jax.jit(  # kept for more calls with an equal model
    _compute, static_argnames=("model", "image_size", "mean", "std", "loss", "what", "layer")
)


def _host_ops(pretrained: Pretrained, source: Source, rule: Any = None) -> tuple[HostOp, ...]:
    spec, shape = pretrained.spec, source.image_shape
    ops = spec.ops or "decode" if rule else ops_for(spec, shape and shape[:2])
    return parse_ops(ops, spec.image_size, key="preprocessing")[0]


def why_unread(pretrained: Pretrained, source: Source, record: int) -> str:
    """Why the mask of a record is 0."""
    return why_masked(source, [_host_ops(pretrained, source)], record)[1]


def without_masked(x: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """`x` (b, ...) with NaN for the records that could not be read."""
    return np.where(batch["mask"] > 0, x.T, np.nan).T


def check_size(pretrained: Pretrained) -> None:
    """Raise InputError if the model takes images of any size, so that one must be chosen."""
    if pretrained.spec.image_size is None:
        raise InputError(
            f"image_size=None: {pretrained.source} takes images of any size; choose one"
        )


def check_classes(pretrained: Pretrained) -> None:
    """Raise InputError if the model has no classes, or has never learned them."""
    head = pretrained.params.get("head/kernel")
    untrained = head is not None and not np.any(head)
    if pretrained.model.num_classes is None or untrained:
        why = "its head was never trained" if untrained else "the model has no classes"
        words = " --labels='a cat,a dog' names some in words (in Python: labels=[...]),"
        raise InputError(
            f"{pretrained.source}: {why};{words * (pretrained.read_text_side is not None)} predict "
            "--features=FILE.npz saves its features (in Python: output='features'), and "
            "--config=finetune:folder gives it classes"
        )


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
    names = class_names(pretrained.spec, pretrained.model.num_classes)
    found_by_batch = outputs(
        pretrained, source, batch_size=batch_size, what="probabilities", progress=progress
    )
    rows = (row for x, batch in found_by_batch for row in zip(x, batch["mask"], strict=True))
    for record, (probabilities, mask) in enumerate(rows):
        row: dict[str, Any] = {"file": source.record_name(record)}
        if mask == 0:
            yield row | {"error": why_unread(pretrained, source, record)}
            continue
        best = np.argsort(-probabilities, kind="stable")
        best = best[(probabilities >= thresholds)[best]][:top]
        classes = [
            {"name": names[i], "index": int(i), "probability": float(probabilities[i])}
            for i in best
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


def check_output(output: os.PathLike | str, flag: str, suffix: str) -> epath.Path:
    """The absolute path of a file with that suffix, if it can be written.

    Raises:
      InputError: names `flag`.
    """
    output = files.absolute(output)
    if output.suffix != suffix:
        raise InputError(f"{flag}={output}: the name must end in {suffix}")
    files.check_output(output, flag)
    return output


def write_features(
    pretrained: Pretrained, source: Source, output: epath.Path, *, batch_size: int, what: str
) -> dict[str, Any]:
    """Write FILE.npz with the features of every record of `source`; return a summary of it.

    The file holds `features`, float32 (n, D), or (n, rows, columns, D) for `what="dense"`;
    `valid` (n,), False for images that could not be read, whose features are NaN; `record` (n,),
    the names of the records; and for data sets `label` (n,). Features are written batch by batch.

    `output` comes from `check_output`.
    """
    count = source.num_examples
    found = outputs(pretrained, source, batch_size=batch_size, what=what)
    first = next(found)
    shape = (count, *first[0].shape[1:])
    valid, labels = [], []
    with files.replaced(output) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        with archive.open("features.npy", "w", force_zip64=True) as entry:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(entry, header)
            for features, batch in itertools.chain([first], found):
                features = without_masked(features, batch)
                entry.write(np.ascontiguousarray(features, "<f4").tobytes())
                valid.append(batch["mask"] > 0)
                labels.append(batch["label"])
        records = np.array([source.record_name(i) for i in range(count)])
        rest = {"valid": np.concatenate(valid), "record": records}
        if source.name != "files":
            rest["label"] = np.concatenate(labels)
        for name, array in rest.items():
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return {
        "features": os.fspath(output),
        "shape": list(shape),
        "unreadable": int(count - rest["valid"].sum()),
    }
