"""Files of records: a stretch of neighbouring records is read by opening its file once.

Which records are wanted, and in what order, is decided elsewhere (order.py). Stretches are found
among them here, and a record that cannot be read takes no other with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.data.host_tf import tf

_MAX_ROWS = 16  # of a stretch: more save little, and would be held in memory at once
_STRETCHES_IN_FLIGHT = 8


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFiles:
    """How a source reads records from files.

    Attributes:
      segments: int64 (s,), sorted: the first record of every part that lies in one file.
      open: (first, count) -> tf.data.Dataset of `count` strings, the records as they are stored;
        all lie in one segment. Where one cannot be read it raises, or ends early.
      parse: (string, record_id) -> what `Source.read` gives of one record; raises where the
        string is not a stored record, as the empty one never is.
    """

    segments: np.ndarray
    open: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]
    parse: Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]


def stored_records(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """Each record as it is stored: from elements int64 (b,) to single strings, in their order.

    Neighbours that are equal are read once. The string is empty for an id of -1, and for a record
    that cannot be read.
    """
    segments = tf.constant(files.segments, tf.int64)
    grouped = ids.flat_map(
        lambda ids: tf.data.Dataset.from_tensor_slices(
            tf.RaggedTensor.from_row_starts(ids, stretch_starts(ids, segments))
        )
    )
    stored = grouped.map(
        lambda ids: _read_stretch(files, ids),
        num_parallel_calls=_STRETCHES_IN_FLIGHT,
        deterministic=True,
    )
    return stored.unbatch()


def stored_labels(files: RecordFiles, ids: tf.data.Dataset) -> tf.data.Dataset:
    """(id, label) of each record whose label can be read: from elements int64 (b,) to single ones.

    Their images are not decoded, and may be broken.
    """

    def label_of(record_id, stored):  # in the map that parses, so that the rest of it is pruned
        return record_id, files.parse(stored, record_id)["label"]

    stored = tf.data.Dataset.zip(ids.unbatch(), stored_records(files, ids))
    return stored.map(label_of, tf.data.AUTOTUNE).ignore_errors()


def stretch_starts(ids: tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
    """The rows of `ids` (b,) at which a stretch begins: int64 (r,), the first of them 0.

    In a stretch each id equals the one before or follows it in the same segment, or all are -1.
    """
    rows = tf.range(tf.size(ids, tf.int64))
    segment = tf.searchsorted(segments, ids, side="right")  # 0 for padding alone
    step = ids[1:] - ids[:-1]
    breaks = (step < 0) | (step > 1) | (segment[1:] != segment[:-1])
    breaks = tf.concat([[True], breaks], 0)
    row_in_stretch = rows - tf.gather(
        tf.where(breaks)[:, 0], tf.cumsum(tf.cast(breaks, tf.int64)) - 1
    )
    return tf.where(breaks | (row_in_stretch % _MAX_ROWS == 0))[:, 0]


def _read_stretch(files: RecordFiles, ids: tf.Tensor) -> tf.Tensor:
    """The strings (k,) of a stretch; records that cannot be read together are tried one by one."""
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
    return tf.gather(either.get_single_element(), tf.maximum(ids, 0) - first)
