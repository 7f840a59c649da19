"""ImageNet ReaL: accuracy against the reassessed labels of ImageNet's validation images.

Axes: B examples, C classes, N records of the split, L largest number of labels of an image.
Source: Beyer et al. 2020 (arXiv:2006.07159), section 4; labels:
https://github.com/google-research/reassessed-imagenet.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.data import Source
from vit_jax.errors import InputError
from vit_jax.evaluators.features import NothingToMeasureError, gather_by_record, need_images
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

_FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_OTHER_NAME = -1  # number of a record whose file name has another form
_NEEDED = "needs records of files named ILSVRC2012_val_00000001.JPEG and so on"


class Real:
    """Metrics top1 and num_examples over the images that have ReaL labels.

    A prediction is correct if it is among the labels of the image.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      make_batches: one pass over the split, with as many batches on every process.
      labels: () -> the classes of each record of the split, int32 (N, L), padded with -1.
    """

    metrics: Mapping[str, Better] = {"top1": "higher", "num_examples": "neither"}

    def __init__(
        self,
        logits_fn: OutputFn,
        make_batches: Callable[[], Iterable[Batch]],
        labels: Callable[[], np.ndarray],
    ):
        self._make_batches, self._read_labels = make_batches, labels

        def count(state, batch, labels_NL):
            predicted_B = logits_fn(state, batch["image"]).argmax(axis=1)
            labels_BL = labels_NL[jnp.maximum(batch["id"], 0)]
            hits_B = (labels_BL == predicted_B[:, None]).any(axis=1)
            counts_B = batch["mask"] * (labels_BL >= 0).any(axis=1)
            return (counts_B * hits_B).sum(), counts_B.sum()

        self._count = jax.jit(count)

    @functools.cached_property
    def _labels(self) -> np.ndarray:
        return self._read_labels()

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state` over the split.

        Raises:
          NothingToMeasureError: if no image with labels can be read.
        """
        labels_NL = self._labels
        counts = fetch(self._count(state, batch, labels_NL) for batch in self._make_batches())
        hits, seen = np.asarray(list(counts), np.float64).sum(axis=0)
        need_images(int(seen), "split")
        return {"top1": float(hits / seen), "num_examples": int(seen)}


def read_real_labels(path: str, num_classes: int) -> list[list[int]]:
    """Read the classes of ILSVRC2012_val_00000001, ..._00000002 and so on, from real.json.

    Raises:
      InputError: if the file is missing or malformed; names the key `labels_file`.
    """
    try:
        labels = json.loads(epath.Path(path).read_text())
        if not all(type(c) is int and c >= 0 for classes in labels for c in classes):
            raise ValueError("not every label is a class")
        if not any(labels):
            raise ValueError("no image has a label")
    except (OSError, ValueError, TypeError) as e:
        raise InputError(
            f"labels_file={path!r}: cannot be read as lists of classes ({e}); use real.json from "
            "https://github.com/google-research/reassessed-imagenet"
        ) from None
    largest = max(c for classes in labels for c in classes)
    if largest >= num_classes:
        raise InputError(
            f"labels_file={path!r}: has class {largest}, but the model has {num_classes} classes; "
            "needs a model with the 1,000 classes of ImageNet, in their usual order"
        )
    return labels


def labels_by_record(labels: list[list[int]], numbers_N: np.ndarray) -> np.ndarray:
    """Labels of the images with the given numbers, which count from 1: int32 (N, L).

    Padded with -1. The number 0 means unknown; such an image gets no labels.
    """
    most = max(map(len, labels))
    table = np.full((len(labels) + 1, most), -1, np.int32)
    for row, classes in zip(table[1:], labels, strict=True):
        row[: len(classes)] = classes
    return table[numbers_N]


def read_numbers(source: Source, start: int, stop: int) -> np.ndarray:
    """Numbers N from the file names ILSVRC2012_val_N of these records, int32.

    0 if the name cannot be read; _OTHER_NAME if it has another form.
    """
    assert source.file_names is not None  # checked by make_real
    numbers = np.zeros(stop - start, np.int32)
    for i, name in enumerate(source.file_names(start, stop)):
        match = _FILE_NAME.search(name)
        numbers[i] = int(match[1]) if match else _OTHER_NAME if name else 0
    return numbers


def check_numbers(source: Source, numbers: np.ndarray) -> None:
    """Raise NothingToMeasureError if a file name, as `read_numbers` returns, has another form."""
    other = np.flatnonzero(numbers == _OTHER_NAME)
    if len(other):
        assert source.file_names is not None
        (name,) = source.file_names(int(other[0]), int(other[0]) + 1)
        raise NothingToMeasureError(
            f"split: {source.name} {source.split} has a record from the file {name!r}; {_NEEDED}"
        )


def real(
    *,
    split: str,
    every: str,
    labels_file: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
) -> ConfigDict:
    """Make an entry of `evals`: top-1 on ImageNet's validation split by the ReaL labels.

    `labels_file` is the path of real.json. Labels are matched to records by file name,
    ILSVRC2012_val_N; TFRecord files are read once more for the names, a share by each process, when
    the process starts. All other arguments are as in `classification`.
    """
    return typed_entry("real", locals())


def make_real(inputs: EvalInputs) -> Real:
    """Make the evaluator for an entry from `real`.

    Raises:
      InputError: if the labels cannot be read, or do not belong to the first record; the other
        records are checked later.
    """
    source, labels_file = inputs.source(), inputs.entry.labels_file
    labels = read_real_labels(labels_file, source.num_classes)
    if source.file_names is None:
        raise InputError(
            f"split: {source.name} {source.split} does not provide file names; {_NEEDED}"
        )
    check_numbers(source, read_numbers(source, 0, 1))

    def read_labels():
        numbers_N = gather_by_record(functools.partial(read_numbers, source), source.num_examples)
        check_numbers(source, numbers_N)  # raises on every process, whichever has read the record
        if numbers_N.max() > len(labels):
            raise NothingToMeasureError(
                f"labels_file={labels_file!r}: has labels for {len(labels)} images, but the split "
                f"has image number {numbers_N.max()}"
            )
        return labels_by_record(labels, numbers_N)

    return Real(inputs.apply, inputs.batches, read_labels)


EVALUATOR = Evaluator(real, make_real, metrics=lambda entry: Real.metrics)
