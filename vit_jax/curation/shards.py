"""One shard of a prepared set: a pure function of a plan and a number, wherever it runs.

    OUTPUT/.prepared/plan.json          all that decides the bytes of the shards
    OUTPUT/.prepared/SPLIT-00000.json   of a finished shard: checksum, counts, broken pictures

Shard k of a split holds `shard_size` records of the source, broken ones left out. It is written
whole, and its record after it, so a process that is killed leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, cast

import numpy as np
from etils import epath

from vit_jax import data
from vit_jax.base.errors import InputError
from vit_jax.base.files import is_object, read_json, replaced, write_whole
from vit_jax.config import own_split
from vit_jax.config.sections import Data
from vit_jax.curation.formats import Facts, Row, find_format
from vit_jax.curation.pictures import Picture, Rule, read_pictures
from vit_jax.data.captions import as_text
from vit_jax.data.host_tf import tf
from vit_jax.data.order import record_order

FOLDER = ".prepared"
DECODED_BY = ("channels", "decoding", "exif", "pixel_range")  # keys of `data`
_BLOCK = 1 << 22  # bytes
_SYNTHETIC = (224, 224)  # the size of synthetic images, unless data.image_size gives it


@dataclasses.dataclass(frozen=True)
class Plan:
    """A prepared set: all that decides its bytes, and its place.

    data: the source; keys of training such as `ops` do not matter.
    splits: their names.
    captions: whether the captions are kept.
    output: the folder.
    format: a name in `FORMATS`.
    shard_size: records of the source in each shard.
    shuffle_seed: of the order in which the records are stored; None: the order of the source.
    """

    data: Data
    splits: tuple[str, ...]
    captions: bool
    output: str
    format: str
    rule: Rule
    shard_size: int
    shuffle_seed: int | None = None

    @property
    def folder(self) -> epath.Path:
        return epath.Path(self.output)

    def path(self, shard: Shard) -> epath.Path:
        return find_format(self.format).path(self.folder, shard.split, shard.place, shard.number)


class Shard(NamedTuple):
    """Shard `place` of `number` in a split; `fingerprint`: of the source."""

    split: str
    place: int
    number: int
    fingerprint: str

    def record(self, plan: Plan) -> epath.Path:
        """The file that says that the shard is finished."""
        return plan.folder / FOLDER / f"{self.split}-{self.place:05}.json"


@functools.lru_cache(maxsize=1)
def open_splits(plan: Plan) -> dict[str, data.Source]:
    """{split: its source}, opened once in each process.

    Raises: InputError if a split is missing or its labels cannot be stored.
    """
    divider, sources = data.Divider(anew=True), {}
    for split in plan.splits:
        source = open_split(plan.data, split, plan.captions, divider)
        if source.soft_labels:
            raise InputError(
                f"{plan.data.name} {split}: has probabilities for labels; needed: classes"
            )
        sources[split] = source
    return sources


@functools.lru_cache(maxsize=4)
def open_split(
    d: Data, split: str, captions: bool, divider: data.Divider | None = None
) -> data.Source:
    """A split of a source; records in data.exclude are left out of the split data.split.

    Raises: InputError if it is missing.
    """
    return data.make_source(
        d.name,
        split=split,
        image_size=d.image_size or _SYNTHETIC,
        data_dir=d.data_dir,
        reader=d.reader or data.ON_DISK,
        classes=d.classes,
        exclude=d.exclude if split == d.split else None,
        subset=own_split(d).subset if split == d.split else None,
        own=d.own,
        divider=divider or data.Divider(anew=True),
        multi_label=d.multi_label or None,
        captions=captions,
        **{key: getattr(d, key) for key in DECODED_BY},
    )


def shards_of(plan: Plan) -> list[Shard]:
    """All shards of a set."""
    found = []
    for split, source in open_splits(plan).items():
        number = -(-source.num_examples // plan.shard_size)
        found += [Shard(split, i, number, source.fingerprint) for i in range(number)]
    return found


def finished(plan: Plan, shard: Shard) -> dict[str, Any] | None:
    """The record of a finished shard; None if it is not finished, or its file is missing."""
    record = read_json(shard.record(plan), lambda found: found["sha256"])
    path = plan.path(shard)
    if record is None or (record["records"] and not path.exists()):
        return None
    is_whole = not record["records"] or path.stat().length == record["bytes"]
    return record if is_whole else None


def make_shard(plan: Plan, shard: Shard) -> dict[str, Any]:
    """Write a shard and its record, and return the record; does nothing if it is finished.

    Raises:
      InputError: the source has changed.
      ReadError: a file that was there cannot be read.
    """
    if (record := finished(plan, shard)) is not None:
        return record
    source = open_splits(plan)[shard.split]
    if source.fingerprint != shard.fingerprint:
        raise InputError(
            f"{plan.data.name} {shard.split}: has changed since the preparation began; begin again "
            "with a new --output"
        )
    first = shard.place * plan.shard_size
    places = np.arange(first, min(first + plan.shard_size, source.num_examples))
    tally, path = Tally(), plan.path(shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written(path) as file:
        rows = _rows(source, places, plan, tally)
        find_format(plan.format).write(file.name, rows, Facts.of(source))
        digest = digest_of(file)
        size = os.stat(file.name).st_size
    if not tally.records:
        path.unlink()  # a reader would refuse a file without records
    record = {"file": os.path.relpath(path, plan.folder), "sha256": digest, "bytes": size}
    record |= dataclasses.asdict(tally)
    write_whole(shard.record(plan), json.dumps(record) + "\n")
    return record


@contextlib.contextmanager
def _written(path: epath.Path) -> Iterator[IO[bytes]]:
    """An empty local file that takes the place of `path`; another writer may fill it by its name.

    Within the block it can be read through the result.
    """
    if is_object(path):
        with tempfile.NamedTemporaryFile() as local:
            with open(local.name, "rb") as written:
                yield written
            with open(local.name, "rb") as written, path.open("wb") as stored:
                shutil.copyfileobj(written, cast("IO[bytes]", stored), _BLOCK)
        return
    with replaced(path) as file, open(file.name, "rb") as written:
        yield written


def digest_of(file: IO[bytes]) -> str:
    """The SHA-256 of what is left to read, in hex digits."""
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(_BLOCK), b""):
        digest.update(block)
    return digest.hexdigest()


@dataclasses.dataclass
class Tally:
    """Counts of the records of a shard, or of a split.

    classes: {label: number of its pictures}.
    unlabelled: number of pictures without a class.
    height, width: the least, the sum, the greatest.
    broken: (name, reason) of the pictures that are left out.
    lost_captions: number of captions that are left out, as they are not UTF-8.
    """

    records: int = 0
    image_bytes: int = 0
    classes: dict[str, int] = dataclasses.field(default_factory=dict)
    unlabelled: int = 0
    height: Sequence[int] = ()
    width: Sequence[int] = ()
    broken: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    lost_captions: int = 0

    def count(self, picture: Picture, labels: Sequence[int]) -> None:
        classes = {str(label): 1 for label in labels if label >= 0}
        height, width = ([side] * 3 for side in picture.size)
        self.add(Tally(1, len(picture.image), classes, int(not classes), height, width))

    def add(self, other: Tally) -> None:
        self.records += other.records
        self.image_bytes += other.image_bytes
        self.unlabelled += other.unlabelled
        for label, number in other.classes.items():
            self.classes[label] = self.classes.get(label, 0) + number
        self.height = _joined(self.height, other.height)
        self.width = _joined(self.width, other.width)
        self.broken += other.broken
        self.lost_captions += other.lost_captions


def _joined(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    """(least, sum, greatest) of two sets of numbers; () of an empty one."""
    return (min(a[0], b[0]), a[1] + b[1], max(a[2], b[2])) if a and b else a or b


def _rows(source: data.Source, places: np.ndarray, plan: Plan, tally: Tally) -> Iterator[Row]:
    """The rows of the records at `places`, consecutive numbers; counts them in `tally`."""
    ids = places
    if plan.shuffle_seed is not None:
        order = record_order(source.num_examples, plan.shuffle_seed)
        ids = order(tf.constant(places, tf.int64)).numpy()
    all_captions = source.captions(ids.tolist()) if source.captions else itertools.repeat(())
    pictures = read_pictures(source, ids, plan.rule)
    picture, has_classes = next(pictures, None), bool(Facts.of(source).classes)
    found = zip(places.tolist(), ids.tolist(), _names(source, ids), all_captions, strict=False)
    for place, record, name, captions in found:
        if picture is None or picture.record != record:
            why = source.why_unreadable(record) or "it is damaged; save it again"
            tally.broken.append((source.record_name(record), why))
            continue
        labels = labels_of(picture) if has_classes else []
        texts = list[str]()
        for caption in captions:
            try:
                texts.append(as_text(caption))
            except UnicodeError:
                tally.lost_captions += 1
        tally.count(picture, labels)
        yield Row(place, picture.image, labels, texts, name)
        picture = next(pictures, None)


def labels_of(picture: Picture) -> list[int]:
    """The numbers of the classes of a picture; [-1] if its one label is unknown."""
    label = picture.label
    return np.flatnonzero(label).tolist() if label.ndim else [int(label)]


def _names(source: data.Source, ids: np.ndarray) -> Sequence[str]:
    """The original names of the files of these records; "" where they are unknown."""
    names = source.file_names
    if names is None or not len(ids):
        return [""] * len(ids)
    if (np.diff(ids) == 1).all():
        return names(int(ids[0]), int(ids[-1]) + 1)
    return [names(i, i + 1)[0] for i in ids.tolist()]
