"""Pseudo labels: a data set's pictures with the labels that a model gave them.

A file of pseudo labels, written by `inference.pseudo_labels`, holds in NumPy's format .npz:

    record  int64 (m,)      records of the pictures' data set, sorted; one may come several times
    label   int32 (m,), or float16 (m, C): the probabilities of the classes
    pictures  how own pictures are divided: the bytes of `division.FILE`, or none
    facts   JSON: name, split and data_dir of the pictures, their fingerprint, the class names, and
            the teacher's loss
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data.division import Divider, Division
from vit_jax.data.host_tf import tf
from vit_jax.data.sources import Source, fingerprint
from vit_jax.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class PseudoLabels:
    """The content of a file of pseudo labels; see the top of this module."""

    record: np.ndarray
    label: np.ndarray
    facts: dict[str, Any]
    pictures: bytes = b""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        file = io.BytesIO()
        pictures = np.frombuffer(self.pictures, np.uint8)
        facts = json.dumps(self.facts)
        np.savez(file, record=self.record, label=self.label, pictures=pictures, facts=facts)
        return file.getvalue()


def read_pseudo_labels(path: str) -> PseudoLabels:
    """Read a file of pseudo labels.

    Raises: InputError if there is none at `path`.
    """
    try:
        with np.load(io.BytesIO(epath.Path(path).read_bytes()), allow_pickle=False) as stored:
            facts = json.loads(str(stored["facts"]))
            pictures = stored["pictures"].tobytes()
            return PseudoLabels(stored["record"], stored["label"], facts, pictures)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise InputError(
            f"data.split={path!r}: not a file of pseudo labels ({e}); `vit_jax label` writes one"
        ) from None


def pseudo(
    make_source: Callable[..., Source], *, split: str, data_dir: str | None, **keywords: Any
) -> Source:
    """The pictures and pseudo labels of the file `split`.

    The pictures are in `data_dir` unless the file names another folder. `keywords` go to
    `make_source`, which opens the pictures.

    Raises: InputError if the file or the pictures are missing, or the pictures have changed.
    """
    found = read_pseudo_labels(split)
    facts = found.facts
    keywords = keywords | {key: facts[key] for key in ("num_classes", "num_examples")}
    keywords["max_corrupt_fraction"] = 1.0  # pictures that cannot be read have no label
    division = Division.from_bytes(found.pictures) if found.pictures else Division()
    keywords["divider"] = Divider(division, split)
    pictures = make_source(
        facts["name"], split=facts["split"], data_dir=facts["data_dir"] or data_dir, **keywords
    )
    if pictures.fingerprint != facts["fingerprint"]:
        raise InputError(
            f"data.split={split!r}: {facts['name']} {facts['split']} has changed since its "
            "pictures were labelled; label them again"
        )
    records = tf.constant(found.record, tf.int64)
    labels = tf.constant(found.label)
    digest = hashlib.sha256(found.record.tobytes() + found.label.tobytes()).hexdigest()

    adds_up = facts["loss"] != "sigmoid"

    def read(record_ids):
        example = pictures.read(tf.gather(records, record_ids))
        label = tf.gather(labels, record_ids)
        if labels.shape.rank == 2:
            label = tf.cast(label, tf.float32)
            if adds_up:  # but for the rounding to float16
                label /= tf.reduce_sum(label, axis=-1, keepdims=True)
        return example | {"label": label}

    names = facts["class_names"]
    return dataclasses.replace(
        pictures,
        name="pseudo",
        split=split,
        num_examples=len(found.record),
        num_classes=facts["of_model"],
        class_names=None if names is None else tuple(names),
        fingerprint=fingerprint("pseudo", pictures.fingerprint, digest),
        read=read,
        record_name=lambda record: pictures.record_name(int(found.record[record])),
        why_unreadable=lambda record: pictures.why_unreadable(int(found.record[record])),
        record_files=None,
        file_names=None,
        multi_label=False,
        soft_labels=found.label.ndim == 2,
        part_sizes=(len(found.record),),
    )


def soften(source: Source) -> Source:
    """`source` with labels float32 (C,): 1 for the class, unless they are probabilities already."""
    if source.soft_labels:
        return source

    def with_soft(example):
        return example | {"label": tf.one_hot(example["label"], source.num_classes)}

    files = source.record_files
    if files is not None:
        parse = files.parse
        files = dataclasses.replace(
            files, parse=lambda stored, record_id: with_soft(parse(stored, record_id))
        )
    return dataclasses.replace(
        source,
        read=lambda record_ids: with_soft(source.read(record_ids)),
        record_files=files,
        soft_labels=True,
    )


def select(
    top_n: np.ndarray,
    label_n: np.ndarray,
    *,
    confidence: float,
    per_class: int | None,
    num_classes: int,
    seed: int,
) -> np.ndarray:
    """The records to train on, sorted: int64 (m,).

    Args:
      top_n: probability of the most likely class of each record; 0 if it could not be read.
      label_n: that class.
      confidence: records with a smaller `top_n` are left out.
      per_class: number of records of every class: those with the greatest `top_n`, or, if a class
        has fewer, all of them and random ones once more. None: all, once.
      num_classes: C.
      seed: of the random draws.

    Source: Xie et al. 2019 (arXiv:1911.04252), section 3.1.
    """
    kept_n = np.flatnonzero((top_n >= confidence) & (top_n > 0))
    if per_class is None:
        return kept_n
    chosen: list[np.ndarray] = []
    for c in range(num_classes):
        of_class = kept_n[label_n[kept_n] == c]
        of_class = of_class[np.argsort(-top_n[of_class], kind="stable")][:per_class]
        if len(of_class):
            draw = np.random.default_rng([seed, c])
            again = draw.choice(of_class, per_class - len(of_class))
            chosen += [of_class, again]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def agreement(records: Sequence[int], label_n: np.ndarray, true_n: np.ndarray) -> float:
    """Share of different `records` whose pseudo label is the true one."""
    once = np.unique(records)
    return float((label_n[once] == true_n[once]).mean())
