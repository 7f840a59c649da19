"""Data: sources of labelled images, preprocessing ops, and the batches of a run.

A new data set or op takes one class and one line in registries.py. Importing this package imports
no TensorFlow and touches no device.
"""

import os
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import InputError
from vit_jax.config.registries import OPS, SOURCES
from vit_jax.data.batch import BatchSpec, image_batch
from vit_jax.data.contract import DataSet, Request, Source, count_labels, read_labels
from vit_jax.data.device_ops import make_device_transform, to_value_range
from vit_jax.data.division import Divider, Division
from vit_jax.data.id_files import ids_in
from vit_jax.data.mixture import (
    concatenate,
    held_alike,
    mixed_keys,
    parse_mix,
    share_images,
    without_places,
)
from vit_jax.data.ops import at_full_size, check_crops, parse_ops
from vit_jax.data.order import Order, make_order, resolve_chunk_size, resolve_order
from vit_jax.data.pipeline import eval_batches, host_batches, host_eval_batches, train_batches
from vit_jax.data.sources.tfds import ON_DISK
from vit_jax.data.subset import (
    check_classes,
    give_channels,
    keep_classes,
    keep_subset,
    leave_out,
    match_classes,
    soften,
)


def make_source(
    name: str,
    *,
    split: str,
    image_size: tuple[int, int],
    data_dir: str | os.PathLike | None = None,
    exclude: str | None = None,
    classes: tuple[int, ...] | None = None,
    subset: tuple[str, bool, int] | None = None,
    own: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Source:
    """One split of a data set.

    Args:
      name: one of SOURCES, a task of VTAB-1k (`vtab/dtd`), or a prepared TFDS data set
        (`cifar10`, `sun397/tfds:4.0.0`).
      split, image_size, data_dir: see `Request`.
      exclude: file of the records to leave out (`id_files.py`); None keeps all.
      classes: the labels to keep (`keep_classes`); None keeps all.
      subset: the part to keep, of these labels: the arguments of `keep_subset`; None keeps all.
      own: keys that sources add to `config.data`; a data set gets those that it declares.
      **asked: further fields of `Request`.

    Raises: InputError if the data are missing or differ from the expected numbers.
    """
    folder = None if data_dir is None else os.path.expanduser(data_dir)
    request = Request(name, split, image_size, folder, **asked)
    data_set = SOURCES.make({"name": name, **(own or {})})
    source = give_channels(data_set.open(request), request.channels)
    _check_facts(source, request, ("multi_label",))
    if exclude is not None:
        source = leave_out(source, ids_in(source, exclude, "data.exclude"))
    if classes is not None:
        source = keep_classes(source, classes)
    if subset is not None:
        source = keep_subset(source, *subset)
    _check_facts(source, request, ("num_classes", "num_examples"))
    return source


def _check_facts(source: Source, request: Request, keys: tuple[str, ...]) -> None:
    """Raise InputError unless `source` has the values that were asked for; None is any value."""
    for key in keys:
        value, found = getattr(request, key), getattr(source, key)
        if value not in (None, found):
            raise InputError(
                f"data.{key}={value}: {request.name} {request.split} has {found}; set "
                f"--config.data.{key}={str(found).lower()}"
            )
