"""Data sets in shards: files of many records each, such as tar or Parquet files.

A format describes its shards (`Shard`) and reads records by their index (`RecordFiles.open`);
shard_files.py finds the files of each split. This module does the rest: it takes the part that the
user asks for, numbers the labels, and makes the `Source`.

Record i of a split is the i-th in the order of the split's sorted files.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError, shown
from vit_jax.data.captions import one_by_one
from vit_jax.data.class_names import (
    as_name,
    number_labels,
    places_of,
    sorted_classes,
    spell,
)
from vit_jax.data.contract import Request, Source, fingerprint
from vit_jax.data.given_labels import counts_matter, say_others
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.images.formats import as_known_format, turn_of, why_unreadable
from vit_jax.data.records import RecordFiles, digest_records, read_now, read_one
from vit_jax.data.shard_files import CLASSES, WORD, canonical
from vit_jax.data.sources.tfds import find_parts


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The labels of n records as they are stored.

    names: the different labels, as text.
    codes: int32 (m,): their places in `names`, all labels of the first record, of the second, ...;
      -1 for one that cannot be read.
    counts: int32 (n,): how many labels each record has.
    """

    names: Sequence[str]
    codes: np.ndarray
    counts: np.ndarray

    def none(self) -> Labels:
        """Of as many records without labels."""
        return Labels((), self.codes[:0], 0 * self.counts)

    @classmethod
    def of(cls, rows: Iterable[Sequence[str] | None]) -> Labels:
        """From the labels of each record; None if they cannot be read."""
        place: dict[str, int] = {}
        codes, counts = list[int](), list[int]()
        for row in rows:
            found = [-1] if row is None else [place.setdefault(n, len(place)) for n in row]
            codes += found
            counts.append(len(found))
        return cls([*place], np.array(codes, np.int32), np.array(counts, np.int32))


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A file of records.

    path: of the file.
    labels: of its records.
    digest: of what it holds, such as names, sizes and labels; not of its place.
    keys: () -> the names of its records; called when a message or an evaluator needs them.
    why: index -> why the record cannot be read, if that does not show in its bytes, or "".
    captions: index -> the captions of the record; None: there are none, or they were not asked for.
    """

    path: str
    labels: Labels
    digest: str
    keys: Callable[[], Sequence[str]]
    why: Callable[[int], str] = lambda record: ""
    captions: Callable[[int], Sequence[str | bytes]] | None = None


class Part(NamedTuple):
    """The records skip, ..., skip + take - 1 of a shard."""

    shard: Shard
    skip: int
    take: int


# Parts of a split, in their order -> its files, without `parse`. A stored record is the bytes of an
# image file. A segment lies in one part.
OpenParts = Callable[[Sequence[Part]], RecordFiles]


def open_shards(
    request: Request,
    root: epath.Path,
    splits: Mapping[str, Sequence[Shard]],
    open_parts: OpenParts,
    class_names: Sequence[str] | None = None,
    *,
    counted: bool = True,
) -> Source:
    """The source of the split that is asked for, in TFDS notation.

    Classes are `class_names`; labels are read by `number_labels`. Where they are None, they
    are the labels of the training records, sorted, as numbers if all are numbers. With
    `multi_label` labels are float32 (C,), 1 for each class that the image shows; None: they are if
    an image has several labels, or none. If no record has a label, all labels are 0; so they are if
    captions are read, `multi_label` is False, and a record has no label, or several.

    Args:
      request: the split, and what holds for all data sets.
      root: the folder of the data set, in messages.
      splits: {split: its shards}, of `train` if there is one, and of the split that is asked for.
      open_parts: see `OpenParts`.
      class_names: None where nothing names them.
      counted: whether labels may be numbers of `class_names`.

    Raises: InputError if the split is empty, or labels are missing, unknown, or too many.
    """
    if request.captions:
        splits = _without_few_labels(splits, request.multi_label)
    records = _Records(_choose(request.split, splits, shown(root)), request)
    where = f"data.data_dir: {shown(root)}"
    training = splits.get("train") or [part.shard for part in records.parts]
    names, number_of = _find_classes(records, training, class_names, where, counted=counted)
    codes, counts, multi_label = _number_records(records, names, number_of, where)
    vector_size = len(names) if multi_label else None
    label_of = _read_labels(codes, counts, vector_size)

    def parse(stored: tf.Tensor, record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        label = label_of(record_id)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(label >= 0), [label])]):
            label = tf.identity(label)
        image = as_known_format(stored, request.reading)
        return {"image": image, "label": label, "mask": tf.ones([])}

    files = dataclasses.replace(open_parts(records.parts), parse=parse, knows_labels=True)

    def why(record: int) -> str:
        if not np.all(label_of(tf.constant(record, tf.int64)) >= 0):
            return "its label cannot be read; write it again"
        shard, place = records.find(record)
        if fault := shard.why(place):
            return fault
        stored = read_now(files, record, lambda stored, _: stored.numpy())
        changed = "its shard has changed since the run began, or cannot be read; restore it"
        return changed if stored is None else why_unreadable(stored, request.reading)

    identity: list[Any] = [[part.shard.digest, part.skip, part.take] for part in records.parts]
    places = places_of(names)
    if any(places.get(as_name(label), number) != number for label, number in number_of.items()):
        identity.append("numbers")  # though some are names, too
    digests = digest_records(files, len(counts))
    return Source(
        name=request.name,
        split=request.split,
        num_examples=len(counts),
        num_classes=len(names or (0,)),
        class_names=names or None,
        fingerprint=fingerprint(
            request.name, request.split, names or None, identity, digests, multi_label, request.exif
        ),
        read=lambda record_id: read_one(files, record_id, parse),
        record_name=records.name,
        encoded=True,
        why_unreadable=why,
        turn=lambda record: read_now(files, record, lambda stored, _: turn_of(stored.numpy())),
        record_files=files,
        file_names=records.file_names,
        multi_label=multi_label,
        captions=one_by_one(records.captions) if records.parts[0].shard.captions else None,
    )


def _without_few_labels(
    splits: Mapping[str, Sequence[Shard]], multi_label: bool | None
) -> Mapping[str, Sequence[Shard]]:
    """`splits` of data with captions; without labels if too few images have some."""
    counts = np.concatenate([shard.labels.counts for of in splits.values() for shard in of])
    if counts_matter(counts, multi_label):
        return splits
    return {
        name: [dataclasses.replace(shard, labels=shard.labels.none()) for shard in of]
        for name, of in splits.items()
    }


class _Records:
    """The records of some parts of shards, by their index."""

    def __init__(self, parts: Sequence[Part], request: Request):
        self.parts, self.request = parts, request
        self._ends = np.cumsum([part.take for part in parts])

    def find(self, record: int) -> tuple[Shard, int]:
        """The shard of a record, and its place there."""
        i = int(np.searchsorted(self._ends, record, side="right"))
        shard, skip, take = self.parts[i]
        return shard, int(record - self._ends[i]) + take + skip

    def name(self, record: int) -> str:
        shard, place = self.find(record)
        where = f"{pathlib.PurePath(shard.path).name} member {shown(shard.keys()[place])}"
        return f"{where} (record {record} of {self.request.name} {self.request.split})"

    def captions(self, record: int) -> Sequence[str | bytes]:
        shard, place = self.find(record)
        return shard.captions(place) if shard.captions else ()

    def file_names(self, start: int, stop: int) -> list[str]:
        """Of the records start, ..., stop - 1."""
        names: list[str] = []
        for end, (shard, skip, take) in zip(self._ends, self.parts, strict=True):
            first = max(start - end + take, 0)
            if first < min(stop - end + take, take):
                names += shard.keys()[skip + first : skip + min(stop - end + take, take)]
        return names


def _read_labels(
    codes: np.ndarray, counts: np.ndarray, vector_size: int | None
) -> Callable[[tf.Tensor], tf.Tensor]:
    """id -> label, int32 or, with a `vector_size`, float32 (C,); negative if it cannot be read."""
    codes_tensor = tf.constant(codes)
    if vector_size is None:
        return lambda record_id: tf.gather(codes_tensor, record_id)
    ends = tf.constant(np.append(0, np.cumsum(counts)))

    def label_of(record_id: tf.Tensor) -> tf.Tensor:
        start, stop = tf.unstack(tf.gather(ends, tf.stack([record_id, record_id + 1])))
        own = codes_tensor[start:stop]
        shown_C = tf.reduce_sum(tf.one_hot(own, vector_size), 0)
        return tf.where(tf.reduce_any(own < 0), -1.0, tf.minimum(shown_C, 1.0))

    return label_of


def _choose(split: str, splits: Mapping[str, Sequence[Shard]], where: str) -> list[Part]:
    """The parts of `split`, in TFDS notation."""
    lengths = {name: [len(shard.labels.counts) for shard in of] for name, of in splits.items()}
    instructions = tfds.core.utils.shard_utils.get_file_instructions
    return [
        Part(splits[name][int(found.filename)], found.skip, found.take)
        for name, start, stop in parts_of(split, {n: sum(of) for n, of in lengths.items()}, where)
        for found in instructions(start, stop, range(len(lengths[name])), lengths[name])
    ]


def parts_of(split: str, sizes: Mapping[str, int], where: str) -> list[tuple[str, int, int]]:
    """`tfds.find_parts` of splits with that many records, by any of their names."""
    split = WORD.sub(lambda word: canonical(word[0]), split)
    if sizes.get(split):  # without importing TFDS
        return [(split, 0, sizes[split])]
    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0)
        for name, size in sizes.items()
    }
    return find_parts(split, infos, where)


def _find_classes(
    records: _Records,
    training: Sequence[Shard],
    class_names: Sequence[str] | None,
    where: str,
    *,
    counted: bool,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The names of the classes, and {label: its class}; see `open_shards`."""
    of_training = {name for shard in training for name in shard.labels.names}
    labels = of_training.union(*(part.shard.labels.names for part in records.parts))
    known = records.request.divider.class_names
    if class_names is None:
        names, named_by, counted = sorted_classes(of_training, known), "train", False
    else:
        names, named_by = spell(class_names, known), CLASSES
    return names, number_labels(where, labels, names, named_by, counted=counted)


def _number_records(
    records: _Records, names: Sequence[str], number_of: Mapping[str, int], where: str
) -> tuple[np.ndarray, np.ndarray, bool]:
    """`Labels.codes` in the classes of `number_of`, `counts`, and whether labels are several."""
    all_codes, all_counts = [], []
    for shard, skip, take in records.parts:
        labels = shard.labels
        start, stop = labels.counts[:skip].sum(), labels.counts[: skip + take].sum()
        numbers = np.array([*(number_of[name] for name in labels.names), -1], np.int32)
        all_codes.append(numbers[labels.codes[start:stop]])
        all_counts.append(labels.counts[skip : skip + take])
    codes, counts = np.concatenate(all_codes), np.concatenate(all_counts)
    if not len(codes):  # no record has a label
        return np.zeros(len(counts), np.int32), np.ones_like(counts), False
    others, multi_label = np.flatnonzero(counts != 1), records.request.multi_label
    if len(others) and multi_label is False:
        names = [*map(records.name, others.tolist())]
        raise InputError(f"{where}: {say_others(names, f' of {records.request.split}')}")
    return codes, counts, bool(len(others)) if multi_label is None else multi_label
