"""Some classes of a data set as a data set: their records alone, with labels from 0 on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from vit_jax.data.host_tf import tf
from vit_jax.data.labels import read_labels
from vit_jax.data.sources import Source, fingerprint
from vit_jax.errors import InputError


def check_classes(classes: Sequence[int] | None) -> None:
    """Raises InputError if `classes` is neither None nor two or more different labels."""
    if classes is None:
        return
    labels = all(type(label) is int and label >= 0 for label in classes)
    if not labels or len(set(classes)) != len(classes) or len(classes) < 2:
        raise InputError(
            f"data.classes={tuple(classes)}: needs two or more different labels, e.g. 0,1,2"
        )


def keep_classes(source: Source, classes: Sequence[int]) -> Source:
    """The records of `source` whose label is in `classes`; the label of classes[i] becomes i.

    Their order is that of `source`. A record whose label cannot be read is left out. The labels of
    the whole split are read, now. Records are read one by one, neighbours too.

    Raises: InputError if `source` has no such class, or no record of any of them.
    """
    check_classes(classes)
    unknown = [label for label in classes if label >= source.num_classes]
    where = f"data.classes={tuple(classes)}: {source.name} {source.split}"
    if unknown:
        raise InputError(
            f"{where} has the labels 0 to {source.num_classes - 1}; leave out "
            f"{', '.join(map(str, unknown))}"
        )
    labels = read_labels(source, 0, source.num_examples)
    kept = np.flatnonzero(np.isin(labels, classes))
    if not len(kept):
        raise InputError(f"{where} holds no record of these; choose another split")
    new_labels = np.zeros(source.num_classes, np.int32)
    new_labels[list(classes)] = np.arange(len(classes))
    kept_tensor, labels_tensor = tf.constant(kept, tf.int64), tf.constant(new_labels)

    def read(record_ids):
        example = source.read(tf.gather(kept_tensor, record_ids))
        return example | {"label": tf.gather(labels_tensor, example["label"])}

    def file_names(start, stop):
        wanted = kept[start:stop]
        if not len(wanted):
            return []
        assert source.file_names is not None  # else nothing asks here
        found = source.file_names(int(wanted[0]), int(wanted[-1]) + 1)
        return [found[i - wanted[0]] for i in wanted]

    names = source.class_names
    which = hashlib.sha256(kept.tobytes()).hexdigest()
    return dataclasses.replace(
        source,
        num_examples=len(kept),
        num_classes=len(classes),
        class_names=None if names is None else tuple(names[label] for label in classes),
        fingerprints=tuple(
            fingerprint("classes", whole, list(classes), which) for whole in source.fingerprints
        ),
        read=read,
        record_name=lambda record: source.record_name(int(kept[record])),
        record_files=None,
        file_names=None if source.file_names is None else file_names,
        part_sizes=(len(kept),),
    )
