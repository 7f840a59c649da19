"""Results by class: the accuracy of each class, the confusion matrix, and the wrong images.

Axes: N images, C classes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy

from vit_jax.base import files
from vit_jax.data import Source
from vit_jax.evaluators.classification import Examples
from vit_jax.evaluators.multilabel import Shown
from vit_jax.insight import plots
from vit_jax.insight.tables import as_csv
from vit_jax.objectives.losses import Sigmoid

with epy.lazy_imports():
    import sklearn.metrics

logger = logging.getLogger("vit_jax")

_LARGEST_MATRIX = 2_000  # classes; above, a matrix has millions of cells, nearly all 0
_LARGEST_HEAT_MAP = 40  # classes; above, names are too small to read
_CONFUSIONS_DRAWN = 30
_CLASSES_IN_SUMMARY = 3

_WRONG = ("file", "class", "predicted", "confidence", "probability_of_class")
_WRONG_LABELS = ("file", "classes", "missed", "added", "worst", "probability_of_worst")
_CHOSEN = ("threshold", "best_f1")

Confusions = Mapping[tuple[int, int], int]


def write_results(
    output: epath.Path | None, name: str, examples: Examples | Shown, source: Source
) -> None:
    """Log the weakest classes, and write the results by class into `output`/`name` unless None.

    Only process 0 does. `name` is the evaluator's.

      classes.csv     the rows of `by_class` or `by_label`; of a test split without thresholds.
      wrong.csv       the rows of `mistakes` or `mistakes_of_labels`.

    Unless images have several labels:

      confusion.csv   images by true class (rows) and predicted class (columns), of models with up
                      to 2,000 classes.
      confusions.csv  the pairs of different classes that occur, the most frequent first.
      confusion.png   the confusion matrix of the classes that occur, or with more than 40 of them
                      its most frequent pairs.
    """
    if jax.process_index() > 0:
        return
    names = source.class_names or [str(i) for i in range(source.num_classes)]
    contents = {}
    if isinstance(examples, Shown):
        rows, measure = by_label(examples, names), "average_precision"
        if "test" in source.split:  # thresholds chosen here would be chosen by the test data
            rows = [{k: v for k, v in row.items() if k not in _CHOSEN} for row in rows]
        wrong = mistakes_of_labels(examples, names, source.record_name)
        columns: Sequence[str] = _WRONG_LABELS
    else:
        confusions = count_confusions(examples)
        rows, measure = by_class(confusions, names), "accuracy"
        wrong, columns = mistakes(examples, names, source.record_name), _WRONG
        contents = {} if output is None else confusion_files(confusions, names)
    logger.info("%s: %s", name, summarize(rows, measure))
    if output is None:
        return
    contents["classes.csv"] = as_csv([rows[0], *(row.values() for row in rows)])
    contents["wrong.csv"] = as_csv([columns, *wrong])
    folder = output / name
    with files.whole_folder(folder):
        for file, content in contents.items():
            files.write_whole(folder / file, content)
    logger.info("%s: wrong images: %d; results by class: %s", name, len(wrong), folder)


def count_confusions(examples: Examples) -> Confusions:
    """{(true class, predicted class): images}, the most frequent first, then by class."""
    pairs = zip(examples.label_N.tolist(), examples.predicted_N.tolist(), strict=True)
    return dict(sorted(Counter(pairs).items(), key=lambda item: (-item[1], item[0])))


def by_class(confusions: Confusions, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row per class: images, predictions, correct, accuracy, precision, its worst confusion.

    `accuracy` is None for a class without images, `precision` for one that is never predicted.
    `confused_with` is the wrong class predicted most often for its images, `confusions` how often.
    """
    images, predictions = Counter[int](), Counter[int]()
    worst: dict[int, tuple[str, int]] = {}
    for (true, predicted), count in confusions.items():
        images[true] += count
        predictions[predicted] += count
        if true != predicted:
            worst.setdefault(true, (names[predicted], count))
    rows = []
    for c, name in enumerate(names):
        row = _row(name, "accuracy", images[c], predictions[c], confusions.get((c, c), 0))
        confused_with, count = worst.get(c, (None, 0))
        rows.append(row | {"confused_with": confused_with, "confusions": count})
    return rows


def by_label(examples: Shown, names: Sequence[str]) -> list[dict[str, Any]]:
    """`by_class` of images with several labels: average precision, and recall for accuracy.

    A class counts as predicted if its probability, the sigmoid of its logit, is at least 1/2.
    `threshold` is the probability that gives the class its best F1 on these images, `best_f1`. A
    class that no image shows has None for these, for `average_precision` and for `recall`.
    """
    shown_NC, predicted_NC = examples.shown_NC > 0, examples.logits_NC >= 0
    counted = shown_NC, predicted_NC, shown_NC & predicted_NC
    counts_3C = np.stack([x.sum(axis=0) for x in counted])
    rows = []
    for c, name in enumerate(names):
        row = _row(name, "recall", *counts_3C[:, c].tolist())
        found: tuple[float | None, ...] = (None, None, None)
        if row["images"]:
            found = float(examples.precision_C[c]), *_best_threshold(examples, c)
        rows.append(row | dict(zip(("average_precision", *_CHOSEN), found, strict=True)))
    return rows


