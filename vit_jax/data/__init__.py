"""Data: sources of labelled images, preprocessing ops, and the batches of a run.

Adding a data set or an op is a file and a line: in SOURCES here, in HOST_OPS of host_ops.py or in
DEVICE_OPS of device_ops.py. Importing this package imports no TensorFlow and touches no device.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vit_jax.data.device_ops import make_device_transform, to_value_range
from vit_jax.data.image_folder import check_holdout, folder
from vit_jax.data.labels import read_labels
from vit_jax.data.mixture import concatenate, held_alike, parse_mix
from vit_jax.data.ops import OPS, check_crops, parse_ops
from vit_jax.data.order import Order, check_order, make_order, pair_distance, resolve_order
from vit_jax.data.pipeline import eval_batches, host_batches, host_eval_batches, train_batches
from vit_jax.data.prepared_tfds import BROKEN_LABELS, tfds_source
from vit_jax.data.sources import Source, digits, synthetic
from vit_jax.data.subset import check_classes, keep_classes
from vit_jax.data.tfds_readers import ON_DISK, check_reader
from vit_jax.data.vtab import vtab_source
from vit_jax.errors import InputError

__all__ = [
    "BROKEN_LABELS",
    "ON_DISK",
    "OPS",
    "SOURCES",
    "Order",
    "Source",
    "check_classes",
    "check_crops",
    "check_holdout",
    "check_order",
    "check_reader",
    "concatenate",
    "eval_batches",
    "held_alike",
    "host_batches",
    "host_eval_batches",
    "keep_classes",
    "make_device_transform",
    "make_order",
    "make_source",
    "pair_distance",
    "parse_mix",
    "parse_ops",
    "read_labels",
    "resolve_order",
    "to_value_range",
    "train_batches",
]

# Every factory gets all of make_source's keywords and takes those it needs.
SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    "folder": folder,
    "synthetic": synthetic,
}


def make_source(
    name: str,
    *,
    split: str,
    image_size: tuple[int, int],
    data_dir: str | None = None,
    holdout: str = "names",
    num_classes: int | None = None,
    num_examples: int | None = None,
    reader: str | None = None,
    broken_labels: str = "read",
    classes: tuple[int, ...] | None = None,
    **own: Any,
) -> Source:
    """One split of a data set.

    Args:
      name: one of SOURCES; a task of VTAB-1k, `vtab/dtd`; or else a prepared TFDS data set:
        `cifar10`, `sun397/tfds:4.0.0`.
      split: `train`, `test`, `val`, ..., as the source has them; TFDS's notation for its own.
      image_size: (H, W) of synthetic images; no other source looks at it.
      data_dir: the image folder, or where TFDS data sets lie (None: TFDS's default).
      holdout: the rule that chooses the validation images of a folder that has none, as in
        `data.holdout`.
      num_classes: made up for synthetic data; of others it is what must be found, or None.
      num_examples: likewise, in this split.
      reader, broken_labels: of TFDS data sets; see `tfds_source`.
      classes: the labels that are kept, as `keep_classes` does; None: all.
      **own: keys that plug-ins add to `config.data`; a factory gets those that it names.

    Raises: InputError if the data are missing or are not what was asked for.
    """
    factory: Callable[..., Source]
    if name.startswith("vtab/"):
        factory = functools.partial(vtab_source, name)
    else:
        factory = SOURCES.get(name, functools.partial(tfds_source, name, other_sources=[*SOURCES]))
    expected = {"num_classes": num_classes, "num_examples": num_examples}
    named = inspect.signature(factory).parameters
    source = factory(
        split=split,
        image_size=image_size,
        data_dir=data_dir,
        holdout=holdout,
        reader=reader,
        broken_labels=broken_labels,
        **expected,
        **{key: value for key, value in own.items() if key in named},
    )
    if classes is not None:
        source = keep_classes(source, classes)
    for key, value in expected.items():
        found = getattr(source, key)
        if value not in (None, found):
            raise InputError(
                f"data.{key}={value}: {name} {split} has {found}; set "
                f"--config.data.{key}={found} or leave it out"
            )
    return source
