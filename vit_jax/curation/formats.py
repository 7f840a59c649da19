"""Formats of prepared sets: how a shard is written, and the files that describe the whole set.

    array_record, tfrecord   OUTPUT/1.0.0/NAME-SPLIT.tfrecord-00000-of-00010, as TFDS reads them;
                             NAME is the name of the folder OUTPUT
    tar                      OUTPUT/SPLIT-00000.tar and OUTPUT/classes.txt, as WebDataset has them
    parquet                  OUTPUT/SPLIT-00000.parquet, as Hugging Face's `datasets` reads them

The bytes of a shard depend on its rows and on the versions of the libraries, on nothing else.
"""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from etils import epath, epy

from vit_jax.base.files import write_whole
from vit_jax.base.packages import need_package
from vit_jax.config.registries import SOURCES
from vit_jax.data.class_names import places_of
from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.shard_files import CLASSES

with epy.lazy_imports():
    import pyarrow as pa
    import pyarrow.parquet as pq
    from array_record.python import array_record_module

_VERSION = "1.0.0"
_ROWS_OF_GROUP = 100  # a reader decodes a row group of Parquet as a whole


class Row(NamedTuple):
    """A record of a prepared set.

    place: its number in the split of the source.
    labels: the numbers of its classes, [-1] for an unknown one; () in a set without classes.
    name: of the original file; "" if unknown.
    """

    place: int
    image: bytes
    labels: Sequence[int]
    captions: Sequence[str]
    name: str

    @property
    def extension(self) -> str:
        return "jpg" if self.image.startswith(b"\xff\xd8") else "png"


class Facts(NamedTuple):
    """Facts that hold for all records of a set; `classes`: names, () if there are no classes."""

    classes: tuple[str, ...]
    multi_label: bool
    captions: bool
    names: bool

    @classmethod
    def of(cls, source: Source) -> Facts:
        classes = source.class_names or ()
        if not classes and source.num_classes > 1:
            classes = tuple(map(str, range(source.num_classes)))
        has_texts = source.captions is not None, source.file_names is not None
        return cls(classes, source.multi_label, *has_texts)


def _digits_of(classes: Sequence[str]) -> int:
    """More digits than any name has, if the number of a class is another's name; else 0."""
    places = places_of(classes)
    is_name = any(places.get(str(i), i) != i for i in range(len(classes)))
    return 1 + max(map(len, classes)) if is_name else 0


class Tar:
    """Members PLACE.jpg or .png, PLACE.cls with the label, PLACE.json with captions or labels.

    The original name of the file follows the place, if it is known: PLACE/NAME.jpg. A picture
    without a label has no PLACE.cls. If the number of a class is the name of another, all labels
    are in PLACE.json, as numbers with so many zeros in front that they are no names.
    """

    reads: ClassVar[str] = "tar"

    def path(self, output: epath.Path, split: str, shard: int, number: int) -> epath.Path:
        return output / f"{split}-{shard:05}.tar"

    def fault(self, output: epath.Path, facts: Facts) -> str:
        """The reason why the format cannot hold a set; "" if it can."""
        return ""

    def write(self, path: str, rows: Iterable[Row], facts: Facts) -> None:
        digits = _digits_of(facts.classes)
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as tar:
            for row in rows:
                key = f"{row.place:09}"
                if stem := re.sub(r"[^\w-]", "_", pathlib.PurePath(row.name).stem):
                    key += f"/{stem.encode()[:80].decode(errors='ignore')}"
                for extension, content in self._members(row, facts, digits):
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))

    def _members(self, row: Row, facts: Facts, digits: int) -> Iterable[tuple[str, bytes]]:
        yield row.extension, row.image
        told: dict[str, Any] = {"caption": [*row.captions]} if facts.captions else {}
        if digits:  # a reader would take some labels for names; see `number_labels`
            told["label"] = [f"{label:0{digits}}" for label in row.labels if label >= 0]
        elif facts.multi_label:
            told["label"] = [facts.classes[label] for label in row.labels]
        elif facts.classes and row.labels[0] >= 0:
            yield "cls", str(row.labels[0]).encode()
        if told:
            yield "json", json.dumps(told).encode()

    def describe(self, output: epath.Path, facts: Facts, splits: Splits) -> None:
        """Write the files that describe the whole set."""
        if facts.classes:
            write_whole(output / CLASSES, "".join(f"{name}\n" for name in facts.classes))


