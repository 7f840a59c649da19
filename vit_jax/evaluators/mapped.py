"""Accuracy on data whose classes are some of the model's, or map to several of them.

For ImageNet-A and -R, which have 200 of ImageNet's 1,000 classes, and for ObjectNet, where 113 of
313 classes overlap with ImageNet's and some match several of them.

Axes: B examples, C classes of the model, K classes of the data, L largest number of labels.
Sources: Hendrycks et al. 2021 (arXiv:1907.07174 and arXiv:2006.16241), who compare the logits of
the 200 classes only; Barbu et al. 2019 (ObjectNet, NeurIPS).
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import Batch
from vit_jax.config import SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.evaluators.features import gather_labels
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.evaluators.labelled import measure_labels
from vit_jax.objectives.metrics import Metrics, make_metrics

_FORM = 'needs JSON such as {"chair": [423, 559]}: a class of the data, and labels of the model'


class Mapped(SplitEvaluator):
    """Top-1 and top-5 on data with other classes than the model.

    A prediction is correct if it is among the labels of the image's class. Images of classes
    without labels do not count.
    """

    class_map: str = key(
        "",
        'a JSON file, {"class of the data": [labels of the model]}; "": the data have the model\'s '
        "labels, perhaps not all of them: the labels of the split are read to find which",
    )
    among: str = key(
        "mapped",
        "logits to compare: of the labels that occur in the map or the split, or all",
        choices=("mapped", "all"),
    )

    learns_classes = True

    def reports(self) -> dict[str, Better]:
        return {"top1": "higher", "top5": "higher", "num_examples": "neither"}

    def bind(self, inputs: EvalInputs) -> Measure:
        source, num_classes = inputs.source(), getattr(inputs.model, "num_classes", None)
        if not num_classes:
            raise InputError(
                "type='mapped': the model has no classes; use fewshot, knn or linear_probe"
            )
        metrics = make_metrics(("top1", "top5"), inputs.settings.loss, False)
        measure = functools.partial(measure_by_labels, inputs, metrics)
        if self.class_map:
            names = source.class_names or tuple(map(str, range(source.num_classes)))
            table_KL = read_class_map(self.class_map, names, num_classes)
            return measure(lambda: table_KL, "label", self.among)
        if source.num_classes != num_classes:
            raise InputError(
                f"class_map='': {source.name} {source.split} has {source.num_classes:,} classes, "
                f"but the model has {num_classes:,}; give a file that maps them"
            )

        def read_labels() -> np.ndarray:
            own = np.arange(num_classes, dtype=np.int32)
            return np.where(np.isin(own, gather_labels(source)), own, -1)[:, None].astype(np.int32)

        return measure(read_labels, "label", self.among)


def measure_by_labels(
    inputs: EvalInputs,
    metrics: Metrics,
    read_labels: Callable[[], np.ndarray],
    row: str,
    among: str = "all",
) -> Measure:
    """measure(state) -> the metrics, where any of an image's labels is right.

    Args:
      inputs: of the evaluator.
      metrics: to compute.
      read_labels: () -> the model's labels, int32 (K, L), padded with -1; images whose row has none
        are left out. Read once.
      row: the key of a batch that holds each image's row of the labels: "label" or "id".
      among: mapped: predictions are compared among the labels in the table only; all: among C.
    """

    def relabel(
        logits_BC: jax.Array, batch: Batch, labels_KL: jax.Array
    ) -> tuple[jax.Array, Batch]:
        logits_BC, classes = logits_BC.astype(jnp.float32), logits_BC.shape[1]
        if among == "mapped":
            places_KL = jnp.where(labels_KL < 0, classes, labels_KL)
            known_C = jnp.zeros(classes, bool).at[places_KL].set(True, mode="drop")
            logits_BC = jnp.where(known_C, logits_BC, -jnp.inf)
        labels_BL = labels_KL[batch[row]]
        label_BC = jax.nn.one_hot(labels_BL, classes).max(axis=1)  # nothing for -1
        mask_B = batch["mask"] * (labels_BL >= 0).any(axis=1)
        return logits_BC, batch | {"label": label_BC, "mask": mask_B}

    return measure_labels(inputs, metrics, relabel=relabel, read=lambda: (read_labels(),))


def read_class_map(path: str, class_names: Sequence[str], num_classes: int) -> np.ndarray:
    """The model's labels for each class of the data: int32 (K, L), padded with -1.

    Args:
      path: a JSON file, {"class of the data": [labels of the model, counted from 0]}. Classes of
        the data that it lacks are left out of the accuracy.
      class_names: the classes of the data, K.
      num_classes: C.

    Raises:
      InputError: the file cannot be read, or names classes or labels that there are not; names the
        key `class_map`.
    """
    try:
        found = json.loads(epath.Path(path).read_bytes())
    except (OSError, ValueError) as e:
        raise InputError(f"class_map={path!r}: cannot be read ({e}); {_FORM}") from None
    lists: list[Any] = list(found.values()) if isinstance(found, dict) else [None]
    if not all(isinstance(v, list) and all(type(label) is int for label in v) for v in lists):
        raise InputError(f"class_map={path!r}: {_FORM}")
    faults = Faults()
    unknown = sorted(name for name in found if name not in class_names)
    faults.need(
        not unknown,
        f"class_map={path!r}: has classes that the data lack: {unknown[:5]}; rename them as in the "
        f"data, such as {list(class_names)[:3]}",
    )
    wrong = sorted({v for labels in lists for v in labels if not 0 <= v < num_classes})
    faults.need(
        not wrong,
        f"class_map={path!r}: has the labels {wrong[:5]}; the model has 0 to {num_classes - 1}",
    )
    faults.need(any(lists), f"class_map={path!r}: maps no class")
    collect_faults(faults)
    return pad_labels([found.get(name, []) for name in class_names])


def pad_labels(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """The lists as rows of a table, int32 (K, L), padded with -1."""
    table = np.full((len(lists), max(map(len, lists))), -1, np.int32)
    for row, labels in zip(table, lists, strict=True):
        row[: len(labels)] = labels
    return table
