"""Sizes of public data sets, for planning and benchmarks on machines that lack the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import InputError
from vit_jax.config import SOURCES
from vit_jax.config.sections import Data
from vit_jax.data.host_tf import tfds
from vit_jax.data.id_files import read_ids
from vit_jax.data.mixture import parse_mix
from vit_jax.data.order import resolve_chunk_size, resolve_order
from vit_jax.data.sources.tfds import count_examples
from vit_jax.data.sources.vtab import TASKS
from vit_jax.data.subset import subset_size

# name -> classes, examples by split, from TFDS's catalogue. The catalogue lacks imagenet21k: these
# are the images of the release of 2011 (14,197,122) and the classes of published models.
KNOWN_DATA: dict[str, tuple[int, dict[str, int]]] = {
    "imagenet2012": (1000, {"train": 1_281_167, "validation": 50_000}),
    "imagenet21k": (21_843, {"train": 14_197_122}),
    "cifar10": (10, {"train": 50_000, "test": 10_000}),
    "cifar100": (100, {"train": 50_000, "test": 10_000}),
    "oxford_iiit_pet": (37, {"train": 3_680, "test": 3_669}),
    "oxford_flowers102": (102, {"train": 1_020, "validation": 1_020, "test": 6_149}),
}
_VTAB = {f"vtab/{name}": (task.num_classes, task.sizes) for name, task in TASKS.items()}


def known_facts(data: Data, global_batch_size: int) -> dict[str, Any]:
    """The keys that the training data decide, {"data.num_classes": ..., ...}; they are not read.

    Raises:
      InputError: as `known_sizes`, or `data.classes` is set without `data.num_examples`.
    """
    d, own = data, data.own
    num_classes = d.num_classes if d.classes is None else len(d.classes)
    if d.classes is not None and d.num_examples is None:
        raise InputError(
            f"data.num_examples: unknown for data.classes={d.classes}; set "
            "--config.data.num_examples=..."
        )
    num_classes, num_examples = known_sizes(
        d.name, d.split, num_classes=num_classes, num_examples=d.num_examples, own=own
    )
    if d.num_examples is None:
        if d.exclude is not None:
            num_examples -= len(read_ids(d.exclude, "data.exclude")[0])
        if d.subset is not None:
            num_examples = subset_size(d.subset, num_examples, f"{d.name} {d.split}")
        parts = ((part.name, part.split or d.split) for part in parse_mix(d.mix))
        num_examples += sum(known_sizes(*part, own=own)[1] for part in parts)
    order, streams = resolve_order(
        d.order,
        d.streams,
        num_examples=num_examples,
        global_batch_size=global_batch_size,
        repeats=d.repeats,
    )
    return {
        "data.num_classes": num_classes,
        "data.num_examples": num_examples,
        "data.order": order,
        "data.streams": streams,
        "data.chunk_size": resolve_chunk_size(d.chunk_size, None),
    }


def known_sizes(
    name: str,
    split: str,
    *,
    num_classes: int | None = None,
    num_examples: int | None = None,
    own: Mapping[str, Any] = {},
) -> tuple[int, int]:
    """The number of classes and examples of a split, without reading the data set.

    Args:
      name: as in data.name; a config or version in it ("/" or ":") is ignored, except for VTAB.
      split: as in data.split, in TFDS notation.
      num_classes, num_examples: the user's values; None takes the known ones.
      own: the keys of `data` that only some data sets read.

    Raises:
      InputError: neither gives a number, or the split does not exist.
    """
    if num_classes is not None and num_examples is not None:
        return num_classes, num_examples
    known_name = name if name in _VTAB else name.partition(":")[0].partition("/")[0]
    known = SOURCES.make({"name": name, **own}).sizes() or (KNOWN_DATA | _VTAB).get(known_name)
    if known is None:
        given = {"data.num_classes": num_classes, "data.num_examples": num_examples}
        missing = [key for key, value in given.items() if value is None]
        why = f"unknown for data.name={name!r} without its files"
        raise InputError(*(f"{key}: {why}; set --config.{key}=..." for key in missing))
    known_classes, splits = known
    if num_examples is None:
        num_examples = splits.get(split)  # of a whole split, without importing TensorFlow
    if num_examples is None:
        infos = {
            part: tfds.core.SplitInfo(name=part, shard_lengths=[size], num_bytes=0)
            for part, size in splits.items()
        }
        num_examples = count_examples(split, infos, name)
    return num_classes or known_classes, num_examples
