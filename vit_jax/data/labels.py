"""The labels of records, without their images."""

from __future__ import annotations

import numpy as np

from vit_jax.data.elements import PARALLEL_CALLS, Elements
from vit_jax.data.host_tf import tf
from vit_jax.data.record_files import stored_labels
from vit_jax.data.sources import Source

_LABELS_AT_ONCE = 4096


def read_labels(source: Source, start: int, stop: int) -> np.ndarray:
    """The labels of the records start, ..., stop - 1: int32 (stop - start,).

    Images are not decoded; sources that store labels separately, such as a folder, do not read
    them either. A record whose label cannot be read gets the label -1.
    """

    def label_of(record_ids):  # in the map that reads, so that TensorFlow prunes the image
        return record_ids, source.read(record_ids)["label"]

    ids = tf.data.Dataset.range(start, stop)
    by_batch = ids.batch(_LABELS_AT_ONCE)
    if not source.encoded:
        found = by_batch.map(label_of).unbatch()
    elif source.record_files is None:
        found = ids.map(label_of, PARALLEL_CALLS).ignore_errors()
    else:
        found = stored_labels(source.record_files, by_batch)
    labels = np.full(stop - start, -1, np.int32)
    for record_ids, label in Elements(found.batch(_LABELS_AT_ONCE)):
        labels[record_ids - start] = label
    return labels


def count_labels(source: Source) -> np.ndarray:
    """How many records of `source` have each label, without decoding images.

    int64 (C,); for label vectors the sum over all records, float64 (C,), as a record of soft labels
    counts partly for several classes.
    """
    if not source.has_label_vectors:
        labels = read_labels(source, 0, source.num_examples)
        return np.bincount(labels[labels >= 0], minlength=source.num_classes)

    ids = tf.data.Dataset.range(source.num_examples)
    found = ids.map(lambda record_id: source.read(record_id)["label"], PARALLEL_CALLS)
    counts = np.zeros(source.num_classes, np.float64)
    for labels in Elements(found.batch(_LABELS_AT_ONCE)):
        counts += labels.sum(axis=0, dtype=np.float64)
    return counts
