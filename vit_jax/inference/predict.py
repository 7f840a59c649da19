"""What a pretrained model says of images: classes, or features, batch by batch over all devices.

Axes: B images, N tokens, D width, C classes.
"""

import functools
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

from vit_jax import files, tree
from vit_jax.data import Source, eval_batches, parse_ops, to_value_range
from vit_jax.data.loading import why_masked
from vit_jax.data.ops import Op
from vit_jax.devices.mesh import batch_sharding, check_batch_size, make_mesh
from vit_jax.errors import InputError
from vit_jax.evaluators.fetching import fetch
from vit_jax.objectives.supervised import LOSSES
from vit_jax.transfer.images import class_names, ops_for
from vit_jax.transfer.rules import Pretrained, loss_of

logger = logging.getLogger("vit_jax")


def outputs(
    pretrained: Pretrained, source: Source, *, batch_size: int, what: str
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """What the model gives for every record of `source`, in order, with a progress bar.

    Args:
      pretrained: a model with an image size, or one that takes that of its images.
      source: of images.
      batch_size: over all devices, a multiple of their number.
      what: "probabilities" (C,); "pooled" (D,), what the head gets; or "patches", the encoder's
        tokens of the patches (N, D).

    Yields:
      (what it gives, float32 (b, ...); {"mask", "label"}, each (b,)); the mask is 0 for a record
      that could not be read.
    """
    _check_size(pretrained)
    model, spec = pretrained.model, pretrained.spec
    mesh = make_mesh(replica=None, data=-1, fsdp=1, tensor=1)
    check_batch_size(mesh, batch_size, "--batch_size")
    params = jax.device_put(tree.unflatten_names(pretrained.params), NamedSharding(mesh, P()))
    loss = loss_of(pretrained) if what == "probabilities" else None

    @jax.jit
    def compute(params, images):
        images = to_value_range(images, spec.mean, spec.std)
        if loss is not None:
            return LOSSES[loss].probabilities(model.apply({"params": params}, images))
        if what == "pooled":
            return model.apply({"params": params}, images, method="features")
        tokens_BND = model.apply({"params": params}, images, method="tokens")
        return tokens_BND[:, model.num_prefix_tokens :]

    host_ops = _host_ops(pretrained)
    batches = eval_batches(
        source,
        host_ops,
        global_batch_size=batch_size,
        image_size=spec.image_size,
        sharding=batch_sharding(mesh),
    )
    total = -(-source.num_examples // batch_size)
    left = source.num_examples
    progress = {"total": total, "console": Console(stderr=True), "description": "images"}
    results = (
        (compute(params, batch["image"]), {k: batch[k] for k in ("mask", "label")})
        for batch in track(batches, **progress)
    )
    for found, rest in fetch(results):
        kept = min(left, batch_size)
        left -= kept
        yield np.asarray(found[:kept], np.float32), {k: v[:kept] for k, v in rest.items()}


def _host_ops(pretrained: Pretrained) -> tuple[Op, ...]:
    spec = pretrained.spec
    return parse_ops(ops_for(spec), spec.image_size, key="preprocessing")[0]


def _check_size(pretrained: Pretrained) -> None:
    if pretrained.spec.image_size is None:
        raise InputError(f"{pretrained.source}: takes images of any size; give --image_size")


def _pooled_shape(pretrained: Pretrained) -> tuple[int, ...]:
    """(D,), of the features of one image."""
    images = jax.ShapeDtypeStruct((1, *pretrained.spec.image_size, 3), np.float32)
    variables = {"params": tree.unflatten_names(pretrained.params)}
    features = functools.partial(pretrained.model.apply, method="features")
    return jax.eval_shape(features, variables, images).shape[1:]


def predict(
    pretrained: Pretrained, source: Source, *, batch_size: int, top: int
) -> Iterator[dict[str, Any]]:
    """For every image {"file": ..., "classes": [{"name", "index", "probability"}, ...]}.

    The `top` most probable classes, the first first; {"file": ..., "error": ...} for an image that
    cannot be read, or is smaller than a crop.

    Raises:
      InputError: if the model has no classes.
    """
    num_classes = pretrained.model.num_classes
    if num_classes is None:
        raise InputError(
            f"{pretrained.source}: has no classes; ask for --features=FILE.npz instead"
        )
    names = class_names(pretrained.spec, num_classes)
    record = -1
    for found, batch in outputs(pretrained, source, batch_size=batch_size, what="probabilities"):
        for probabilities, mask in zip(found, batch["mask"], strict=True):
            record += 1
            row: dict[str, Any] = {"file": source.record_name(record)}
            if mask == 0:
                host_ops = _host_ops(pretrained)
                yield row | {"error": why_masked(source, host_ops, record)}
                continue
            best = np.argsort(-probabilities, kind="stable")[:top]
            classes = [
                {"name": names[i], "index": int(i), "probability": float(probabilities[i])}
                for i in best
            ]
            yield row | {"classes": classes}


def check_output(output: os.PathLike | str) -> epath.Path:
    """Where `write_features` would write.

    Raises:
      InputError: if it cannot.
    """
    output = files.absolute(output)
    if output.suffix != ".npz":
        raise InputError(f"--features={output}: needs a name that ends in .npz")
    files.check_output(output, "--features")
    return output


def write_features(
    pretrained: Pretrained, source: Source, output: os.PathLike | str, *, batch_size: int, what: str
) -> dict[str, Any]:
    """Writes FILE.npz with the features of every record of `source`; returns what it holds.

    `features` is float32 (n, D), or for `what="patches"` (n, rows, columns, D), written batch by
    batch; `valid` (n,) is False where an image could not be read, whose features are NaN;
    `record` (n,) names the records; `label` (n,) is that of a data set.

    Raises:
      InputError: as `check_output`, before anything is computed.
    """
    output = check_output(output)
    _check_size(pretrained)
    model = pretrained.model
    count, shape = source.num_examples, _pooled_shape(pretrained)
    if what == "patches":
        shape = (*model.clone(image_size=pretrained.spec.image_size).grid, *shape)
    found = outputs(pretrained, source, batch_size=batch_size, what=what)
    valid, labels = [], []
    with tempfile.NamedTemporaryFile(dir=output.parent, suffix=".tmp", delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                with archive.open("features.npy", "w", force_zip64=True) as entry:
                    header = {"descr": "<f4", "fortran_order": False, "shape": (count, *shape)}
                    np.lib.format.write_array_header_2_0(entry, header)
                    for features, batch in found:
                        features = np.where(batch["mask"] > 0, features.T, np.nan).T
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
            file.flush()
            os.replace(file.name, output)
        except BaseException:
            os.unlink(file.name)
            raise
    return {
        "features": os.fspath(output),
        "shape": [count, *shape],
        "unreadable": int(count - rest["valid"].sum()),
    }
