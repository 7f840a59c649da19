"""Tables of images: Parquet files, and the Arrow files that `datasets.save_to_disk` writes.

pyarrow reads a column of images in groups of records: the row groups of Parquet, which it decodes
as a whole, and the record batches of Arrow, which stay on the disk until an image is used. It runs
in Python, and lets other Python code run while it reads and decodes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from etils import epath, epy

from vit_jax.base.errors import InputError, collect_faults, few, shown
from vit_jax.base.packages import need_package
from vit_jax.config.parts import key
from vit_jax.data.captions import NAMES, as_captions
from vit_jax.data.class_names import as_label
from vit_jax.data.contract import DataSet, Request, Source
from vit_jax.data.dear_values import Kept
from vit_jax.data.images.files import warn_once
from vit_jax.data.images.formats import why_file_unreadable
from vit_jax.data.order import Chunks
from vit_jax.data.ranges import RangedFile, is_remote, read_span
from vit_jax.data.records import RecordFiles, open_in_python
from vit_jax.data.retries import read_if_there, retried
from vit_jax.data.shard_files import Files, find_files, find_splits
from vit_jax.data.shards import Labels, Part, Shard, open_shards

with epy.lazy_imports():
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

T = TypeVar("T")
U = TypeVar("U")

_KEPT_BYTES = 1 << 30  # of decoded groups, in a process
_kept = Kept(_KEPT_BYTES)
_GROUP_BYTES = _KEPT_BYTES >> 3  # of a group at most, where all of them are more than are kept
_CAPTION_BYTES = 256  # of a row, by which their memory is estimated
_FILES_AT_ONCE = 16  # opened in parallel
_IMAGES = ("image", "img", "file", "filename", "file_name", "path")
_LABELS = ("label", "labels", "class")
_REWRITE = (
    'python -c "import pyarrow.parquet as p; f = p.ParquetFile({!r}); '
    "w = p.ParquetWriter('NEW.parquet', f.schema_arrow); "
    '[w.write_batch(b) for b in f.iter_batches(100)]; w.close()"'
)


class Table(NamedTuple):
    """A file.

    rows: number of records of each group.
    sizes: bytes that each group takes in memory.
    identity: changes with the content.
    read: (groups, column, field of a pair or None for both) -> the cells, a pa.ChunkedArray.
    """

    path: epath.Path
    schema: pa.Schema
    rows: Sequence[int]
    sizes: Sequence[int]
    identity: str
    read: Callable[[Sequence[int], str, str | None], pa.ChunkedArray]

    def feature(self, column: str) -> dict[str, Any]:
        """The notes of `datasets` on a column, or of the items of its lists."""
        noted = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        found = noted.get("info", {}).get("features", {}).get(column, {})
        found = found[0] if isinstance(found, list) else found
        return found.get("feature", found)

    def place(self, row: int) -> tuple[int, int]:
        """The group of a row, and the row in the group."""
        ends = np.cumsum(self.rows)
        group = int(np.searchsorted(ends, row, side="right"))
        return group, int(row - ends[group] + self.rows[group])


def open_parquet(path: epath.Path) -> Table:
    """Raises OSError or pa.ArrowInvalid if the file is not Parquet, or incomplete."""

    def opened(**how: Any) -> pq.ParquetFile:  # by its name pyarrow reads a file without Python
        return pq.ParquetFile(RangedFile(path) if is_remote(path) else os.fspath(path), **how)

    with opened() as file:
        metadata, schema = file.metadata, file.schema_arrow

    def read(groups: Sequence[int], column: str, field: str | None) -> pa.ChunkedArray:
        name = column if field is None else f"{column}.{field}"
        with opened(metadata=metadata) as file:
            return file.read_row_groups(groups, [name], use_threads=False).column(column)

    size = path.stat().length
    footer = read_span(os.fspath(path), size - metadata.serialized_size - 8, size)
    identity = hashlib.sha256(footer).hexdigest()  # of all sizes and statistics
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows, sizes = [g.num_rows for g in groups], [g.total_byte_size for g in groups]
    return Table(path, schema, rows, sizes, identity, read)


def open_arrow(path: epath.Path) -> Table:
    """Raises OSError or pa.ArrowInvalid if the file is no stream of Arrow, or incomplete.

    Raises InputError if it lies in an object store.
    """
    if is_remote(path):
        raise InputError(
            f"data.data_dir: {shown(path)} is in an object store, but Arrow files are mapped into "
            "memory; copy them to a disk, or write them as Parquet with ds.to_parquet"
        )
    stream = pa.ipc.open_stream(pa.memory_map(os.fspath(path)))
    batches = [*stream]

    def read(groups: Sequence[int], column: str, field: str | None) -> pa.ChunkedArray:
        del field
        return pa.chunked_array([batches[i].column(column) for i in groups])

    rows = [batch.num_rows for batch in batches]
    identity = f"{rows} {[batch.nbytes for batch in batches]}"
    return Table(path, stream.schema, rows, [0] * len(rows), identity, read)


class Parquet(DataSet):
    """The Parquet files below `data_dir`: a column of images, and one of labels or of captions.

    Images are the bytes of image files, their paths from the folder of the table, or pairs of the
    two, as Hugging Face's. Labels are numbers, text, or lists of these; captions are text or lists.
    """

    image_column: str | None = key(None, "None: `image` or `img`, or the only one of images")
    label_column: str | None = key(None, "None: `label` or `labels`, or the only one of classes")
    caption_column: str | None = key(None, "None: `caption`, `captions` or `text`")

    is_own = True
    suffix: ClassVar[str] = ".parquet"
    open_file: ClassVar[Callable[[epath.Path], Table]] = staticmethod(open_parquet)

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        return [*find_splits(data_dir, (cls.suffix,)).by_split, "all"]

    def find(self, request: Request) -> Files:
        """The files of the split that is asked for, and of `train`."""
        return find_files(request, (self.suffix,))

    def open(self, request: Request) -> Source:
        """Raises InputError naming what is broken: a file, its columns, or labels."""
        need_package(f"data.name={request.name!r}", "pyarrow", "parquet")
        files = self.find(request)
        tables = self._open_files(files.paths)
        first = next(iter(tables.values()))
        image = _find_column(first, self.image_column, _IMAGES, "Image", "image_column")
        label = _find_column(first, self.label_column, _LABELS, "ClassLabel", "label_column")
        if image is None:
            has = f"{shown(first.path)} has the columns {few(first.schema.names)}"
            raise InputError(f"data.image_column=None: {has}; name the one of the images")
        caption = None
        if request.captions:
            caption = _find_column(first, self.caption_column, NAMES, "", "caption_column")
        if label is None and caption is None:
            warn_once(
                f"{shown(files.root)}: all labels are 0, as the columns {few(first.schema.names)} "
                "are none of labels; if one is, name it by --config.data.label_column=..."
            )
        _check_types(tables.values(), image, label, caption)
        names = first.feature(label).get("names") if label else None
        read = functools.partial(_shard, image=image, label=label, caption=caption, names=names)
        shards = _at_once(read, tables.values())
        source = open_shards(
            request,
            files.root,
            files.look_up(dict(zip(tables, shards, strict=True))),
            lambda parts: _open_parts(parts, tables, image),
            names or files.class_names(),
            counted=names is None,
        )
        return dataclasses.replace(source, chunks=_chunks(tables.values()))

    def _open_files(self, paths: Sequence[epath.Path]) -> dict[str, Table]:
        """{path: its table}; raises InputError naming all files that cannot be read."""

        def opened(path: epath.Path) -> Table | str:
            try:
                return type(self).open_file(path)
            except (OSError, pa.ArrowException) as e:
                return f"data.data_dir: {shown(path)} cannot be read ({_line(e)}); copy it again"

        found = _at_once(opened, paths)
        collect_faults([fault for fault in found if isinstance(fault, str)])
        return {os.fspath(table.path): table for table in found if isinstance(table, Table)}


class Arrow(Parquet):
    """The Arrow files below `data_dir`, a folder that `datasets.save_to_disk` wrote."""

    suffix: ClassVar[str] = ".arrow"
    open_file: ClassVar[Callable[[epath.Path], Table]] = staticmethod(open_arrow)

    def find(self, request: Request) -> Files:
        """As `Parquet.find`, without the files in which `datasets` keeps results of its own."""
        root, by_split = super().find(request)
        return Files(root, {
            split: [path for path in found if not path.name.startswith("cache-")]
            for split, found in by_split.items()
        })  # fmt: skip


def _at_once(call: Callable[[T], U], values: Iterable[T]) -> list[U]:
    """call(value) of each, several side by side."""
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return [*threads.map(call, values)]


def _line(error: Exception) -> str:
    return shown(str(error).partition("\n")[0].rstrip("."))


def _find_column(
    table: Table, asked: str | None, names: Sequence[str], feature: str, key: str
) -> str | None:
    """The column that `asked` or one of `names` names, or the only one of that feature, if any."""
    columns = table.schema.names
    noted = [name for name in columns if table.feature(name).get("_type") == feature]
    usual = [asked] if asked else [name for name in names if name in columns]
    if asked not in (None, *columns) or (len(noted) > 1 and not usual):
        has = f"{shown(table.path)} has the columns {few(columns if asked else noted)}"
        raise InputError(f"data.{key}={asked!r}: {has}; set --config.data.{key} to one of them")
    return next(iter([*usual, *noted]), None)


def _check_types(
    tables: Iterable[Table], image: str, label: str | None, caption: str | None
) -> None:
    """Raise InputError unless all tables have these columns, of one type, which can be read."""
    first = next(iter(tables))
    found = first.schema.field(image).type
    fields = {field.name: field.type for field in found} if pa.types.is_struct(found) else {}
    if not {found, fields.get("bytes"), fields.get("path")} & {
        pa.binary(), pa.large_binary(), pa.string(), pa.large_string()
    }:  # fmt: skip
        raise InputError(
            f"data.image_column={image!r}: {shown(first.path)} has there {found}; needed: the "
            "bytes of image files, their paths, or both, as `datasets` writes them: "
            f"ds.cast_column({image!r}, datasets.Image()).to_parquet(...)"
        )
    if caption is not None and _as_bytes(kind := first.schema.field(caption).type) is None:
        raise InputError(
            f"data.caption_column={caption!r}: {shown(first.path)} has there {kind}; needed: text, "
            "or lists of text"
        )
    for table in tables:
        if table.schema.equals(first.schema, check_metadata=True):
            continue
        for column in filter(None, (image, label, caption)):
            names = [table.feature(column).get("names") or () for table in (first, table)]
            said = [_say_type(t, column, names[::-1][i]) for i, t in enumerate((first, table))]
            if said[0] != said[1] or names[0] != names[1]:
                raise InputError(
                    f"data.data_dir: the column {column!r} is {said[0]} in {shown(first.path)}, "
                    f"but {said[1]} in {shown(table.path)}; write all files alike"
                )


def _say_type(table: Table, column: str, others: Sequence[str]) -> str:
    """A column's type, with the first of its classes that `others` lacks, if it has any."""
    if column not in table.schema.names:
        return "missing"
    names = table.feature(column).get("names") or ()
    own = [name for name in names if name not in others] or names
    of = f" of {len(names):,} classes, such as {few(own)}" if names else ""
    return f"{table.schema.field(column).type}{of}"


