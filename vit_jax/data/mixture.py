"""Mixtures: several data sets as one source, with their records one after the other.

`order.mixed_order` assigns each position to a data set, by weight.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.base.errors import InputError, collect_faults, few
from vit_jax.config import SOURCES, SplitKey, own_split
from vit_jax.config.sections import Data
from vit_jax.data.contract import Source, fingerprint
from vit_jax.data.division import DIVIDED
from vit_jax.data.host_tf import tf
from vit_jax.data.order import weight_units
from vit_jax.data.records import RecordFiles
from vit_jax.data.shard_files import WORD, canonical
from vit_jax.data.shards import parts_of

logger = logging.getLogger("vit_jax")

_TEXT_FORM = (
    "write NAME=WEIGHT or NAME@SPLIT=WEIGHT with a weight between 0 and 1, such as "
    "cifar10@train[:50%]=0.3"
)
_LIST_FORM = (
    "needs a dict with name, a weight between 0 and 1, and if needed data_dir and split, such as "
    "{'name': 'tar', 'data_dir': 'DIR', 'weight': 0.3}"
)
_MANY = 1_000_000  # records of a split whose parts are compared


@dataclasses.dataclass(frozen=True)
class Part:
    """An entry of `data.mix`: a data set and its weight.

    split, data_dir: None: as in `data`.
    """

    name: str
    split: str | None
    weight: float
    data_dir: str | None = None


def parse_mix(text: str) -> tuple[Part, ...]:
    """Parse "NAME=WEIGHT, NAME@SPLIT=WEIGHT", such as "cifar10@train[:50%]=0.3", or the text of a
    list of dicts, such as "[{'name': 'tar', 'data_dir': 'DIR', 'weight': 0.3}]".

    Raises: InputError if the text has another form, a weight is not between 0 and 1, or the weights
      leave nothing to the first data set, `data.name`.
    """
    parts, faults, is_list = [], [], _is_list(text)
    entries = _read_list(text) if is_list else [entry.strip() for entry in text.split(",")]
    for entry in filter(None, entries):
        part = _part_of(entry) if is_list else _parse_entry(entry)
        if part is None or not weight_units([part.weight])[1]:
            form = _LIST_FORM if is_list else _TEXT_FORM
            faults.append(f"data.mix: {entry!r} is not an entry; {form}")
            continue
        parts.append(part)
        if SOURCES.find(part.name).is_made:
            faults.append("data.mix: synthetic data cannot be mixed with others; leave them out")
    if parts and not faults and weight_units([part.weight for part in parts])[0] <= 0:
        faults.append(
            f"data.mix={text!r}: the weights add up to {sum(part.weight for part in parts):g} and "
            "leave nothing to data.name; make them add up to less than 1"
        )
    collect_faults(faults)
    return tuple(parts)


def without_places(text: str) -> str:
    """`data.mix` without the folders of a list of dicts, which may move while a run is stopped."""
    if not _is_list(text):
        return text
    return str([(part.name, part.split, part.weight) for part in parse_mix(text)])


def _is_list(text: str) -> bool:
    return text.strip()[:1] in ("[", "(")


def _parse_entry(entry: str) -> Part | None:
    found = re.fullmatch(r"([^@]+?)\s*(?:@\s*(.+?)\s*)?=\s*(\d*\.?\d+(?:[eE]-\d+)?)", entry)
    return Part(found[1], found[2], float(found[3])) if found else None


def _read_list(text: str) -> Sequence[Any]:
    """The items of the list that `text` is; `text` itself as the only one if it is none."""
    try:
        return list(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError):
        return [text]


def _part_of(entry: Any) -> Part | None:
    """The part that a dict describes; None if it lacks a key, or has a wrong one."""
    try:
        part = Part(**{"split": None, **entry})
    except TypeError:
        return None
    texts = all(isinstance(text or "", str) for text in (part.name, part.split, part.data_dir))
    fits = texts and part.name and isinstance(part.weight, float) and 0 < part.weight < 1
    return part if fits else None


def mixed_keys(data: Data) -> list[SplitKey]:
    """The splits of a mixture: first of `data.name`, then of `data.mix`.

    Raises: InputError if two of them are the same, or hold out images of different folders.
    """
    own = own_split(data)
    keys, seen = [own], {_in_place(own)}
    for part in parse_mix(data.mix):
        # The classes of pseudo labels are the teacher's, which were chosen before.
        classes = None if part.name == "pseudo" else own.classes
        place = part.data_dir or own.data_dir
        keys.append(SplitKey(part.name, part.split or data.split, place, classes))
        if _in_place(keys[-1]) in seen:
            raise InputError(
                f"data.mix: {part.name} {keys[-1].split} of data_dir={place!r} is there already; "
                "mix in another split, or in a list of dicts another data_dir"
            )
        seen.add(_in_place(keys[-1]))
    # A run holds out images by their names in one folder, which two folders may share.
    if len(places := {key.data_dir for key in seen if key.data_name in DIVIDED}) > 1:
        raise InputError(
            f"data.mix: has images in {len(places)} folders, {few(sorted(map(str, places)))}, but "
            "a run holds out images by name, whatever their folder; put all below one folder, or "
            "write the others as tar or Parquet"
        )
    return keys


def share_images(a: SplitKey, b: SplitKey) -> bool:
    """Whether two splits of a data set overlap, if it has many images: train and train[:50%]."""
    a, b = map(_in_place, (a, b))
    if (a.data_name, a.data_dir) != (b.data_name, b.data_dir) or a.data_name == "pseudo":
        return False
    sizes = {canonical(word): _MANY for key in (a, b) for word in WORD.findall(key.split)}
    try:
        parts = itertools.product(*(parts_of(key.split, sizes, "data.mix") for key in (a, b)))
    except InputError:
        return False  # numbers beyond _MANY
    return "all" in sizes or any(
        p == q and max(first, begin) < min(last, end) for (p, first, last), (q, begin, end) in parts
    )


def _in_place(key: SplitKey) -> SplitKey:
    """`key` with its folder as the disk has it, however it was written."""
    return key._replace(
        data_dir=key.data_dir and os.path.realpath(os.path.expanduser(key.data_dir))
    )


def concatenate(sources: Sequence[Source]) -> Source:
    """One source of all records; the records of each source follow the previous one's.

    If all have captions and one has no labels, the labels of the others are 0, too.

    Raises: InputError if the classes differ in names or order, if some sources are encoded and
      others are pixels, or if pixels differ in size.
    """
    if all(s.captions for s in sources) and not all(map(_has_labels, sources)):
        sources = [*map(_without_labels, sources)]
    first = sources[0]
    for other in sources[1:]:
        _check_alike(first, other)
    if nameless := [other.split for other in sources[1:] if _takes_names(first, other)]:
        logger.warning(
            "data.mix: the teacher of %s gives no names of classes; they are taken from "
            "%s %s, in the same order", nameless[0], first.name, first.split,
        )  # fmt: skip
    sizes = [source.num_examples for source in sources]
    first_ids = np.cumsum([0, *sizes])[:-1]

    def ask(method: str, record: int) -> Any:
        i = int(np.searchsorted(first_ids, record, side="right")) - 1
        return getattr(sources[i], method)(record - first_ids[i])

    def captions(records: Sequence[int]) -> Iterator[Sequence[str | bytes]]:
        ids = np.asarray(records)
        places = np.searchsorted(first_ids, ids, side="right") - 1
        own = [(ids[places == i] - first).tolist() for i, first in enumerate(first_ids)]
        found = [s.captions(its) for s, its in zip(sources, own, strict=True) if s.captions]
        return (next(found[i]) for i in places)

    def read_one(record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        functions = [lambda own_id, s=s: s.read(own_id) for s in sources]
        return _of_part(first_ids, record_id, functions)

    shapes = {source.image_shape for source in sources}
    return Source(
        name=" + ".join(source.name for source in sources),
        split=" + ".join(source.split for source in sources),
        num_examples=sum(sizes),
        num_classes=first.num_classes,
        class_names=first.class_names,
        image_shape=first.image_shape if len(shapes) == 1 else None,
        fingerprint=fingerprint("mixture", *(source.fingerprint for source in sources)),
        read=read_one if first.encoded else _read_many(sources, first_ids),
        record_name=functools.partial(ask, "record_name"),
        encoded=first.encoded,
        why_unreadable=functools.partial(ask, "why_unreadable"),
        record_files=_concatenate_files(sources, first_ids),
        channels=first.channels,
        multi_label=first.multi_label,
        soft_labels=first.soft_labels,
        part_sizes=tuple(sizes),
        chunks=next((source.chunks for source in sources if source.chunks), None),
        captions=first.captions and captions,
    )


def _has_labels(source: Source) -> bool:
    return source.class_names is not None or source.num_classes > 1


def _without_labels(source: Source) -> Source:
    """`source` with the labels of data that have none."""

    def unlabelled(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return example | {"label": tf.zeros_like(example["label"])}

    files = source.record_files
    return dataclasses.replace(
        source,
        num_classes=1,
        class_names=None,
        read=lambda ids: unlabelled(source.read(ids)),
        record_files=files
        and dataclasses.replace(files, parse=lambda *record: unlabelled(files.parse(*record))),
    )


def _check_alike(first: Source, other: Source) -> None:
    def names(source: Source) -> tuple[str, ...]:
        return source.class_names or tuple(map(str, range(source.num_classes)))

    if names(first) != names(other) and not _takes_names(first, other):
        pairs = itertools.zip_longest(names(first), names(other))
        label, pair = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise InputError(
            f"data.mix: label {label} is {pair[1]!r} in {other.name} {other.split} and {pair[0]!r} "
            f"in {first.name}; mix data sets with the same classes in the same order, which a "
            "classes.txt beside the files can name"
        )
    for key, what in (("multi_label", "several labels"), ("captions", "captions")):
        if bool(getattr(first, key)) != bool(getattr(other, key)):
            raise InputError(
                f"data.mix: {first.name} and {other.name} differ in whether images have {what}"
            )
    if not held_alike([first, other]):
        raise InputError(
            f"data.mix: {first.name} and {other.name} need images that are all encoded "
            "(data.reader=None), or all pixels of one size (data.reader=memory)"
        )


def _takes_names(first: Source, other: Source) -> bool:
    """Whether `other` has pseudo labels without names, of as many classes as `first` names."""
    of_pseudo = other.name == "pseudo" and other.class_names is None
    return of_pseudo and first.class_names is not None and first.num_classes == other.num_classes


def held_alike(sources: Sequence[Source]) -> bool:
    """Whether all sources are encoded or all are pixels of one size, as `concatenate` requires."""
    return len({None if source.encoded else source.image_shape for source in sources}) == 1


def _read_many(
    sources: Sequence[Source], first_ids: np.ndarray
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """`Source.read` for a mixture of pixel sources; takes ids of any shape and any part."""

    def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        result = sources[0].read(tf.minimum(record_ids, sources[0].num_examples - 1))
        for source, first_id in zip(sources[1:], first_ids[1:], strict=True):
            own_ids = tf.clip_by_value(record_ids - first_id, 0, source.num_examples - 1)
            for key, column in source.read(own_ids).items():
                ones = (1,) * (column.shape.rank - record_ids.shape.rank)
                chosen = tf.reshape(
                    record_ids >= first_id, tf.concat([tf.shape(record_ids), ones], 0)
                )
                result[key] = tf.where(chosen, column, result[key])
        return result

    return read


def _of_part(first_ids: np.ndarray, record_id: tf.Tensor, functions: Sequence[Callable]) -> Any:
    """Call the function of the part that holds the record, with the record's id in that part."""
    firsts = tf.constant(first_ids, tf.int64)
    part = tf.searchsorted(firsts, record_id[None], side="right")[0] - 1
    own_id = record_id - tf.gather(firsts, part)
    return tf.switch_case(part, [lambda f=f: f(own_id) for f in functions])


