"""ImageNet ReaL: accuracy against the labels that ImageNet's validation images were given anew.

Axes: B examples, C classes, N records of the split, L the most labels of an image.
Source: Beyer et al. 2020 (arXiv:2006.07159), section 4; labels:
https://github.com/google-research/reassessed-imagenet.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable

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
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

_FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_OTHER_NAME = -1  # in the place of a number
_NEEDED = "needed: records of files named ILSVRC2012_val_00000001.JPEG and so on"


class Real:
    """top1 and num_examples, of the images that have ReaL labels; the others are left out.

    An image counts as right if the class of the largest logit is among its labels.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      make_batches: one pass over the split, the same number of batches on every process.
      labels: () -> the classes of each record of the split, int32 (N, L), filled up with -1.
    """

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
        """The metrics of `state` over the split.

        Raises:
          NothingToMeasureError: if no image of it can be read and has labels.
        """
        labels_NL = self._labels
        counts = fetch(self._count(state, batch, labels_NL) for batch in self._make_batches())
        hits, seen = np.asarray(list(counts), np.float64).sum(axis=0)
        need_images(int(seen), "split")
        return {"top1": float(hits / seen), "num_examples": int(seen)}


def read_real_labels(path: str, num_classes: int) -> list[list[int]]:
    """The classes of ILSVRC2012_val_00000001, ..._00000002 and so on, from a file as real.json.

    Raises:
      InputError: naming the key `labels_file`, if there is none, or it holds anything else.
    """
    try:
        labels = json.loads(epath.Path(path).read_text())
        if not all(type(c) is int and c >= 0 for classes in labels for c in classes):
            raise ValueError("not every label is a class")
        if not any(labels):
            raise ValueError("no image has a label")
    except (OSError, ValueError, TypeError) as e:
        raise InputError(
            f"labels_file={path!r} cannot be read as lists of classes ({e}); take real.json of "
            "https://github.com/google-research/reassessed-imagenet"
        ) from None
    largest = max(c for classes in labels for c in classes)
    if largest >= num_classes:
        raise InputError(
            f"labels_file={path!r} has the class {largest}, and the model {num_classes} classes; "
            "it needs the 1,000 of ImageNet, in their usual order"
        )
    return labels


def labels_by_record(labels: list[list[int]], numbers_N: np.ndarray) -> np.ndarray:
    """int32 (N, L): the labels of the images that `numbers_N` gives of 1, ..., len(labels).

    Filled up with -1, which is all that an image with the number 0, an unknown one, has.
    """
    most = max(map(len, labels))
    table = np.full((len(labels) + 1, most), -1, np.int32)
    for row, classes in zip(table[1:], labels, strict=True):
        row[: len(classes)] = classes
    return table[numbers_N]


def read_numbers(source: Source, start: int, stop: int) -> np.ndarray:
    """N of the file names ILSVRC2012_val_N of these records, int32.

    0 where a name cannot be read, _OTHER_NAME where it is of another kind.
    """
    assert source.file_names is not None  # make_real has looked
    numbers = np.zeros(stop - start, np.int32)
    for i, name in enumerate(source.file_names(start, stop)):
        match = _FILE_NAME.search(name)
        numbers[i] = int(match[1]) if match else _OTHER_NAME if name else 0
    return numbers


def check_numbers(source: Source, numbers: np.ndarray) -> None:
    """Raises NothingToMeasureError if `numbers`, of the first records, tell of other file names."""
    other = np.flatnonzero(numbers == _OTHER_NAME)
    if len(other):
        assert source.file_names is not None
        (name,) = source.file_names(int(other[0]), int(other[0]) + 1)
        raise NothingToMeasureError(
            f"split: {source.name} {source.split} has a record of the file {name!r}; {_NEEDED}"
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
    """An entry of `evals`: top-1 on ImageNet's validation split by its ReaL labels.

    `labels_file` is the path of real.json. The records of `split` are told apart by the names of
    their files, ILSVRC2012_val_N, so of TFRecord files each process reads its share once more when
    it starts. What else there is means what it means in `classification`.
    """
    return typed_entry("real", locals())


def make_real(inputs: EvalInputs) -> Real:
    """The evaluator of an entry that `real` made.

    Raises:
      InputError: if the labels cannot be read, or do not belong to the records; of those only the
        first is looked at now.
    """
    source, labels_file = inputs.source(), inputs.entry.labels_file
    labels = read_real_labels(labels_file, source.num_classes)
    if source.file_names is None:
        raise InputError(
            f"split: {source.name} {source.split} does not tell its records' file names; {_NEEDED}"
        )
    check_numbers(source, read_numbers(source, 0, 1))

    def read_labels():
        numbers_N = gather_by_record(functools.partial(read_numbers, source), source.num_examples)
        check_numbers(source, numbers_N)  # on every process alike, though one alone has read them
        if numbers_N.max() > len(labels):
            raise NothingToMeasureError(
                f"labels_file={labels_file!r} has the labels of {len(labels)} images, and the "
                f"split one with the number {numbers_N.max()}"
            )
        return labels_by_record(labels, numbers_N)

    return Real(inputs.apply, inputs.batches, read_labels)


EVALUATOR = Evaluator(real, make_real)