def _shard(
    table: Table, image: str, label: str | None, caption: str | None, names: Sequence[str] | None
) -> Shard:
    """The labels, names and captions of the records of a table."""
    groups, num_rows = range(len(table.rows)), sum(table.rows)

    @functools.cache
    def keys() -> list[str]:
        kind, paths = table.schema.field(image).type, [None] * num_rows
        if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0:
            paths = pc.struct_field(table.read(groups, image, "path"), "path").to_pylist()
        elif not (pa.types.is_struct(kind) or _is_bytes(kind)):
            paths = table.read(groups, image, None).to_pylist()
        return [path or f"row {i}" for i, path in enumerate(paths)]

    def why(row: int) -> str:
        group, place = table.place(row)
        try:
            content, path = _image(table, image, group, place)
        except (OSError, pa.ArrowException) as e:
            return f"its row group {group} cannot be read: {_line(e)}; copy the file again"
        if content is not None:
            return ""
        if path is None:
            return "the table has no image there; leave the row out"
        return why_file_unreadable(table.path.parent / path)

    if label is None:
        labels = Labels.of([()] * num_rows)
    else:
        labels = _labels(table.read(groups, label, None), names, f"{shown(table.path)}: {label}")
    digest = hashlib.sha256(labels.codes.tobytes() + labels.counts.tobytes()).hexdigest()
    identity = f"{table.identity} {digest} {labels.names}"
    captions = None if caption is None else functools.partial(_captions, table, caption)
    return Shard(os.fspath(table.path), labels, identity, keys, why, captions)