def _best_threshold(examples: Shown, c: int) -> tuple[float, float]:
    """(the probability from which on class `c` should be predicted for the best F1, that F1).

    It lies halfway between the probability of the last image that is taken and the next one, as
    `predict` computes them: close to 1, float32 has one value for several logits.
    """
    probabilities_N = Sigmoid().probabilities(jnp.asarray(examples.logits_NC[:, c], jnp.float32))
    precisions, recalls, taken = sklearn.metrics.precision_recall_curve(
        examples.shown_NC[:, c] > 0, np.asarray(probabilities_N, np.float64)
    )
    f1s = 2 * precisions * recalls / np.maximum(precisions + recalls, 1e-9)
    best = int(f1s[:-1].argmax())
    below = taken[best - 1] if best else 0.0
    return float(taken[best] + below) / 2, float(f1s[best])


def _row(name: str, share: str, images: int, predictions: int, correct: int) -> dict[str, Any]:
    return {
        "class": name,
        "images": images,
        "predictions": predictions,
        "correct": correct,
        share: correct / images if images else None,
        "precision": correct / predictions if predictions else None,
    }


def mistakes(
    examples: Examples, names: Sequence[str], record_name: Callable[[int], str]
) -> list[tuple[Any, ...]]:
    """A row per wrong image, the most confident first.

    The image's file by `record_name`, its class, the predicted class, and their probabilities, that
    of the predicted class first.
    """
    wrong = np.flatnonzero(examples.predicted_N != examples.label_N)
    wrong = wrong[np.argsort(-examples.confidence_N[wrong], kind="stable")]
    return [
        (record_name(int(record)), names[label], names[predicted], confidence, right)
        for label, predicted, record, confidence, right in zip(
            *(values[wrong] for values in examples), strict=True
        )
    ]


def mistakes_of_labels(
    examples: Shown, names: Sequence[str], record_name: Callable[[int], str]
) -> list[tuple[Any, ...]]:
    """A row per image whose predicted classes are not those it shows, the most confident first.

    The image's file by `record_name`; the classes it shows; those that only the labels have, and
    those that only the predictions have; the class whose probability is farthest from its label,
    and that probability. Classes are separated by ";".
    """
    shown_NC, predicted_NC = examples.shown_NC > 0, examples.logits_NC >= 0
    logits_NC = examples.logits_NC.astype(np.float64)
    error_NC = np.where(shown_NC, -logits_NC, logits_NC)  # increases with |probability - label|
    wrong = np.flatnonzero((shown_NC != predicted_NC).any(axis=1))
    wrong = wrong[np.argsort(-error_NC[wrong].max(axis=1), kind="stable")]

    def listed(is_there_C: np.ndarray) -> str:
        return ";".join(names[c] for c in np.flatnonzero(is_there_C).tolist())

    rows = []
    for i in wrong:
        shown_C, predicted_C, worst = shown_NC[i], predicted_NC[i], error_NC[i].argmax()
        labels = listed(shown_C), listed(shown_C & ~predicted_C), listed(predicted_C & ~shown_C)
        probability = np.exp(-np.logaddexp(0, -logits_NC[i, worst]))
        rows.append((record_name(int(examples.id_N[i])), *labels, names[worst], probability))
    return rows


def summarize(rows: Sequence[Mapping[str, Any]], measure: str) -> str:
    """The classes with the lowest `measure` in one line, from the rows of all classes."""
    present = [row for row in rows if row["images"]]
    lowest = sorted(present, key=lambda row: row[measure])[:_CLASSES_IN_SUMMARY]
    shown = [f"{row['class']} {row[measure]:.1%} of {row['images']:,}" for row in lowest]
    absent = len(rows) - len(present)
    ending = f"; no images of {absent:,} of {len(rows):,} classes" if absent else ""
    return f"lowest {measure.replace('_', ' ')} by class: {', '.join(shown)}{ending}"


def confusion_files(confusions: Confusions, names: Sequence[str]) -> dict[str, bytes]:
    """The contents of confusions.csv, confusion.csv and confusion.png."""
    pairs = [
        (names[true], names[predicted], count)
        for (true, predicted), count in confusions.items()
        if true != predicted
    ]
    found = {"confusions.csv": as_csv([("class", "predicted", "images"), *pairs])}
    if len(names) <= _LARGEST_MATRIX:
        matrix = np.zeros((len(names), len(names)), int)
        for place, count in confusions.items():
            matrix[place] = count
        rows = ([name, *row] for name, row in zip(names, matrix, strict=True))
        found["confusion.csv"] = as_csv([["class", *names], *rows])
    occurring = sorted({c for pair in confusions for c in pair})
    if len(occurring) <= _LARGEST_HEAT_MAP:
        counts = np.array([[confusions.get((i, j), 0) for j in occurring] for i in occurring])
        figure = plots.draw_confusion(counts, [names[c] for c in occurring])
    else:
        figure = plots.draw_pairs(pairs[:_CONFUSIONS_DRAWN], len(pairs))
    return found | {"confusion.png": plots.as_file(figure)}