class Parquet:
    """Columns `image` (bytes and path), `label` and `caption`, with the notes of `datasets`."""

    reads: ClassVar[str] = "parquet"

    def path(self, output: epath.Path, split: str, shard: int, number: int) -> epath.Path:
        return output / f"{split}-{shard:05}.parquet"

    def fault(self, output: epath.Path, facts: Facts) -> str:
        return ""

    def write(self, path: str, rows: Iterable[Row], facts: Facts) -> None:
        schema = self._schema(facts)
        values = (self._values(row, facts) for row in rows)
        with pq.ParquetWriter(path, schema) as writer:
            while group := [*itertools.islice(values, _ROWS_OF_GROUP)]:
                writer.write_table(pa.Table.from_pylist(group, schema))

    def _values(self, row: Row, facts: Facts) -> dict[str, Any]:
        """Values of a row by column; the schema may lack the last two."""
        name = row.name.encode(errors="surrogateescape").decode(errors="replace")
        image = {"bytes": row.image, "path": name or f"{row.place:09}.{row.extension}"}
        label = [*row.labels] if facts.multi_label else next(iter(row.labels), None)
        return {"image": image, "label": label, "caption": [*row.captions]}

    def _schema(self, facts: Facts) -> pa.Schema:
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns: dict[str, tuple[Any, Any]] = {"image": (image, {"_type": "Image"})}
        if facts.classes:
            noted: Any = {"names": [*facts.classes], "_type": "ClassLabel"}
            one = pa.int64()
            several = pa.list_(one), {"feature": noted, "_type": "List"}
            columns["label"] = several if facts.multi_label else (one, noted)
        if facts.captions:
            text = {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"}
            columns["caption"] = pa.list_(pa.string()), text
        info = {"info": {"features": {name: noted for name, (_, noted) in columns.items()}}}
        schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
        return schema.with_metadata({"huggingface": json.dumps(info)})

    def describe(self, output: epath.Path, facts: Facts, splits: Splits) -> None:
        """Nothing: each file describes itself."""


class TfRecord:
    """TFRecord files of TFDS, with the features `image`, `label`, `caption` and `file_name`."""

    reads: ClassVar[str] = ""  # by the name of the folder
    kind: ClassVar[str] = "tfrecord"

    def path(self, output: epath.Path, split: str, shard: int, number: int) -> epath.Path:
        name = f"{output.name}-{split}.{self.kind}-{shard:05}-of-{number:05}"
        return output / _VERSION / name

    def fault(self, output: epath.Path, facts: Facts) -> str:
        if facts.multi_label:
            return "TFDS sets have one label an image here; choose --format=tar or parquet"
        if not re.fullmatch("[a-z][a-z0-9_]*", output.name) or output.name in SOURCES:
            return (
                f"the folder's name {output.name!r} becomes the name of a TFDS set; give it one of "
                "small letters, digits and _ that is no data.name yet, such as birds"
            )
        return ""

    def write(self, path: str, rows: Iterable[Row], facts: Facts) -> None:
        with tf.io.TFRecordWriter(path) as writer:
            for row in rows:
                writer.write(_as_example(row, facts))

    def describe(self, output: epath.Path, facts: Facts, splits: Splits) -> None:
        label = tfds.features.ClassLabel(names=[*facts.classes] or ["none"])
        features: dict[str, Any] = {"image": tfds.features.Image(), "label": label}
        if facts.captions:
            features["caption"] = tfds.features.Sequence(tfds.features.Text())
        if facts.names:
            features["file_name"] = tfds.features.Text()
        template = tfds.core.ShardedFileTemplate(
            data_dir=output / _VERSION, dataset_name=output.name, filetype_suffix=self.kind
        )
        infos = [
            tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size,
                                filename_template=template.replace(split=split))
            for split, (lengths, size) in splits.items()
        ]  # fmt: skip
        tfds.folder_dataset.write_metadata(
            data_dir=output / _VERSION, features=features, split_infos=infos, check_data=False
        )


class ArrayRecord(TfRecord):
    """The same records in array_record files."""

    kind: ClassVar[str] = "array_record"

    def write(self, path: str, rows: Iterable[Row], facts: Facts) -> None:
        writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
        for row in rows:
            writer.write(_as_example(row, facts))
        writer.close()


def _as_example(row: Row, facts: Facts) -> bytes:
    """A tf.train.Example with the features that `TfRecord.describe` declares."""
    feature = {
        "image": _as_bytes([row.image]),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[*row.labels] or [0])),
    }
    if facts.captions:
        feature["caption"] = _as_bytes([caption.encode() for caption in row.captions])
    if facts.names:
        feature["file_name"] = _as_bytes([row.name.encode(errors="surrogateescape")])
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return example.SerializeToString(deterministic=True)


def _as_bytes(values: Sequence[bytes]) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


Splits = Mapping[str, tuple[Sequence[int], int]]  # {split: (records of each shard, bytes)}

FORMATS: Mapping[str, Callable[[], Tar | Parquet | TfRecord]] = {
    "array_record": ArrayRecord,
    "parquet": Parquet,
    "tar": Tar,
    "tfrecord": TfRecord,
}


def find_format(name: str) -> Tar | Parquet | TfRecord:
    if name == "parquet":
        need_package("--format=parquet", "pyarrow", "parquet")
    return FORMATS[name]()
