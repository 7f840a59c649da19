"""Outputs of a pretrained model for images, batch by batch over all devices.

Axes: B images, N tokens, D width, C classes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, counts_of
from vit_jax.config import LOSSES
from vit_jax.data import Source, eval_batches, image_batch, parse_ops, to_value_range
from vit_jax.data.loading import why_masked
from vit_jax.devices.mesh import batch_sharding, check_batch_size, make_mesh
from vit_jax.evaluators.inputs import fetch
from vit_jax.inference import layers
from vit_jax.models.watched import as_map
from vit_jax.transfer.pretrained import Pretrained, loss_of, preparation

OF_CLASSES = ("probabilities", "logits")
OF_LAYERS = ("features", "dense", "attention")


def outputs(
    pretrained: Pretrained, source: Source, *, what: str, layer: int | None = None, **how: Any
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The model's outputs for the records of `source`, in order.

    Args:
      pretrained: the model, with an image size in its spec.
      source: the images.
      what: "probabilities" or "logits" (C,); "features" (D,), the input of the head; "dense", the
        encoder's patch tokens (rows, columns, D), of pictures in their own shape (S, D); or
        "attention", the weights (H, N, N) of a layer; see `in_own_shape`.
      layer: with the last three, the layer, from 0; None: the model's own output, after its final
        norm, and the last layer's weights.
      how: `batch_size`, `progress` and `record_ids` of `computed`.

    Yields:
      (outputs, float32 (b, ...); {"mask", "label"}, each (b,)); the mask is 0 for a record that
      could not be read. Patches of pictures come with "grid" (b, 2), their rows and columns, which
      are 0 for such a record.

    Raises:
      InputError: if the model has no such layer, no classes, no attention, or no fixed image size.
    """
    check_size(pretrained)
    if what in OF_CLASSES:
        check_classes(pretrained)
    spec, model = pretrained.spec, pretrained.model
    loss = loss_of(pretrained) if what == "probabilities" else None
    static: dict[str, Any] = {
        "model": model, "image_size": spec.need_size(), "mean": spec.mean, "std": spec.std,
        "loss": loss, "what": what, "layer": layer,
    }  # fmt: skip
    compute: Callable[..., jax.Array]
    try:
        hash(model)
        compute = functools.partial(_jitted, **static)
    except TypeError:  # a plug-in's model may have a list among its fields
        compute = jax.jit(functools.partial(_compute, **static))
    keys = ("mask", "label", *["grid"] * (spec.rule is not None and what in ("dense", "attention")))
    for found, batch in computed(pretrained, source, compute, keys=keys, **how):
        kept = len(batch["mask"])
        if "grid" in batch:  # of a record that could not be read it has one patch
            batch["grid"] = np.where(batch["mask"][:, None] > 0, batch["grid"], 0)
        yield np.asarray(found[:kept], np.float32), batch


