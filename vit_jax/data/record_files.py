"""Files of records: a run of neighbouring records ("stretch") is read by opening its file once.

order.py chooses the records and their order; this module finds the stretches among them. A record
that cannot be read does not affect others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.data.elements import PARALLEL_CALLS, untuned
from vit_jax.data.host_tf import tf

_MAX_ROWS = 16  # rows of a stretch: longer ones save little and need memory for all rows at once
_STRETCHES_IN_FLIGHT = 8


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFiles:
    """A source's way to read records from files.

    Attributes:
      segments: int64 (s,), sorted: the first record of each segment; a segment lies in one file.
      open: (first, count) -> tf.data.Dataset of `count` strings, the stored records; all must lie
        in one segment. At a record that cannot be read it raises an error or ends early.
      parse: (string, record_id) -> the result of `Source.read` for that record; raises an error if
        the string is no stored record. The empty string is never one.
    """

    segments: np.ndarray
    open: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]
    parse: Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]


def stored_records(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """Map a data set of ids, int64 (b,) each, to the stored records: single strings, in order.

    Equal neighbours are read once. The string is empty for id -1 and for a record that cannot be
    read.
    """
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


def stored_labels(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """Map a data set of ids, int64 (b,) each, to single (id, label) pairs.

    Records whose label cannot be read are left out. Images are not decoded, and may be broken.
    """

    def label_of(record_id, stored):  # in the map that parses, so that TensorFlow prunes the image
        return record_id, files.parse(stored, record_id)["label"]

    stored = tf.data.Dataset.zip(ids.unbatch(), stored_records(files, ids))
    return stored.map(label_of, PARALLEL_CALLS).ignore_errors()


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

    def read_one(record_id):
        one = files.open(record_id, tf.constant(1, tf.int64)).ignore_errors()
        return one.concatenate(tf.data.Dataset.from_tensors("")).take(1)

    together = files.open(first, count).take(count).batch(at_once, drop_remainder=True)
    apart = tf.data.Dataset.range(first, first + count).flat_map(read_one).batch(at_once)
    padding = tf.data.Dataset.from_tensors([""])
    either = together.ignore_errors().concatenate(apart).concatenate(padding).take(1)
    return tf.gather(untuned(either).get_single_element(), tf.maximum(ids, 0) - first)
