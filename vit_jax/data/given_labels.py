"""Labels that the user has in Python, beside images or with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.base.errors import InputError, few


def as_labels(labels: Any, where: str) -> np.ndarray:
    """Labels as users give them: int32 (n,), -1 for none; or bool (n, C), True for each class.

    Args:
      labels: n numbers, -1 or None for none; or n lists of numbers; or an array (n, C) of 0 and 1.
      where: of the labels, in messages.

    Raises: InputError if they are something else.
    """
    if not hasattr(labels, "ndim"):
        labels = [-1 if label is None else label for label in labels]
        if any(isinstance(label, list | tuple) for label in labels):
            rows = [label if isinstance(label, list | tuple) else [label] for label in labels]
            numbers = [as_labels(row, where) for row in rows]
            shows = np.zeros((len(rows), max(map(count_classes, numbers))), bool)
            for i, row in enumerate(numbers):
                shows[i, row[row >= 0]] = True
            return shows
    found = np.asarray(labels) if len(labels) else np.zeros(0, int)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 1 and found.dtype.kind in "iub" and found.min(initial=0) >= -1:
        return found.astype(np.int32)
    if found.ndim == 2 and found.dtype.kind in "iubf" and np.isin(found, (0, 1)).all():
        return found.astype(bool)
    got = few(map(str, found)) if found.ndim < 3 else f"of shape {found.shape}"
    raise InputError(
        f"{where}: has the labels {got}; needed: whole numbers from 0, -1 or None "
        "for no label; lists of these; or an array of 0 and 1 for each image and class"
    )


def count_classes(labels: np.ndarray) -> int:
    return labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=-1)) + 1


def _count(labels: np.ndarray) -> np.ndarray:
    """The number of labels of each image, (n,)."""
    return labels.sum(1) if labels.ndim == 2 else labels >= 0


def labels_matter(labels: np.ndarray, multi_label: bool | None) -> bool:
    """`counts_matter` for labels of `as_labels`."""
    return counts_matter(_count(labels), multi_label)


def counts_matter(counts: np.ndarray, multi_label: bool | None) -> bool:
    """Whether data with captions are read with their labels; each image has so many.

    They are if each image has one label or, unless `multi_label` is False, any image has some.
    """
    return bool((counts == 1).all() if multi_label is False else counts.any())


ONE_LABEL = (  # what a user with other images can do
    "knn and linear probes need one label an image; training takes several, or none, with "
    "--config.data.multi_label=true --config.loss.name=sigmoid, and of a list with the word "
    "multilabel: --config=folder:multilabel, or finetune:multilabel,head_only, which trains only "
    "the head, as a probe"
)


def say_others(names: Sequence[str], of: str = "") -> str:
    """The fault of the images `names`, which have no label, or several, where one is needed."""
    have = f"{len(names):,} image{of} has" if len(names) == 1 else f"{len(names):,} images{of} have"
    return f"{have} no label, or several: {few(names)}; {ONE_LABEL}"


def settle_labels(
    where: str,
    num_classes: int,
    labels: np.ndarray,
    multi_label: bool | None,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Labels of `as_labels` as a source has them: int32 (n,), or float32 (n, C).

    `multi_label` None: (n, C) if a row has several labels, or none. `rows` are the items, for
    messages.

    Raises: InputError if there are more classes, or labels are several or missing against
      `multi_label`.
    """
    if (found := count_classes(labels)) > num_classes:
        raise InputError(f"{where}: has the label {found - 1}; needed: 0 to {num_classes - 1}")
    others = np.flatnonzero(_count(labels) != 1)
    if multi_label is False and len(others):
        items = [f"item {i}" for i in (others if rows is None else rows[others])]
        raise InputError(f"{where}: {say_others(items)}")
    if not (multi_label or len(others)):
        return labels.argmax(1).astype(np.int32) if labels.ndim == 2 else labels
    shows = np.zeros((len(labels), num_classes), np.float32)
    shows[:, :found] = labels if labels.ndim == 2 else labels[:, None] == np.arange(found)
    return shows
