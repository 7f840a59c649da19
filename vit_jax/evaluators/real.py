"""ImageNet ReaL: accuracy against the reassessed labels of ImageNet's validation images.

Axes: N records of the split, L largest number of labels of an image.
Source: Beyer et al. 2020 (arXiv:2006.07159), section 4; labels:
https://github.com/google-research/reassessed-imagenet.
"""

import functools
import json
import re

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.config import key
from vit_jax.data import Source
from vit_jax.evaluators.features import NothingToMeasureError, gather_by_record
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.evaluators.labelled import LabelEvaluator
from vit_jax.evaluators.mapped import measure_by_labels, pad_labels

_FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\b")
_OTHER_NAME = -1  # number of a record whose file name has another form
_NEEDED = "needs records of files named ILSVRC2012_val_00000001.JPEG and so on"


class Real(LabelEvaluator):
    """Top-1 on ImageNet's validation split by the ReaL labels.

    A prediction is correct if it is among the labels of the image; images without labels do not
    count. Labels are matched to records by file name, ILSVRC2012_val_N; TFRecord files are read
    once more for the names, a share by each process, when the process starts.
    """

    labels_file: str = key(..., "path of real.json")

    usual = ("top1",)

    def check(self) -> list[str]:
        text = "metrics='loss': would add up the losses of all right labels; leave it out"
        return [*super().check(), *([text] if "loss" in (self.metrics or ()) else [])]

    def bind(self, inputs: EvalInputs) -> Measure:
        source = inputs.source()
        labels = read_real_labels(self.labels_file, source.num_classes)
        if source.file_names is None:
            raise InputError(
                f"split: {source.name} {source.split} does not provide file names; {_NEEDED}"
            )
        check_numbers(source, read_numbers(source, 0, 1))  # the other records when they are read

        def read_labels() -> np.ndarray:
            read = functools.partial(read_numbers, source)
            numbers_N = gather_by_record(read, source.num_examples)
            check_numbers(source, numbers_N)  # on every process, whichever has read the record
            if numbers_N.max() > len(labels):
                raise NothingToMeasureError(
                    f"labels_file={self.labels_file!r}: has labels for {len(labels)} images, but "
                    f"the split has image number {numbers_N.max()}"
                )
            return labels_by_record(labels, numbers_N)

        return measure_by_labels(inputs, self.make_metrics(inputs), read_labels, "id")


def read_real_labels(path: str, num_classes: int) -> list[list[int]]:
    """Read the classes of ILSVRC2012_val_00000001, ..._00000002 and so on, from real.json.

    Raises:
      InputError: if the file is missing or malformed; names the key `labels_file`.
    """
    try:
        labels = json.loads(epath.Path(path).read_bytes())
        if not all(type(c) is int and c >= 0 for classes in labels for c in classes):
            raise ValueError("not every label is a class")
        largest = max(c for classes in labels for c in classes)
    except (OSError, ValueError, TypeError) as e:
        raise InputError(
            f"labels_file={path!r}: cannot be read as lists of classes ({e}); use real.json from "
            "https://github.com/google-research/reassessed-imagenet"
        ) from None
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
    return pad_labels([[], *labels])[numbers_N]


def read_numbers(source: Source, start: int, stop: int) -> np.ndarray:
    """Numbers N from the file names ILSVRC2012_val_N of these records, int32.

    0 if the name cannot be read; _OTHER_NAME if it has another form.
    """
    assert source.file_names is not None  # checked by `bind`
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