def _concatenate_files(sources: Sequence[Source], first_ids: np.ndarray) -> RecordFiles | None:
    """The record files of all sources; None if none has any.

    Sources without record files yield empty strings and are read in `parse`.
    """
    files_of = [source.record_files for source in sources]
    if not any(files_of):
        return None
    spec = tf.TensorSpec([], tf.string)

    def open_part(files: RecordFiles | None, own_id: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        empty = tf.data.Dataset.from_tensors("").repeat(count)
        records = empty if files is None else files.open(own_id, count)
        return tf.data.experimental.to_variant(records)

    def open_stretch(first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        functions = [lambda own_id, f=f: open_part(f, own_id, count) for f in files_of]
        return tf.data.experimental.from_variant(_of_part(first_ids, first, functions), spec)

    def parse(stored: tf.Tensor, record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        def parse_part(source: Source, own_id: tf.Tensor) -> dict[str, tf.Tensor]:
            files = source.record_files
            return source.read(own_id) if files is None else files.parse(stored, own_id)

        functions = [lambda own_id, s=s: parse_part(s, own_id) for s in sources]
        return _of_part(first_ids, record_id, functions)

    segments = [
        first_id + (np.zeros(1, np.int64) if files is None else files.segments)
        for files, first_id in zip(files_of, first_ids, strict=True)
    ]
    return RecordFiles(np.concatenate(segments), open_stretch, parse)
