"""Sizes of public data sets, for planning and benchmarks on machines that lack the files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ml_collections import ConfigDict

from vit_jax.data.host_tf import tfds
from vit_jax.data.mixture import parse_mix
from vit_jax.data.subset import subset_size
from vit_jax.data.vtab import TASKS
from vit_jax.errors import InputError

# name -> classes, examples by split, from TFDS's catalogue. The catalogue lacks imagenet21k: these
# are the images of the release of 2011 (14,197,122) and the classes of published models.
KNOWN_DATA: dict[str, tuple[int, dict[str, int]]] = {
    "imagenet2012": (1000, {"train": 1_281_167, "validation": 50_000}),
    "imagenet21k": (21_843, {"train": 14_197_122}),
    "cifar10": (10, {"train": 50_000, "test": 10_000}),
    "cifar100": (100, {"train": 50_000, "test": 10_000}),
    "oxford_iiit_pet": (37, {"train": 3_680, "test": 3_669}),
    "oxford_flowers102": (102, {"train": 1_020, "validation": 1_020, "test": 6_149}),
    "digits": (10, {"train": 1_437, "test": 360}),
}
_SIMPLE = re.compile(r"(?P<name>\w+)(\[(?P<first>\d+%?)?:(?P<last>\d+%?)?\])?")
_VTAB = {f"vtab/{name}": (task.num_classes, task.sizes) for name, task in TASKS.items()}


def known_facts(config: ConfigDict) -> dict[str, int]:
    """{"data.num_classes", "data.num_examples"} of the training data, which are not read.

    Raises:
      InputError: as `known_sizes`, or `data.classes` is set without `data.num_examples`.
    """
    d = config.data
    num_classes, num_examples = d.num_classes, d.num_examples
    if d.classes is not None:
        if num_examples is None:
            raise InputError(
                f"data.num_examples: unknown for data.classes={d.classes}; set "
                "--config.data.num_examples=..."
            )
        num_classes = len(d.classes)
    if num_examples is None and d.mix:
        parts = parse_mix(d.mix)
        sizes = [known_sizes(part.name, part.split or d.split) for part in parts]
        num_classes, own = known_sizes(d.name, d.split, num_classes=num_classes)
        num_examples = own + sum(size for _, size in sizes)
    elif num_examples is None and d.subset is not None:
        num_classes, whole = known_sizes(d.name, d.split, num_classes=num_classes)
        num_examples = subset_size(d.subset, whole, f"{d.name} {d.split}")
    else:
        num_classes, num_examples = known_sizes(
            d.name, d.split, num_classes=num_classes, num_examples=num_examples
        )
    return {"data.num_classes": num_classes, "data.num_examples": num_examples}


def known_sizes(
    name: str, split: str, *, num_classes: int | None = None, num_examples: int | None = None
) -> tuple[int, int]:
    """The number of classes and examples of a split, without reading the data set.

    Args:
      name: as in data.name; a config or version in it ("/" or ":") is ignored, except for VTAB.
      split: as in data.split, in TFDS notation.
      num_classes, num_examples: the user's values; None takes the table's.

    Raises:
      InputError: neither gives a number, or the split does not exist.
    """
    if num_classes is not None and num_examples is not None:
        return num_classes, num_examples
    given = {"num_classes": num_classes, "num_examples": num_examples}
    missing = [f"data.{key}" for key, value in given.items() if value is None]
    table = KNOWN_DATA | _VTAB
    known_name = name if name in _VTAB else name.partition(":")[0].partition("/")[0]
    if known_name not in table:
        raise InputError(
            f"{' and '.join(missing)}: unknown for data.name={name!r} without its files; set "
            f"{' and '.join(f'--config.{key}=...' for key in missing)} (known: "
            f"{', '.join(KNOWN_DATA)}, vtab/TASK)"
        )
    known_classes, splits = table[known_name]
    if num_examples is None:
        num_examples = _count_simple(split, splits) or _count(split, splits, name)
    return num_classes or known_classes, num_examples


def _count_simple(split: str, splits: Mapping[str, int]) -> int | None:
    """The number of examples of one split, or of one slice of it without negative bounds.

    None for any other split, which TFDS counts. A plan that needs only this number answers seconds
    earlier without the import of TensorFlow.
    """
    found = _SIMPLE.fullmatch(split)
    if found is None or found["name"] not in splits:
        return None
    whole, bounds = splits[found["name"]], (found["first"], found["last"])
    if len({bound.endswith("%") for bound in bounds if bound}) > 1:
        return None
    first, last = (
        default if not bound
        else round(int(bound[:-1]) * whole / 100) if bound.endswith("%")
        else int(bound)
        for bound, default in zip(bounds, (0, whole), strict=True)
    )  # fmt: skip
    return last - first if first < last <= whole else None


def _count(split: str, splits: Mapping[str, int], name: str) -> int:
    """The number of examples of a split in TFDS notation; raises InputError if there are none."""
    infos = {
        part: tfds.core.SplitInfo(name=part, shard_lengths=[size], num_bytes=0)
        for part, size in splits.items()
    }
    try:
        parts = tfds.core.ReadInstruction.from_spec(split).to_absolute(infos)
    except ValueError as error:
        raise InputError(f"data.split={split!r} of {name}: {error}") from error
    sizes = [
        (splits[part.splitname] if part.to is None else part.to) - (part.from_ or 0)
        for part in parts
    ]
    if sum(sizes) < 1 or min(sizes) < 0:
        raise InputError(
            f"data.split={split!r} of {name} holds no examples, or ends before it begins"
        )
    return sum(sizes)
