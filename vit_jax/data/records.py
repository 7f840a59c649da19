"""Files of records, TFRecord or array_record: read by index, neighbours together.

A run of neighbouring records ("stretch") is read by opening its file once. order.py chooses the
records and their order; this module finds the stretches among them. A record that cannot be read
does not affect others.

A TFRecord file is a sequence of records. Each has its length (8 bytes), a checksum of the length
(4), its data, and a checksum of the data (4). The byte offsets of the records are computed once and
cached on disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import struct
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import cache_folder, replaced
from vit_jax.data.elements import PARALLEL_CALLS, untuned
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.retries import is_of_wrong_bytes, read_in_python, retried

_MAX_ROWS = 16  # rows of a stretch: longer ones save little and need memory for all rows at once
_STRETCHES_IN_FLIGHT = 8
_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FILES_AT_ONCE = 16  # scanned in parallel: most of the time is spent waiting for the disk


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFiles:
    """A source's way to read records from files.

    Attributes:
      segments: int64 (s,), sorted: the first record of each segment; a segment lies in one file.
      open: (first, count) -> tf.data.Dataset of `count` strings, the stored records; all must lie
        in one segment. At a record that cannot be read it raises an error or ends early.
      parse: (string, record_id) -> the result of `Source.read` for that record; raises an error if
        the string is no stored record. The empty string is never one.
      read: int64 (b,) -> the stored records (b,) of any ids, empty strings as in `stored_records`;
        None: `open` costs no more for each stretch.
      knows_labels: whether `parse` takes the label from elsewhere, so that any string gives it.
    """

    segments: np.ndarray
    open: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]
    parse: Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]] = lambda stored, record_id: {}
    read: Callable[[tf.Tensor], tf.Tensor] | None = None
    knows_labels: bool = False


def stored_records(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """Map a data set of ids, int64 (b,) each, to the stored records: single strings, in order.

    Equal neighbours are read once. The string is empty for id -1 and for a broken record.
    """
    if files.read is not None:
        pieces = ids.unbatch().batch(_MAX_ROWS)
        return pieces.map(files.read, _STRETCHES_IN_FLIGHT, deterministic=True).unbatch()
    segments = tf.constant(files.segments, tf.int64)
    grouped = ids.flat_map(
        lambda ids: tf.data.Dataset.from_tensor_slices(
            # Checks of the starts, which are right, would be a fifth of the graph.
            tf.RaggedTensor.from_row_starts(ids, stretch_starts(ids, segments), validate=False)
        )
    )
    stored = grouped.map(
        lambda ids: _read_stretch(files, ids),
        num_parallel_calls=_STRETCHES_IN_FLIGHT,
        deterministic=True,
    )
    return stored.unbatch()


def stored_values(
    files: RecordFiles, ids: tf.data.Dataset, value_of: Callable[[tf.Tensor, tf.Tensor], Any]
) -> tf.data.Dataset:
    """Map a data set of ids, int64 (b,) each, to single pairs (id, value_of(stored record, id)).

    Records for which `value_of` fails are left out.
    """
    stored = tf.data.Dataset.zip(ids.unbatch(), stored_records(files, ids))
    values = stored.map(lambda i, record: (i, value_of(record, i)), PARALLEL_CALLS)
    return values.ignore_errors()


def stored_labels(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """`stored_values` of the labels. Images are not decoded, and may be broken."""
    if files.knows_labels:
        labels = ids.unbatch().map(lambda i: (i, files.parse("", i)["label"]), PARALLEL_CALLS)
        return labels.ignore_errors()
    return stored_values(files, ids, lambda record, i: files.parse(record, i)["label"])


def read_one(files: RecordFiles, record_id: tf.Tensor, parse: Callable) -> Any:
    """Read one record and return parse(stored string, record_id)."""
    return parse(untuned(_open_surely(files, record_id)).get_single_element(), record_id)


def read_now(files: RecordFiles, record: int, parse: Callable) -> Any:
    """As `read_one`, outside of a graph; None for a broken record.

    Raises: ReadError if it cannot be read.
    """
    record_id, one = tf.constant(record, tf.int64), tf.constant(1, tf.int64)

    def read() -> Any:
        stored = untuned(files.open(record_id, one)).get_single_element()
        return parse(stored, record_id)

    try:
        return retried(read, f"record {record}")
    except (OSError, tf.errors.OpError, UnicodeDecodeError) as e:  # it may quote the record's bytes
        if is_of_wrong_bytes(e):
            return None
        raise


def _open_surely(files: RecordFiles, record_id: tf.Tensor) -> tf.data.Dataset:
    """One stored record, read again in Python if that fails; the empty string if it is broken."""

    def read(record: int) -> np.ndarray:
        stored = read_now(files, record, lambda stored, _: stored.numpy())
        return np.array(stored or b"", object)

    again = tf.data.Dataset.from_tensors(record_id).map(
        lambda record_id: tf.ensure_shape(read_in_python(read, record_id), [])
    )
    first = _whole(lambda: files.open(record_id, tf.constant(1, tf.int64)))
    return first.concatenate(again).take(1)


def _whole(make: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """The only element of make(); none if that fails.

    To ignore the errors of make() itself would ask a file that is missing forever.
    """
    one = tf.data.Dataset.from_tensors(0).map(lambda _: untuned(make()).get_single_element())
    return one.ignore_errors()


def digest_records(files: RecordFiles, num_examples: int) -> list[str]:
    """Digests of the first, middle and last record; they change if the order of records does."""

    def digest(stored: tf.Tensor, record_id: tf.Tensor) -> str:
        example = files.parse(stored, record_id)
        image, label = example["image"], example["label"].numpy()
        if image.dtype == tf.string and tf.io.is_jpeg(image):  # decoders differ in its pixels
            return hashlib.sha256(f"{label} ".encode() + image.numpy()).hexdigest()
        pixels = to_pixels(image).numpy()  # the compression of a PNG may differ
        identity = f"{label} {pixels.shape} ".encode()
        return hashlib.sha256(identity + pixels.tobytes()).hexdigest()

    records = (0, num_examples // 2, num_examples - 1)
    return [read_now(files, record, digest) or "broken" for record in records]


def stretch_starts(ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
    """The rows of `ids` (b,) at which a stretch begins: int64 (r,), starting with 0.

    Within a stretch each id equals the previous one or follows it in the same segment, or all are
    -1.
    """
    rows = tf.range(tf.size(ids, tf.int64))
    segment = tf.searchsorted(segments, ids, side="right")  # 0 only for padding
    step = ids[1:] - ids[:-1]
    breaks = (step < 0) | (step > 1) | (segment[1:] != segment[:-1])
    breaks = tf.concat([[True], breaks], 0)
    row_in_stretch = rows - tf.gather(
        tf.where(breaks)[:, 0], tf.cumsum(tf.cast(breaks, tf.int64)) - 1
    )
    return tf.where(breaks | (row_in_stretch % _MAX_ROWS == 0))[:, 0]


def _read_stretch(files: RecordFiles, ids: tf.Tensor) -> tf.Tensor:
    """The strings (k,) of a stretch; if reading them together fails, they are read one by one."""
    first = tf.maximum(ids[0], 0)
    count = tf.where(ids[0] < 0, tf.constant(0, tf.int64), ids[-1] - ids[0] + 1)
    at_once = tf.maximum(count, 1)

    together = _whole(
        lambda: files.open(first, count).take(count).batch(at_once, drop_remainder=True)
    )
    apart = tf.data.Dataset.range(first, first + count).flat_map(
        lambda record_id: _open_surely(files, record_id)
    )
    padding = tf.data.Dataset.from_tensors([""])
    either = together.concatenate(apart.batch(at_once)).concatenate(padding).take(1)
    return tf.gather(untuned(either).get_single_element(), tf.maximum(ids, 0) - first)


def open_files(file_format: str, parts: Sequence[Any], parse: Callable) -> RecordFiles:
    """The record files of TFDS's file instructions `parts`; `parse` becomes `RecordFiles.parse`.

    Raises: InputError if a file is damaged or its number of records is wrong.
    """
    segments = np.cumsum([0, *(part.take for part in parts)])[:-1]
    is_tfrecord = file_format == "tfrecord"
    opened = _open_tfrecord(parts, segments) if is_tfrecord else _open_array_record(parts)
    return RecordFiles(segments, opened, parse)


def _open_tfrecord(parts: Sequence[Any], segments: np.ndarray) -> Callable:
    """Make `RecordFiles.open` for TFRecord files."""
    files = sorted({part.filename for part in parts})
    offsets_of = dict(zip(files, record_offsets(files), strict=True))
    for part in parts:
        found = len(offsets_of[part.filename]) - 1
        if found != part.examples_in_shard:
            raise InputError(
                f"data.data_dir: {part.filename} holds {found} records, but dataset_info.json "
                f"says {part.examples_in_shard}; copy or prepare it again"
            )
    ends = [offsets_of[part.filename][part.skip : part.skip + part.take + 1] for part in parts]
    boundaries = tf.constant(np.concatenate(ends))  # for each part one more than its records
    paths, firsts = tf.constant([part.filename for part in parts]), tf.constant(segments)

    def open_stretch(first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        part = tf.searchsorted(firsts, first[None], side="right", out_type=tf.int64)[0] - 1
        begin, end = tf.unstack(tf.gather(boundaries, first + part + [0, count]))
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.gather(paths, part)[None],
            compression_type="",
            buffer_size=tf.maximum(end - begin, 1),  # so that the stretch is one read
            byte_offsets=begin[None],
        )
        spec = tf.TensorSpec([], tf.string)
        return tf.data.experimental.from_variant(variant, spec).take(count)

    return open_stretch


def _open_array_record(parts: Sequence[Any]) -> Callable:
    """Make `RecordFiles.open` for array_record files."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(list(parts))

    def read(first: int, count: int) -> np.ndarray:
        try:
            return np.array(records.__getitems__(range(first, first + count)), dtype=object)
        except RuntimeError as e:  # damage, which is permanent, or a failing store, which is not
            if "Corrupted" in str(e):
                raise ValueError(str(e)) from e  # TensorFlow's InvalidArgumentError
            raise

    def open_stretch(first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        at_once = tf.data.Dataset.from_tensors((first, count)).map(
            lambda first, count: tf.ensure_shape(
                tf.numpy_function(read, [first, count], tf.string, stateful=False), [None]
            )
        )
        return at_once.unbatch()

    return open_stretch


def open_in_python(
    segments: np.ndarray, read_rows: Callable[[np.ndarray], Sequence[bytes]], **fields: Any
) -> RecordFiles:
    """Files that Python reads.

    Args:
      segments, fields: of `RecordFiles`.
      read_rows: as `RecordFiles.read`, of arrays.
    """

    def read(ids: tf.Tensor) -> tf.Tensor:
        found = read_in_python(lambda ids: np.array(read_rows(ids), object), ids)
        return tf.ensure_shape(found, ids.shape)

    def open_stretch(first: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(tf.range(first, first + count)).map(read).unbatch()

    return RecordFiles(segments, open_stretch, read=read, **fields)


def record_offsets(paths: Sequence[epath.PathLike]) -> list[np.ndarray]:
    """For each file of n records the start of every record and the end of the last: int64 (n + 1,).

    Offsets are cached in $XDG_CACHE_HOME/vit_jax/tfrecord under the file's path, size and mtime.

    Raises: InputError if a file does not end at the end of a record.
    """
    cache = cache_folder("tfrecord")
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(lambda path: _cached_offsets(epath.Path(path), cache), paths))


def _cached_offsets(path: epath.Path, cache: pathlib.Path) -> np.ndarray:
    stat = path.stat()
    identity = f"{os.fspath(path)} {stat.length} {stat.mtime}"
    entry = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy"
    try:
        offsets = np.load(entry, allow_pickle=False)
        if offsets.dtype == np.int64 and offsets[-1] == stat.length:
            return offsets
    # Not cached yet, or damaged; SystemError: Python 3.11 cannot parse headers in several threads.
    except (OSError, ValueError, EOFError, SystemError):
        pass
    offsets = walk(path, stat.length)
    with contextlib.suppress(OSError):  # without the cache the next run scans the file again
        entry.parent.mkdir(parents=True, exist_ok=True)
        with replaced(entry) as file:
            np.save(file, offsets)
    return offsets


def walk(path: epath.Path, num_bytes: int) -> np.ndarray:
    """The start of every record in a file of `num_bytes`, and the end of the last one.

    Raises: InputError if the file does not end at the end of a record.
    """
    offsets = [0]
    opened: IO[bytes] = path.open("rb")
    with opened as file:
        while offsets[-1] < num_bytes:
            file.seek(offsets[-1])
            header = file.read(_HEADER_BYTES)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER_BYTES else 0
            offsets.append(offsets[-1] + _HEADER_BYTES + length + _FOOTER_BYTES)
    if offsets[-1] != num_bytes:
        raise InputError(
            f"data.data_dir: {path} is damaged, or compressed: its record {len(offsets) - 2} ends "
            f"at byte {offsets[-1]}, the file at byte {num_bytes}; copy or prepare it again"
        )
    return np.array(offsets, np.int64)