def _labels(cells: pa.ChunkedArray, names: Sequence[str] | None, where: str) -> Labels:
    """The labels in a column: `names` of numbers, or else text.

    Raises: InputError if one is no label.
    """
    values = [cell if isinstance(cell, list) else [cell] for cell in cells.to_pylist()]
    name_of, unknown = dict(enumerate(names or ())), list[str]()
    text: dict[Any, str | None] = {}
    for value in {value: None for row in values for value in row}:
        try:
            text[value] = label = as_label(value)
            if names and label is not None:
                text[value] = name_of[value]
        except (ValueError, KeyError):
            unknown.append(str(value))
    if unknown:
        needed = f"numbers from 0 to {len(name_of) - 1}" if names else "whole numbers or text"
        raise InputError(f"data.label_column: {where} has {few(unknown)}; needed: {needed}")
    return Labels.of([label for v in row if (label := text[v]) is not None] for row in values)


def _as_bytes(kind: pa.DataType) -> pa.DataType | None:
    """The type of the same captions as bytes, which need not be UTF-8; None for other columns."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        own = _as_bytes(kind.value_type)
        return None if own is None else pa.large_list(own)
    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return pa.large_binary() if kind in texts else None


def _captions(table: Table, caption: str, row: int) -> list[str | bytes]:
    """The captions of a row; none if its group cannot be read."""
    group, place = table.place(row)

    def read() -> pa.ChunkedArray:
        return table.read([group], caption, None).cast(_as_bytes(table.schema.field(caption).type))

    where = os.fspath(table.path), table.identity, group, caption
    size = _CAPTION_BYTES * table.rows[group]
    try:
        cells = retried(lambda: _kept.get(where, read, size), table.path)
    except (OSError, pa.ArrowException) as e:
        what = f"the captions of its row group {group} cannot be read: {_line(e)}"
        warn_once(f"{shown(table.path)}: {what}; copy the file again")
        return []
    return as_captions(cells[place].as_py())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())


def _images(table: Table, image: str, group: int) -> tuple[pa.Array | None, pa.Array | None]:
    """The bytes and the paths of the images of a group, as far as the table has them."""
    cells = table.read([group], image, None).combine_chunks()
    if not pa.types.is_struct(cells.type):
        return (cells, None) if _is_bytes(cells.type) else (None, cells)
    content, paths = (
        pc.struct_field(cells, name) if cells.type.get_field_index(name) >= 0 else None
        for name in ("bytes", "path")
    )
    return content, paths


def _image(table: Table, image: str, group: int, row: int) -> tuple[bytes | None, str | None]:
    """The bytes and the path of an image, as far as the table has them; reads all of its group."""
    key = os.fspath(table.path), table.identity, group, image
    columns = _kept.get(key, lambda: _images(table, image, group), table.sizes[group])
    content, path = (None if column is None else column[row].as_py() for column in columns)
    return content, path


def _open_parts(parts: Sequence[Part], tables: Mapping[str, Table], image: str) -> RecordFiles:
    """See `shards.OpenParts`."""
    places = []  # of each segment: table, group, first row in the group, number of records
    for part in parts:
        table, end = tables[part.shard.path], 0
        for group, rows in enumerate(table.rows):
            start, end = end, end + rows
            first, stop = max(start, part.skip), min(end, part.skip + part.take)
            if first < stop:
                places.append((table, group, first - start, stop - first))
    segments = np.cumsum([0, *(count for *_, count in places)])[:-1]

    def read_one(record: int) -> bytes:
        if record < 0:
            return b""
        i = np.searchsorted(segments, record, side="right") - 1
        table, group, skipped, _ = places[i]
        try:
            row = int(record - segments[i]) + skipped
            content, path = retried(lambda: _image(table, image, group, row), table.path)
            if content is None and path is not None:
                content = read_if_there(table.path.parent / path)
        except (OSError, pa.ArrowException):
            return b""
        return content or b""

    return open_in_python(segments, lambda ids: [*map(read_one, ids)])


def _chunks(tables: Iterable[Table]) -> Chunks | None:
    """How to read groups that are too many to be kept; None: in any order.

    Raises: InputError if a group is too large.
    """
    if sum(sum(table.sizes) for table in tables) <= _KEPT_BYTES:
        return None
    table = max(tables, key=lambda table: max(table.sizes, default=0))
    size = max(table.sizes)
    if size > _GROUP_BYTES:
        raise InputError(
            f"data.data_dir: {shown(table.path)} has a row group of {size >> 20:,} MiB, which is "
            f"read as a whole; needed: at most {_GROUP_BYTES >> 20}; write it again with row "
            f"groups of 100 images: {_REWRITE.format(os.fspath(table.path))}"
        )
    return Chunks(max(table.rows), _KEPT_BYTES // (2 * size))
