"""Pseudo labels: a data set's images with the labels that a model gave them.

A file of pseudo labels, written by `inference.pseudo_labels`, holds in NumPy's format .npz:

    record  int64 (m,)      records of the images' data set, sorted; one may come several times
    label   int32 (m,), or float16 (m, C): the probabilities of the classes
    images  how own images are divided: the bytes of `division.FILE`, or none
    facts   JSON: name, split and data_dir of the images, their fingerprint, the class names, and
            the teacher's loss, and whether its probabilities add up to 1
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.config.registries import SOURCES
from vit_jax.data.contract import DataSet, Request, Source, fingerprint
from vit_jax.data.division import Divider, Division
from vit_jax.data.host_tf import tf
from vit_jax.data.subset import give_channels, keep_records


@dataclasses.dataclass(frozen=True, eq=False)
class PseudoLabels:
    """The content of a file of pseudo labels; see the top of this module."""

    record: np.ndarray
    label: np.ndarray
    facts: dict[str, Any]
    images: bytes = b""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        file, images = io.BytesIO(), np.frombuffer(self.images, np.uint8)
        facts = json.dumps(self.facts)
        np.savez(file, record=self.record, label=self.label, images=images, facts=facts)
        return file.getvalue()


def read_pseudo_labels(path: str) -> PseudoLabels:
    """Read a file of pseudo labels.

    Raises: InputError if there is none at `path`.
    """
    try:
        with np.load(io.BytesIO(epath.Path(path).read_bytes()), allow_pickle=False) as stored:
            facts = json.loads(str(stored["facts"]))
            images = stored["images"].tobytes()
            return PseudoLabels(stored["record"], stored["label"], facts, images)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise InputError(
            f"data.split={path!r}: not a file of pseudo labels ({e}); `vit_jax label` writes one"
        ) from None


class Pseudo(DataSet):
    """The images and pseudo labels of the file `split`.

    The images are in `data_dir` unless the file names another folder.
    """

    def open(self, request: Request) -> Source:
        """Raises InputError if the file or the images are missing, or the images have changed."""
        found = read_pseudo_labels(request.split)
        facts = found.facts
        division = Division.from_bytes(found.images) if found.images else Division()
        images = SOURCES.find(facts["name"])().open(
            dataclasses.replace(
                request,
                **{key: facts[key] for key in ("name", "split", "num_classes", "num_examples")},
                data_dir=facts["data_dir"] or request.data_dir,
                divider=Divider(division, request.split),
                max_corrupt_fraction=1.0,  # images that cannot be read have no label
            )
        )
        images = give_channels(images, request.channels)
        if images.fingerprint != facts["fingerprint"]:
            where = f"data.split={request.split!r}: {facts['name']} {facts['split']}"
            raise InputError(f"{where} has changed since it was labelled; label it again")
        of_records = keep_records(images, found.record)
        labels = tf.constant(found.label)
        adds_up = facts.get("adds_up", facts["loss"] != "sigmoid")  # files of 0.2.0 lack it

        def read(record_ids: tf.Tensor) -> dict[str, tf.Tensor]:
            label = tf.gather(labels, record_ids)
            if labels.shape.rank == 2:
                label = tf.cast(label, tf.float32)
                if adds_up:  # but for the rounding to float16
                    label /= tf.reduce_sum(label, axis=-1, keepdims=True)
            return of_records.read(record_ids) | {"label": label}

        names = facts["class_names"]
        digest = hashlib.sha256(found.record.tobytes() + found.label.tobytes()).hexdigest()
        return dataclasses.replace(
            of_records,
            name="pseudo",
            split=request.split,
            num_classes=facts["of_model"],
            class_names=None if names is None else tuple(names),
            fingerprint=fingerprint("pseudo", images.fingerprint, digest),
            read=read,
            multi_label=False,
            soft_labels=found.label.ndim == 2,
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
            again = np.random.default_rng([seed, c]).choice(of_class, per_class - len(of_class))
            chosen += [of_class, again]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))


def agreement(records: np.ndarray, label_n: np.ndarray, true_n: np.ndarray) -> float:
    """Share of different `records` whose pseudo label is the true one, of those that have one.

    `true_n`: -1 for a record without a label. NaN: none of `records` has one.
    """
    once = np.unique(records)
    once = once[true_n[once] >= 0]
    return float((label_n[once] == true_n[once]).mean()) if len(once) else float("nan")
