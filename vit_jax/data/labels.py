"""The labels of records, without their images."""

from __future__ import annotations

import numpy as np

from vit_jax.data.host_tf import tf
from vit_jax.data.record_files import stored_labels
from vit_jax.data.sources import Source

_LABELS_AT_ONCE = 4096


def read_labels(source: Source, start: int, stop: int) -> np.ndarray:
    """The labels of the records from `start` to before `stop`: int32 (stop - start,).

    Images are not decoded, nor read where the source keeps its labels apart, as a folder does. A
    record whose label cannot be read has the label -1.
    """

    def label_of(record_ids):  # in the map that reads, so that the rest of it is pruned
        return record_ids, source.read(record_ids)["label"]

    ids = tf.data.Dataset.range(start, stop)
    by_batch = ids.batch(_LABELS_AT_ONCE)
    if not source.encoded:
        found = by_batch.map(label_of).unbatch()
    elif source.record_files is None:
        found = ids.map(label_of, tf.data.AUTOTUNE).ignore_errors()
    else:
        found = stored_labels(source.record_files, by_batch)
    labels = np.full(stop - start, -1, np.int32)
    for record_ids, label in found.batch(_LABELS_AT_ONCE).as_numpy_iterator():
        labels[record_ids - start] = label
    return labels
