"""Data sets made from others: some classes, a part, other labels or channels."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base.errors import InputError, few
from vit_jax.data.contract import Source, fingerprint, read_labels
from vit_jax.data.host_tf import tf
from vit_jax.data.id_files import SUFFIX, ids_in, read_ids
from vit_jax.data.images.formats import with_channels


def check_classes(classes: Sequence[int] | None, key: str = "data.classes") -> None:
    """Raise InputError unless `classes` is None or holds at least two labels, all different."""
    if classes is None:
        return
    labels = all(type(label) is int and label >= 0 for label in classes)
    if not labels or len(set(classes)) != len(classes) or len(classes) < 2:
        raise InputError(f"{key}={tuple(classes)}: needs two or more different labels, e.g. 0,1,2")


def match_classes(source: Source, names: Sequence[str]) -> Source:
    """`source` with the label of each class moved to the place that its name has in `names`.

    Raises: InputError naming the classes of `source` that `names` lack.
    """
    old_names = source.class_names or ()
    unknown = [name for name in old_names if name not in names]
    if unknown:
        are_numbers = all(map(str.isdecimal, unknown))
        numbered = f", or number them from 0 to {len(names) - 1} in its order" * are_numbers
        raise InputError(
            f"the classes {few(map(repr, unknown))} are none of the model's, which are "
            f"{few(map(repr, names))}; rename them, or leave them out{numbered}"
        )
    if old_names == tuple(names):
        return source
    new_labels = tf.constant([names.index(name) for name in old_names], tf.int32)
    columns = [old_names.index(name) if name in old_names else len(old_names) for name in names]

    def new_label(label: tf.Tensor) -> tf.Tensor:
        if source.multi_label:
            return tf.gather([*tf.unstack(label), 0.0], columns)
        return tf.gather(new_labels, label)

    return _relabelled(
        source,
        new_label,
        num_classes=len(names),
        class_names=tuple(names),
        fingerprint=fingerprint("matched", source.fingerprint, list(names)),
    )


def keep_classes(source: Source, classes: Sequence[int]) -> Source:
    """The records of `source` whose label is in `classes`; label classes[i] becomes i.

    Records keep their order. A record whose label cannot be read is left out. This call reads the
    labels of the whole split. The new source reads each record separately, neighbours too.

    Raises: InputError if `source` lacks one of the classes, or has no record of any of them.
    """
    check_classes(classes)
    where = f"data.classes={tuple(classes)}: {source.name} {source.split}"
    if source.has_label_vectors:
        raise InputError(f"{where} has several labels an image; leave data.classes out")
    if unknown := [label for label in classes if label >= source.num_classes]:
        raise InputError(f"{where} has no labels {unknown}; its last is {source.num_classes - 1}")
    labels = read_labels(source, 0, source.num_examples)
    kept = np.flatnonzero(np.isin(labels, classes))
    if not len(kept):
        raise InputError(f"{where} holds no record of these classes; choose another split")
    new_labels = np.zeros(source.num_classes, np.int32)
    new_labels[list(classes)] = np.arange(len(classes))
    labels_tensor, names = tf.constant(new_labels), source.class_names
    which = hashlib.sha256(kept.tobytes()).hexdigest()
    return _relabelled(
        keep_records(source, kept),
        lambda label: tf.gather(labels_tensor, label),
        num_classes=len(classes),
        class_names=None if names is None else tuple(names[label] for label in classes),
        fingerprint=fingerprint("classes", source.fingerprint, list(classes), which),
    )


def subset_size(size: str, whole: int | None, where: str) -> int:
    """The number of records of a part of `whole`; a share is rounded, but at least 1.

    `size` may be a file of ids too. `where` names the split in errors. If `whole` is None, only the
    form is checked.

    Raises: InputError if `size` is neither a number nor a share nor such a file, or larger than
      `whole`.
    """
    if size.endswith(SUFFIX):
        return 0 if whole is None else len(read_ids(size, "data.subset")[0])
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", size.replace(" ", ""))
    number = 0.0 if found is None else float(found[1])
    is_share = found is not None and found[2] == "%"
    if number <= 0 or (number > 100 if is_share else not number.is_integer()):
        raise InputError(f"data.subset={size!r}: needs a number such as 1000, 10% or FILE.npz")
    if whole is None:
        return 0
    count = max(round(number * whole / 100), 1) if is_share else int(number)
    if count > whole:
        raise InputError(f"data.subset={size!r}: {where} has only {whole:,} images")
    return count


def keep_subset(source: Source, size: str, balanced: bool = False, seed: int = 0) -> Source:
    """A random part of `source`, or the records of a file; records keep their order.

    For one seed, each part is within every larger one, balanced ones within balanced ones.

    Args:
      size: the number of records, "1000", or a share, "10%"; or a file of ids, "FILE.npz".
      balanced: take equally many records of each class; their numbers differ by 1 at most, except
        that a class with too few records contributes all it has. This reads the labels of the whole
        split; a record whose label cannot be read is left out.
      seed: of the draw.

    Raises: InputError if `source` has fewer records, `balanced` and several labels an image, or the
      file names records of other data.
    """
    if size.endswith(SUFFIX):
        kept = ids_in(source, size, "data.subset")
        if not len(kept):
            raise InputError(f"data.subset={size!r}: names no record; write it again")
    else:
        kept = np.sort(_draw(source, size, balanced, seed))
    which = hashlib.sha256(kept.tobytes()).hexdigest()
    return dataclasses.replace(
        keep_records(source, kept), fingerprint=fingerprint("subset", source.fingerprint, which)
    )


def _draw(source: Source, size: str, balanced: bool, seed: int) -> np.ndarray:
    where = f"{source.name} {source.split}"
    drawn = np.random.default_rng(seed).permutation(source.num_examples)
    if balanced:
        if source.has_label_vectors:
            raise InputError(f"data.subset_balanced=True: {where} has several labels an image")
        labels = read_labels(source, 0, source.num_examples)[drawn]
        drawn, labels = drawn[labels >= 0], labels[labels >= 0]
        drawn = drawn[np.argsort(rank_in_class(labels), kind="stable")]
    return drawn[: subset_size(size, len(drawn), where)]


def rank_in_class(labels: np.ndarray) -> np.ndarray:
    """For each label, how many equal ones stand before it."""
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], labels[by_class])
    ranks = np.empty(len(labels), np.int64)
    ranks[by_class] = np.arange(len(labels)) - starts
    return ranks


def keep_records(source: Source, kept: np.ndarray) -> Source:
    """The records `kept` of `source`, with its labels and its fingerprint.

    The new source reads each record separately, neighbours too.
    """
    kept_tensor = tf.constant(kept, tf.int64)
    return _renumbered(source, len(kept), kept.__getitem__, lambda ids: tf.gather(kept_tensor, ids))


def leave_out(source: Source, excluded: np.ndarray) -> Source:
    """`source` without the records `excluded`, int64 (m,), sorted and all different.

    Records keep their order, and neighbours are read together as before. Only `excluded` takes
    memory: record k of the new source is record k + #{i: excluded[i] - i <= k} of the old one.

    Raises: InputError if it leaves nothing.
    """
    if len(excluded) == source.num_examples:
        raise InputError(
            f"data.exclude: {source.name} {source.split} has no other records; exclude fewer"
        )
    gaps = excluded - np.arange(len(excluded))
    gaps_tensor, files = tf.constant(gaps, tf.int64), source.record_files

    def old(ids: np.ndarray) -> np.ndarray:
        return ids + np.searchsorted(gaps, ids, side="right")

    def old_tensor(ids: tf.Tensor) -> tf.Tensor:
        before = tf.searchsorted(gaps_tensor, tf.reshape(ids, [-1]), "right", tf.int64)
        return ids + tf.reshape(before, tf.shape(ids))

    if files is not None:
        of, read = files, files.read
        firsts = files.segments - np.searchsorted(excluded, files.segments)
        segments = np.unique([0, *firsts, *gaps])  # no stretch spans a record that is left out
        files = dataclasses.replace(
            of,
            segments=segments[segments < source.num_examples - len(excluded)],
            open=lambda first, count: of.open(old_tensor(first), count),
            parse=lambda stored, record_id: of.parse(stored, old_tensor(record_id)),
            read=read and (lambda ids: read(old_tensor(ids))),
        )
    which = hashlib.sha256(excluded.tobytes()).hexdigest()
    return dataclasses.replace(
        _renumbered(source, source.num_examples - len(excluded), old, old_tensor),
        record_files=files,
        fingerprint=fingerprint("exclude", source.fingerprint, which),
    )


def _renumbered(
    source: Source,
    number: int,
    old: Callable[[Any], Any],
    old_tensor: Callable[[tf.Tensor], tf.Tensor],
) -> Source:
    """`number` records of `source`, read one by one; `old` maps new ids (n,) to those they had."""
    names, captions = source.file_names, source.captions

    def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        return source.read(old_tensor(record_ids))

    def file_names(start: int, stop: int) -> Sequence[str]:
        wanted = old(np.arange(start, min(stop, number)))
        if not len(wanted):
            return []
        assert names is not None  # else this function is not used
        found = names(int(wanted[0]), int(wanted[-1]) + 1)
        return [found[i - wanted[0]] for i in wanted]

    return dataclasses.replace(
        source,
        num_examples=number,
        read=read,
        record_name=lambda record: source.record_name(int(old(record))),
        why_unreadable=lambda record: source.why_unreadable(int(old(record))),
        turn=lambda record: source.turn(int(old(record))),
        record_files=None,
        file_names=None if names is None else file_names,
        part_sizes=(number,),
        captions=captions and (lambda records: captions(old(np.asarray(records)).tolist())),
    )


def give_channels(source: Source, channels: int) -> Source:
    """`source` as one of images with that many channels.

    Encoded images are decoded to 1, 3 or 4; of pixels, 3 become 1 (grey) and 1 any number.

    Raises: InputError if that cannot be.
    """
    shape = source.image_shape
    found = shape[-1] if shape is not None and not source.encoded else None
    possible = {None: (1, 3, 4), 1: (channels,), 3: (1, 3)}.get(found, (found,))
    if channels not in possible:
        needed = " or ".join(map(str, possible))
        raise InputError(f"data.channels={channels}: {source.name} needs {needed}")

    def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        example = source.read(record_ids)
        return example | {"image": with_channels(example["image"], channels)}

    return dataclasses.replace(
        source,
        channels=channels,
        image_shape=None if shape is None else (*shape[:2], channels),
        read=source.read if source.encoded else read,
    )


def soften(source: Source) -> Source:
    """`source` with labels float32 (C,): 1 for the class, unless they are probabilities already."""
    if source.soft_labels:
        return source

    return _relabelled(
        source, lambda label: tf.one_hot(label, source.num_classes), soft_labels=True
    )


def _relabelled(
    source: Source, new_label: Callable[[tf.Tensor], tf.Tensor], **changes: Any
) -> Source:
    """`source` with new labels, however its records are read."""

    def change(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return example | {"label": new_label(example["label"])}

    files = source.record_files
    if files is not None:
        parse = files.parse
        files = dataclasses.replace(files, parse=lambda *record: change(parse(*record)))
    read = source.read
    return dataclasses.replace(
        source, read=lambda record_ids: change(read(record_ids)), record_files=files, **changes
    )
