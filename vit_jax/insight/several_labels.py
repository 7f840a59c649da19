"""Results by class of images with several labels; `classes.report` writes them.

  classes.csv  the rows of `by_class`
  wrong.csv    the rows of `mistakes`

A class counts as predicted if its probability, the sigmoid of its logit, is at least 1/2.
Axes: N images, C classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.evaluators.multilabel import Shown

COLUMNS = ("file", "classes", "missed", "added", "worst", "probability_of_worst")
_CLASSES_IN_SUMMARY = 3


def by_class(examples: Shown, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per class: images, average precision, predictions, correct ones, precision, recall.

    `average_precision` and `recall` are None for a class that no image shows, `precision` for one
    that is never predicted.
    """
    shown_NC, predicted_NC = examples.shown_NC > 0, examples.logits_NC >= 0
    images_C, predictions_C, correct_C = (
        found.sum(axis=0) for found in (shown_NC, predicted_NC, shown_NC & predicted_NC)
    )
    rows = []
    for c, name in enumerate(names):
        images, predictions, correct = (int(x[c]) for x in (images_C, predictions_C, correct_C))
        row: dict[str, Any] = {"class": name, "images": images}
        row["average_precision"] = float(examples.precision_C[c]) if images else None
        row |= {"predictions": predictions, "correct": correct}
        row["precision"] = correct / predictions if predictions else None
        row["recall"] = correct / images if images else None
        rows.append(row)
    return rows


def mistakes(
    examples: Shown, names: Sequence[str], record_name: Callable[[int], str]
) -> list[dict[str, Any]]:
    """A row per image whose predicted classes are not those it shows, the most confident first.

    `missed` and `added` are the classes that only the labels or only the predictions have.
    `worst` is the class whose probability is farthest from its label. Classes are separated by ";".
    `record_name` maps the index of a record to the name of its file.
    """
    shown_NC, predicted_NC = examples.shown_NC > 0, examples.logits_NC >= 0
    logits_NC = examples.logits_NC.astype(np.float64)
    error_NC = np.where(shown_NC, -logits_NC, logits_NC)  # increases with |probability - label|
    wrong = np.flatnonzero((shown_NC != predicted_NC).any(axis=1))
    wrong = wrong[np.argsort(-error_NC[wrong].max(axis=1), kind="stable")]

    def listed(is_there_C):
        return ";".join(names[c] for c in np.flatnonzero(is_there_C))

    rows = []
    for i in wrong:
        worst = int(error_NC[i].argmax())
        rows.append({
            "file": record_name(int(examples.id_N[i])),
            "classes": listed(shown_NC[i]),
            "missed": listed(shown_NC[i] & ~predicted_NC[i]),
            "added": listed(predicted_NC[i] & ~shown_NC[i]),
            "worst": names[worst],
            "probability_of_worst": float(np.exp(-np.logaddexp(0, -logits_NC[i, worst]))),
        })  # fmt: skip
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> str:
    """The classes with the lowest average precision in one line, from the rows of `by_class`."""
    present = [row for row in rows if row["images"]]
    lowest = sorted(present, key=lambda row: row["average_precision"])[:_CLASSES_IN_SUMMARY]
    shown = [
        f"{row['class']} {row['average_precision']:.1%} of {row['images']:,}" for row in lowest
    ]
    absent = len(rows) - len(present)
    ending = f"; no images of {absent:,} of {len(rows):,} classes" if absent else ""
    return f"lowest average precision by class: {', '.join(shown)}{ending}"
