"""Data: sources of labelled images, preprocessing ops, and the batches of a run.

A new data set or op takes one file and one entry: in SOURCES here, in HOST_OPS (host_ops.py) or in
DEVICE_OPS (device_ops.py). Importing this package imports no TensorFlow and touches no device.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.data.batch import BatchSpec, image_batch
from vit_jax.data.device_ops import make_device_transform, to_value_range
from vit_jax.data.division import Divider, Division, say_names
from vit_jax.data.image_files import unlabelled
from vit_jax.data.image_folder import find_layout, folder
from vit_jax.data.labels import count_labels, read_labels
from vit_jax.data.mixture import concatenate, held_alike, parse_mix
from vit_jax.data.ops import OPS, at_full_size, check_crops, do_the_same, parse_ops
from vit_jax.data.order import Order, check_order, make_order, pair_distance, resolve_order
from vit_jax.data.picture_list import find_lists, picture_list
from vit_jax.data.pipeline import eval_batches, host_batches, host_eval_batches, train_batches
from vit_jax.data.prepared_tfds import tfds_source
from vit_jax.data.pseudo import pseudo, soften
from vit_jax.data.sources import Source, digits, synthetic
from vit_jax.data.subset import (
    check_classes,
    check_subset,
    give_channels,
    keep_classes,
    keep_subset,
    match_classes,
)
from vit_jax.data.tfds_readers import ON_DISK, check_reader
from vit_jax.data.vtab import vtab_source
from vit_jax.errors import InputError

__all__ = [
    "ON_DISK",
    "OPS",
    "OWN_PICTURES",
    "SOURCES",
    "BatchSpec",
    "Divider",
    "Division",
    "Order",
    "Source",
    "at_full_size",
    "check_classes",
    "check_crops",
    "check_order",
    "check_reader",
    "check_subset",
    "concatenate",
    "count_labels",
    "do_the_same",
    "eval_batches",
    "find_layout",
    "held_alike",
    "host_batches",
    "host_eval_batches",
    "image_batch",
    "keep_classes",
    "keep_subset",
    "make_device_transform",
    "make_order",
    "make_source",
    "match_classes",
    "own_splits",
    "pair_distance",
    "parse_mix",
    "parse_ops",
    "read_labels",
    "resolve_order",
    "say_names",
    "soften",
    "to_value_range",
    "train_batches",
]

# Every factory is called with all of make_source's keywords and ignores those it does not need.
SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    "folder": folder,
    "list": picture_list,
    "pseudo": lambda **keywords: pseudo(make_source, **keywords),
    "synthetic": synthetic,
    "unlabelled": unlabelled,
}

# Sources whose classes the user names.
OWN_PICTURES = ("folder", "list")


def own_splits(name: str, data_dir: str | None, section: Any) -> list[str]:
    """The splits of own pictures.

    Args:
      name: one of OWN_PICTURES.
      data_dir: where they lie.
      section: `config.data`.

    Raises: InputError if there is nothing.
    """
    if name == "list":
        return find_lists(data_dir).names()
    return find_layout(data_dir).names()


def make_source(
    name: str,
    *,
    split: str,
    image_size: tuple[int, int],
    data_dir: str | None = None,
    divider: Divider | None = None,
    exif: bool = True,
    multi_label: bool | None = False,
    channels: int = 3,
    num_classes: int | None = None,
    num_examples: int | None = None,
    reader: str | None = None,
    max_corrupt_fraction: float = 1.0,
    classes: tuple[int, ...] | None = None,
    subset: tuple[str, bool, int] | None = None,
    **own: Any,
) -> Source:
    """One split of a data set.

    Args:
      name: one of SOURCES, a task of VTAB-1k (`vtab/dtd`), or a prepared TFDS data set
        (`cifar10`, `sun397/tfds:4.0.0`).
      split: `train`, `test`, `val`, ..., depending on the source; TFDS's notation for TFDS sets.
      image_size: (H, W) of synthetic images; other sources ignore it.
      data_dir: the image folder, or the folder of TFDS data sets (None: TFDS's default).
      divider: divides own pictures without a split `val`; None: anew.
      channels: number of channels of the pipeline's images.
      exif: for own pictures; see the key of `config.data`.
      multi_label: whether images must have several labels (True) or one (False); None: either.
      num_classes: number of classes of synthetic data; for other data the expected number, or None.
      num_examples: number of examples in this split, likewise.
      reader: for TFDS data sets; see `tfds_source`.
      max_corrupt_fraction: own pictures are refused if a larger share of the files is missing.
      classes: the labels to keep (`keep_classes`); None keeps all.
      subset: the part to keep, of these labels: the arguments of `keep_subset`; None keeps all.
      **own: keys that plug-ins add to `config.data`; a factory gets the ones it names.

    Raises: InputError if the data are missing or differ from the expected numbers.
    """
    factory = _find_factory(name)
    expected = {"num_classes": num_classes, "num_examples": num_examples}
    named = inspect.signature(factory).parameters
    source = factory(
        split=split,
        image_size=image_size,
        data_dir=None if data_dir is None else os.path.expanduser(data_dir),
        divider=divider,
        exif=exif,
        multi_label=multi_label,
        channels=channels,
        reader=reader,
        max_corrupt_fraction=max_corrupt_fraction,
        **expected,
        **{key: value for key, value in own.items() if key in named},
    )
    source = give_channels(source, channels)
    _check_facts(source, f"{name} {split}", {"multi_label": multi_label})
    if classes is not None:
        source = keep_classes(source, classes)
    if subset is not None:
        source = keep_subset(source, *subset)
    _check_facts(source, f"{name} {split}", expected)
    return source


def _find_factory(name: str) -> Callable[..., Source]:
    """The function that makes the source `name`."""
    if name.startswith("vtab/"):
        return functools.partial(vtab_source, name)
    return SOURCES.get(name, functools.partial(tfds_source, name, other_sources=[*SOURCES]))


def _check_facts(source: Source, what: str, expected: Mapping[str, Any]) -> None:
    """Raise InputError unless `source` has the values of `expected`; None is any value."""
    for key, value in expected.items():
        found = getattr(source, key)
        if value in (None, found):
            continue
        flag = f"--config.data.{key}={str(found).lower()}"
        if key == "multi_label":
            has = f"{'several labels' if found else 'one label'} an image; set {flag}"
        else:
            has = f"{found}; set {flag} or leave it out"
        raise InputError(f"data.{key}={value}: {what} has {has}")
