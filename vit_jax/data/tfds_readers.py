"""Readers of the records of a prepared TFDS data set: the values of `data.reader`.

    memory        read all records at once; decode them too if features.json fixes the size
    offsets       read each record on demand from TFRecord files, by its byte offset
    array_record  read each record on demand from array_record files
    on_disk       offsets or array_record, depending on the files; not for a config
    None          memory if files and pixels are small and fit, else on_disk

With every reader, record i of a split is the i-th in the order of the split's files.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable

import numpy as np
import psutil
from etils import epath

from vit_jax.data import host_ops, tfrecord
from vit_jax.data.elements import PARALLEL_CALLS, Elements
from vit_jax.data.host_tf import tf
from vit_jax.data.record_files import RecordFiles, stored_labels, stored_records
from vit_jax.data.sources import read_tensors
from vit_jax.errors import InputError, nearest

RECORDS_AT_ONCE = 1024
_SMALL_BYTES = 1 << 30  # files and pixels up to this size are held in memory by default

# The file format of each reader; `memory` uses the reader of the files' format.
FORMATS = {"offsets": "tfrecord", "array_record": "array_record"}
READERS = ("memory", *FORMATS)
ON_DISK = "on_disk"


def check_reader(reader: str | None) -> None:
    """Raise InputError if `reader` is neither None nor in READERS."""
    if reader is not None and reader not in READERS:
        raise InputError(f"data.reader={reader!r}: {nearest(reader, READERS)}")


def choose_reader(reader, info, parts, num_examples, image_shape) -> str:
    """The reader of a split, one of READERS: `reader` if given, else chosen by size and format.

    Args:
      reader: as for `tfds_source`.
      info: tfds.core.DatasetInfo.
      parts: TFDS's file instructions, in the order of the records.
      num_examples: number of records in the split.
      image_shape: (H, W, 3) if all images have the same size, else None.

    Raises: InputError if a file is missing, or `reader` does not read the format or needs more
      memory than there is.
    """
    by_format = {file_format: reader for reader, file_format in FORMATS.items()}
    stored_as = info.file_format.value
    if stored_as not in by_format:
        raise InputError(
            f"data.name: {info.full_name} is stored as {stored_as}; prepare it again as "
            f"{' or '.join(by_format)}"
        )
    on_disk = by_format[stored_as]
    if reader == ON_DISK:
        reader = on_disk
    if reader not in (None, "memory", on_disk):
        raise InputError(
            f"data.reader={reader!r}: {info.full_name} is stored as {stored_as}; "
            f"set data.reader to {on_disk} or memory, or leave it out"
        )
    encoded_bytes = 0
    for part in parts:
        path = epath.Path(part.filename)
        if not path.exists():
            raise InputError(f"data.data_dir: {path} is missing; copy or prepare it again")
        encoded_bytes += path.stat().length * part.take / part.examples_in_shard
    pixel_bytes = num_examples * math.prod(image_shape) if image_shape else 0
    needed = 2 * (encoded_bytes + pixel_bytes)  # loading holds everything twice for a moment
    available = min(psutil.virtual_memory().available, _container_memory())
    if reader == "memory" and needed > available:
        raise InputError(
            f"data.reader='memory': loading {num_examples} examples takes about "
            f"{needed / 2**30:.1f} GiB and this host has {available / 2**30:.1f} GiB free; leave "
            "data.reader out, or read a part (data.split='train[:10%]')"
        )
    small = encoded_bytes + pixel_bytes <= _SMALL_BYTES and needed <= available
    return reader or ("memory" if small else on_disk)


def _container_memory() -> float:
    """Free bytes under the container's memory limit (cgroup 2); infinite if there is none."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return math.inf


def open_files(info, parts, parse: Callable) -> RecordFiles:
    """The record files of `parts`; `parse` becomes `RecordFiles.parse`.

    Raises: InputError if a file is damaged or its number of records is wrong.
    """
    segments = np.cumsum([0, *(part.take for part in parts)])[:-1]
    openers = {"tfrecord": _open_tfrecord, "array_record": _open_array_record}
    return RecordFiles(segments, openers[info.file_format.value](parts, segments), parse)


def _open_tfrecord(parts, segments: np.ndarray) -> Callable:
    """Make `RecordFiles.open` for TFRecord files."""
    files = sorted({part.filename for part in parts})
    offsets_of = dict(zip(files, tfrecord.record_offsets(files), strict=True))
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

    def open_stretch(first, count):
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


def _open_array_record(parts, segments: np.ndarray) -> Callable:
    """Make `RecordFiles.open` for array_record files."""
    del segments  # the data source has its own table
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(list(parts))

    def read(first, count):
        try:
            return np.array(records.__getitems__(range(first, first + count)), dtype=object)
        except RuntimeError as e:  # damage, which is permanent, or a failing store, which is not
            if "Corrupted" in str(e):
                raise ValueError(str(e)) from e  # TensorFlow's InvalidArgumentError
            raise

    def open_stretch(first, count):
        at_once = tf.data.Dataset.from_tensors((first, count)).map(
            lambda first, count: tf.ensure_shape(
                tf.numpy_function(read, [first, count], tf.string, stateful=False), [None]
            )
        )
        return at_once.unbatch()

    return open_stretch


def read_all(files: RecordFiles, num_examples: int, image_shape) -> Callable:
    """Read a split into memory and make its `Source.read`; broken records are masked."""
    ids = tf.data.Dataset.range(num_examples)
    stored = stored_records(files, ids.batch(RECORDS_AT_ONCE))

    def load(record_id, stored):
        example = files.parse(stored, record_id)
        if image_shape is not None:
            pixels = tf.ensure_shape(host_ops.to_pixels(example["image"]), image_shape)
            example |= {"image": pixels}
        return record_id, example["image"], example["label"]

    loaded = tf.data.Dataset.zip(ids, stored).map(load, PARALLEL_CALLS).ignore_errors()
    if image_shape is None:
        images = np.full(num_examples, b"", object)
    else:
        images = np.zeros((num_examples, *image_shape), np.uint8)
    labels, mask = np.full(num_examples, -1, np.int32), np.zeros(num_examples, np.float32)
    for record_ids, image, label in Elements(loaded.batch(RECORDS_AT_ONCE)):
        images[record_ids], labels[record_ids], mask[record_ids] = image, label, 1
    broken = np.flatnonzero(mask == 0)
    if len(broken):
        ids = tf.data.Dataset.from_tensor_slices(broken).batch(RECORDS_AT_ONCE)
        for record_id, label in Elements(stored_labels(files, ids)):
            labels[record_id] = label
    return read_tensors(images, labels, mask)