def computed(
    pretrained: Pretrained,
    source: Source,
    compute: Callable[..., tree.PyTree],
    *,
    batch_size: int,
    progress: bool = True,
    record_ids: np.ndarray | None = None,
    keys: Sequence[str] = ("mask", "label"),
) -> Iterator[tuple[tree.PyTree, dict[str, np.ndarray]]]:
    """The results of `compute`, a jitted function, for batches of the records of `source`.

    The last batch is padded.

    Args:
      compute: gets the variables and uint8 images (B, H, W, C), or pictures in their own shape,
        prepared as the model's own.
      batch_size: over all devices of this process, a multiple of their number.
      progress: whether to show a progress bar.
      record_ids: int64 (n,), the records; None: all.
      keys: of the batch, to yield; "grid": the rows and columns of each picture's patches, (B, 2).

    Yields:
      (results of the whole batch; the batch's `keys` without the padding, each (b, ...)).
    """
    spec, variables, size = pretrained.spec, pretrained.variables, pretrained.spec.need_size()
    own = [device for device in jax.devices() if device.process_index == jax.process_index()]
    mesh = make_mesh(devices=own)
    check_batch_size(mesh, batch_size, "batch_size")
    params, model_state = variables["params"], {k: variables[k] for k in variables if k != "params"}
    params, model_state = on_all(mesh, (params, model_state))
    ops, rule = preparation(spec, source.image_shape)
    host_ops, _ = parse_ops(ops, size, key="preprocessing")
    batches: Iterable[Any] = eval_batches(
        source,
        image_batch(batch_size, size, host_ops, "evals.*.ops", rule),
        sharding=batch_sharding(mesh),
        record_ids=record_ids,
    )
    left = source.num_examples if record_ids is None else len(record_ids)
    console = Console(stderr=True)
    if progress and console.is_terminal:  # in a file, a bar is only noise
        batches = track(batches, "images", total=-(-left // batch_size), console=console)
    results = (
        (
            compute(params, model_state, batch["image"]),
            {k: batch["image"].grid if k == "grid" else batch[k] for k in keys},
        )
        for batch in batches
    )
    for found, batch in fetch(results):
        kept = min(left, batch_size)
        left -= kept
        yield found, jax.tree.map(lambda v, kept=kept: v[:kept], batch)


def _compute(
    params: tree.Params,
    model_state: tree.ModelState,
    images: Images,
    *,
    model: nn.Module,
    image_size: tuple[int, int],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    loss: str | None,
    what: str,
    layer: int | None,
) -> jax.Array:
    """The `outputs` for uint8 images (B, H, W, C), or pictures."""
    counts = counts_of(images)
    of_patches = functools.partial(as_map, model, image_size=image_size, counts_B=counts)
    images = to_value_range(images, mean, std)
    apply: Callable[..., Any] = functools.partial(
        model.apply, {"params": params, **model_state}, images
    )
    if what == "attention":
        return layers.choose(layers.attention_weights(model, params, images, model_state), layer)
    if what in OF_LAYERS and layer is not None:
        x = layers.choose(layers.layer_outputs(model, params, images, model_state), layer)
        return layers.pool(model, x, counts) if what == "features" else of_patches(x)
    if what == "features":
        return apply(method="features")
    if what == "dense":
        return of_patches(apply(method="tokens"))
    logits_BC = apply()
    return logits_BC if loss is None else LOSSES.find(loss)().probabilities(logits_BC)


_jitted = jax.jit(  # kept for more calls with an equal model
    _compute, static_argnames=("model", "image_size", "mean", "std", "loss", "what", "layer")
)


def why_unread(pretrained: Pretrained, source: Source, record: int) -> str:
    """Why the mask of a record is 0."""
    ops, _ = preparation(pretrained.spec, source.image_shape)
    return why_masked(source, [parse_ops(ops, pretrained.spec.need_size())[0]], record)[1]


def without_masked(x: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """`x` (b, ...) with NaN for the records that could not be read."""
    return np.where(batch["mask"] > 0, x.T, np.nan).T


def in_own_shape(x: np.ndarray, grid: np.ndarray, num_prefix: int) -> np.ndarray:
    """A picture's map (rows, columns, D), or its weights (H, T, T), from its row of `outputs`.

    `grid`: its rows and columns; `num_prefix`: tokens before the patches. A picture that could not
    be read has one patch.
    """
    rows, columns = np.maximum(grid, 1)
    if x.ndim == 2:
        return x[: rows * columns].reshape(rows, columns, -1)
    return x[:, : num_prefix + rows * columns, : num_prefix + rows * columns]


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


def on_all(mesh: Mesh, variables: tree.PyTree) -> tree.PyTree:
    """`variables` on every device; if they are there, `device_put` is left out: it takes time."""
    everywhere = NamedSharding(mesh, P())
    if all(getattr(x, "sharding", None) == everywhere for x in jax.tree.leaves(variables)):
        return variables
    return jax.device_put(variables, everywhere)
