"""Classification: accuracy, F1, loss and calibration over one pass of a labelled split.

Axes: B examples of a batch, N examples of the split, C classes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.base.tree import Batch
from vit_jax.config import key
from vit_jax.config.metric_names import FLIPS
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.evaluators.labelled import ClassEvaluator, measure_labels
from vit_jax.objectives.metrics import Accuracy, Metrics, Task

Array = Any  # of JAX inside a jitted function, of NumPy outside


class Examples(NamedTuple):
    """The readable images of a pass over a split, in the split's order, and their predictions.

    label_N: the true class; predicted_N: the class of the largest logit; id_N: the index of the
    record; all int32. confidence_N: the probability of the predicted class; right_N: the
    probability of the true class; both float32.
    """

    label_N: Array
    predicted_N: Array
    id_N: Array
    confidence_N: Array
    right_N: Array


class Classification(ClassEvaluator):
    """Top-1, top-5, their means over the classes, loss and calibration error on a split.

    Sums over the split are divided once. A model with five classes or fewer has no top-5, which
    would always be 1.

    Where classes differ in size, `macro_top1` counts each of them equally: it is the mean, over the
    classes with images, of the share of a class's images that are right (balanced accuracy).
    `macro_f1` is the mean of F1, 2 * correct / (images + predictions), over the classes that have
    images or are predicted. With `by_class`, `accuracy/CLASS` is that share for each class.

    `ece` is the expected calibration error. Examples are put into 15 bins of equal width by their
    confidence, the probability of the predicted class, and
    ece = sum_k |hits in bin k - sum of the confidences in bin k| / examples. It is 0 if
    predictions made with confidence p are correct a fraction p of the time. Source: Guo et al. 2017
    (arXiv:1706.04599), section 2, equations 2 and 3.

    With `flips`, each metric has a second value, NAME_flips, from the mean of the logits of the
    image and of its mirror image.
    """

    flips: bool = key(False, "also report metrics of the mean over each image and its mirror image")

    usual = ("loss", "top1", "top5", "ece", "macro_top1", "macro_f1")
    of_class = "accuracy"

    @property
    def ends(self) -> tuple[str, ...]:
        return ("", FLIPS) if self.flips else ("",)

    def bind(self, inputs: EvalInputs) -> Measure:
        metrics, classes = self.make_metrics(inputs), self.name_classes(inputs)
        if self.by_class:
            metrics = Metrics({**metrics.parts, self.of_class: Accuracy()}, metrics.task)
        show = None if inputs.see is None else functools.partial(_predict, metrics.task)
        return measure_labels(inputs, metrics, classes, show, flips=self.flips)


def _predict(task: Task, logits_BC: jax.Array, batch: Batch) -> Examples:
    """The predictions for a batch."""
    p_BC, label_B = task.probabilities(logits_BC.astype(jnp.float32)), batch["label"]
    right_B = jnp.take_along_axis(p_BC, label_B[:, None], axis=1)[:, 0]
    predicted_B = logits_BC.argmax(axis=1).astype(jnp.int32)
    return Examples(label_B, predicted_B, batch["id"], p_BC.max(axis=1), right_B)
