"""Results by class: the accuracy of each class, the confusion matrix, and the wrong pictures.

Axes: N images, C classes, P pairs of classes.
"""

import csv
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from vit_jax import files
from vit_jax.data import Source
from vit_jax.evaluators.classification import Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.insight import figures, several_labels

logger = logging.getLogger("vit_jax")

_LARGEST_MATRIX = 2_000  # classes; above, a matrix has millions of cells, nearly all 0
_LARGEST_HEAT_MAP = 40  # classes; above, names are too small to read
_CONFUSIONS_DRAWN = 30
_CLASSES_IN_SUMMARY = 3


class Confusions(NamedTuple):
    """How often each class was taken for each class; only pairs that occur.

    true_P, predicted_P: int64 labels, in ascending order of (true, predicted); count_P: images.
    """

    true_P: np.ndarray
    predicted_P: np.ndarray
    count_P: np.ndarray


def count_confusions(examples: Examples, num_classes: int) -> Confusions:
    """Count the pairs of true and predicted class."""
    numbers_N = examples.label_N.astype(np.int64) * num_classes + examples.predicted_N
    pairs, count_P = np.unique(numbers_N, return_counts=True)
    return Confusions(*np.divmod(pairs, num_classes), count_P)


def by_class(confusions: Confusions, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per class: images, correct, accuracy, predictions, precision, its worst confusion.

    `accuracy` is None for a class without images, `precision` for one that is never predicted.
    `confused_with` is the wrong class predicted most often for its images, `confusions` how often.
    """
    true_P, predicted_P, count_P = confusions
    hit_P = true_P == predicted_P
    images_C, predictions_C, correct_C = (
        np.bincount(labels, counts, len(names)).astype(int)
        for labels, counts in (
            (true_P, count_P), (predicted_P, count_P), (true_P[hit_P], count_P[hit_P]),
        )
    )  # fmt: skip
    worst = {int(true_P[i]): i for i in np.argsort(np.where(hit_P, 0, count_P), kind="stable")}
    rows = []
    for c, name in enumerate(names):
        images, correct, predictions = (int(x[c]) for x in (images_C, correct_C, predictions_C))
        row: dict[str, Any] = {"class": name, "images": images, "correct": correct}
        row["accuracy"] = correct / images if images else None
        row |= {"predictions": predictions}
        row["precision"] = correct / predictions if predictions else None
        i = worst.get(c)
        confused = i is not None and not hit_P[i]
        row["confused_with"] = names[predicted_P[i]] if confused else None
        rows.append(row | {"confusions": int(count_P[i]) if confused else 0})
    return rows


def mistakes(
    examples: Examples, names: Sequence[str], record_name: Callable[[int], str]
) -> list[dict[str, Any]]:
    """A row per wrong picture, the most confident first.

    `confidence` is the probability of the predicted class. `probability_of_class` is the
    probability of the true class. `record_name` maps the index of a record to the name of its file.
    """
    wrong = np.flatnonzero(examples.predicted_N != examples.label_N)
    wrong = wrong[np.argsort(-examples.confidence_N[wrong], kind="stable")]
    return [
        {
            "file": record_name(int(examples.id_N[i])),
            "class": names[examples.label_N[i]],
            "predicted": names[examples.predicted_N[i]],
            "confidence": float(examples.confidence_N[i]),
            "probability_of_class": float(examples.right_N[i]),
        }
        for i in wrong
    ]


def report(
    output: epath.Path | None, name: str, examples: Examples | Shown, source: Source
) -> None:
    """Log the weakest classes, and write the results by class into `output`/`name` unless None.

    Only process 0 does. `name` is the evaluator's. Of images with several labels the files are
    those of `several_labels`. Of others:

      classes.csv     the rows of `by_class`.
      confusion.csv   images by true class (rows) and predicted class (columns); of models with
                      over 2,000 classes those that occur, up to 2,000 true ones.
      confusions.csv  the pairs of different classes that occur, the most frequent first.
      confusion.png   the confusion matrix, or with more than 40 classes its most frequent pairs.
      wrong.csv       the rows of `mistakes`.
    """
    if jax.process_index() > 0:
        return
    names = source.class_names or [str(i) for i in range(source.num_classes)]
    if isinstance(examples, Shown):
        rows, said = several_labels.by_class(examples, names), several_labels.summarize
        wrong = several_labels.mistakes(examples, names, source.record_name)
        columns: Sequence[str] = several_labels.COLUMNS
    else:
        confusions = count_confusions(examples, len(names))
        rows, said = by_class(confusions, names), summarize
        wrong = mistakes(examples, names, source.record_name)
        columns = ("file", "class", "predicted", "confidence", "probability_of_class")
    logger.info("%s: %s", name, said(rows))
    if output is None:
        return
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / "classes.csv", rows)
    if not isinstance(examples, Shown):
        _write_confusions(folder, confusions, names)
    _write_table(folder / "wrong.csv", wrong, columns)
    logger.info("%s: wrong pictures: %d; results by class: %s", name, len(wrong), folder)


def summarize(rows: Sequence[dict[str, Any]]) -> str:
    """The classes with the lowest accuracy in one line, from the rows of `by_class`."""
    present = [row for row in rows if row["images"]]
    lowest = sorted(present, key=lambda row: row["accuracy"])[:_CLASSES_IN_SUMMARY]
    shown = [
        f"{row['class']} {row['accuracy']:.1%} of {row['images']:,}"
        + (
            f" ({row['confusions']:,} taken for {row['confused_with']})"
            if row["confusions"]
            else ""
        )
        for row in lowest
    ]
    absent = len(rows) - len(present)
    ending = f"; no images of {absent:,} of {len(rows):,} classes" if absent else ""
    return f"lowest accuracy by class: {', '.join(shown)}{ending}"


def _write_confusions(folder: epath.Path, confusions: Confusions, names: Sequence[str]) -> None:
    """Write confusions.csv, confusion.csv and confusion.png."""
    true_P, predicted_P, count_P = confusions
    wrong = np.flatnonzero(true_P != predicted_P)
    wrong = wrong[np.argsort(-count_P[wrong], kind="stable")]
    pairs = [(names[true_P[i]], names[predicted_P[i]], int(count_P[i])) for i in wrong]
    _write_rows(folder / "confusions.csv", [("class", "predicted", "images"), *pairs])
    rows = columns = np.arange(len(names))
    if len(names) > _LARGEST_MATRIX:
        rows, columns = np.unique(true_P), np.unique([true_P, predicted_P])
    if len(rows) <= _LARGEST_MATRIX:
        matrix = np.zeros((len(rows), len(columns)), int)
        matrix[np.searchsorted(rows, true_P), np.searchsorted(columns, predicted_P)] = count_P
        lines = ([names[row], *map(int, line)] for row, line in zip(rows, matrix, strict=True))
        _write_rows(folder / "confusion.csv", [["class", *(names[c] for c in columns)], *lines])
    present = np.unique(true_P)
    if len(present) <= _LARGEST_HEAT_MAP:
        picture = figures.draw_heat_map(*_matrix_drawn(confusions, present, names))
    else:
        picture = figures.draw_pairs(pairs[:_CONFUSIONS_DRAWN], len(pairs))
    files.write_whole(folder / "confusion.png", picture)


def _matrix_drawn(
    confusions: Confusions, present: np.ndarray, names: Sequence[str]
) -> tuple[np.ndarray, list[str], list[str]]:
    """The confusion matrix of the classes `present`, with their names for rows and columns.

    Columns for predicted classes without images follow, the most frequent first. The last column
    counts those for which there is no room.
    """
    _, predicted_P, count_P = confusions
    is_absent_P = ~np.isin(predicted_P, present)
    predictions_C = np.bincount(predicted_P[is_absent_P], count_P[is_absent_P], len(names))
    absent = np.argsort(-predictions_C, kind="stable")[: np.count_nonzero(predictions_C)]
    room = _LARGEST_HEAT_MAP - len(present)
    drawn = absent if len(absent) <= room else absent[: max(room - 1, 0)]
    columns = [*present, *drawn]
    place = {int(c): i for i, c in enumerate(columns)}
    matrix = np.zeros((len(present), len(columns) + (len(drawn) < len(absent))), int)
    for true, predicted, count in zip(*confusions, strict=True):
        matrix[place[int(true)], place.get(int(predicted), len(columns))] += count
    shown = [names[c] for c in columns]
    left = len(absent) - len(drawn)
    others = [f"{left:,} other class{'es' * (left > 1)}"] if left else []
    return matrix, shown[: len(present)], shown + others


def _write_table(
    path: epath.Path, rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()
) -> None:
    """Write rows with the same keys as CSV; `columns` are needed if there may be no rows."""
    columns = columns or list(rows[0])
    _write_rows(path, [columns, *([row[name] for name in columns] for row in rows)])


def _write_rows(path: epath.Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file; None becomes an empty cell, and floats have six digits."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])
    files.write_whole(path, text.getvalue().encode(errors="backslashreplace"))
