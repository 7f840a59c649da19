"""Metrics of labelled images. Evaluators and training use the same ones; each is a part.

A metric gives values for each image. They are summed over any number of batches and devices, and
the metric is computed from the sums. What needs the scores of all images at once, as average
precision does, stays with its evaluator.

Axes: B examples, C classes, K bins of confidence.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import Batch
from vit_jax.config import METRICS, Part, sections
from vit_jax.config.evals import Better
from vit_jax.objectives.contract import LossFn, Rows
from vit_jax.objectives.losses import Loss, hits

_NUM_BINS = 15  # as in the paper on calibration


class Task(NamedTuple):
    """The meaning of the logits of a model.

    loss, probabilities: of the run's `losses.Loss`.
    multi_label: whether an image may have several labels, or none.
    """

    loss: LossFn
    probabilities: Callable[[jax.Array], jax.Array]
    multi_label: bool


class Metric(Part):
    """A metric, as `evals.NAME.metrics` and `log.metrics` name it.

    better: which of its values are better.
    more_than: it needs more classes than that.
    multi_label: whether it needs images with several labels, or with one; None: either.
    shares_rows: whether all metrics with the same function `rows` have the same values.
    """

    better: ClassVar[Better] = "higher"
    more_than: ClassVar[int] = 0
    multi_label: ClassVar[bool | None] = None
    shares_rows: ClassVar[bool] = False

    def rows(self, logits_BC: jax.Array, batch: Batch, task: Task) -> Rows:
        """The values of each image: an array (B,), or {name: array (B, ...)}; pure.

        Those with `batch["mask"]` 0 are left out of the sums. `batch["label"]` is int (B,), or
        float (B, C) for images that are mixed or have several labels.
        """
        raise NotImplementedError

    def finish(self, sums: Mapping[str, Any]) -> Any:
        """Compute the metric from the sums of `rows`, on the host.

        It is not called if `rows` gives an array (B,): the metric is then its mean.
        """
        raise NotImplementedError

    def find_fault(self, multi_label: bool, num_classes: int | None) -> str:
        """What the metric needs and such data lack; "": nothing. `num_classes`: None if unknown."""
        if self.multi_label not in (None, multi_label):
            return f"needs images with {'several labels' if self.multi_label else 'one label'}"
        if num_classes is not None and num_classes <= self.more_than:
            return f"needs more than {self.more_than} classes; the data have {num_classes}"
        return ""


class Top1(Metric):
    """The share of images whose class with the largest logit is correct; see `losses.hits`."""

    multi_label = False
    k: ClassVar[int] = 1

    def rows(self, logits_BC: jax.Array, batch: Batch, task: Task) -> Rows:
        return hits(logits_BC, batch["label"], self.k)


class Top5(Top1):
    """The share of images with a correct class among the five largest logits."""

    more_than = k = 5


class MeanLoss(Metric):
    """The run's loss of labels."""

    better = "lower"

    def rows(self, logits_BC: jax.Array, batch: Batch, task: Task) -> Rows:
        return task.loss(logits_BC, batch["label"])


class CalibrationError(Metric):
    """The expected calibration error; see the evaluator `classification`."""

    better = "lower"
    multi_label = False

    def rows(self, logits_BC: jax.Array, batch: Batch, task: Task) -> Rows:
        confidence_B = task.probabilities(logits_BC.astype(jnp.float32)).max(axis=1)
        in_bin_BK = jax.nn.one_hot(bins(confidence_B), _NUM_BINS)
        # Elementwise, since an accelerator may round the operands of a matrix product.
        gap_BK = in_bin_BK * (hits(logits_BC, batch["label"]) - confidence_B)[:, None]
        return {"gap": gap_BK, "images": jnp.ones_like(confidence_B)}

    def finish(self, sums: Mapping[str, Any]) -> Any:
        return np.abs(sums["gap"]).sum() / sums["images"]


def bins(confidence_B: jax.Array) -> jax.Array:
    """Bin of each confidence, int (B,): bin k holds confidences in (k / 15, (k + 1) / 15]."""
    return jnp.clip(jnp.ceil(confidence_B * _NUM_BINS).astype(jnp.int32) - 1, 0, _NUM_BINS - 1)


class Accuracy(Metric):
    """The share of a class's images that are right, for each class; a part of evaluators only."""

    shares_rows = True

    def rows(self, logits_BC: jax.Array, batch: Batch, task: Task) -> Rows:
        """The images of each class, its predictions, and those that are right: bool (B, C)."""
        label = batch["label"]
        if task.multi_label:
            shown_BC, predicted_BC = label > 0, logits_BC >= 0  # a probability of 1/2
        else:
            label_B = label if label.ndim == 1 else label.argmax(axis=1)
            predicted_B = logits_BC.argmax(axis=1)  # any class of an image is right
            true_B = jnp.where(hits(logits_BC, label), predicted_B, label_B)
            classes_1C = jnp.arange(logits_BC.shape[1])[None]
            shown_BC, predicted_BC = (c[:, None] == classes_1C for c in (true_B, predicted_B))
        correct_BC = shown_BC & predicted_BC
        return {"images": shown_BC, "predictions": predicted_BC, "correct": correct_BC}

    def finish(self, sums: Mapping[str, Any]) -> Any:
        images_C, correct_C = sums["images"], sums["correct"]
        return np.where(images_C > 0, correct_C / np.maximum(images_C, 1), np.nan)


class MacroTop1(Accuracy):
    """The mean of `Accuracy` over the classes with images (balanced accuracy)."""

    multi_label = False

    def finish(self, sums: Mapping[str, Any]) -> Any:
        return np.nanmean(super().finish(sums))


class MacroF1(Accuracy):
    """The mean of F1 over the classes that have images or are predicted."""

    def finish(self, sums: Mapping[str, Any]) -> Any:
        return np.nanmean(f1(**sums))


class MicroF1(Accuracy):
    """F1 of all classes together."""

    multi_label = True

    def finish(self, sums: Mapping[str, Any]) -> Any:
        return f1(**{name: counts_C.sum() for name, counts_C in sums.items()})


def f1(images: np.ndarray, predictions: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """The harmonic mean of precision and recall; NaN for a class without images or predictions."""
    with np.errstate(invalid="ignore"):
        return 2 * correct / (images + predictions)


class Metrics(NamedTuple):
    """Several metrics, by name."""

    parts: Mapping[str, Metric]
    task: Task

    @property
    def sources(self) -> dict[str, str]:
        """{name: the metric whose rows it takes}: itself, or the first that shares its rows."""
        first = dict[Any, str]()
        return {
            name: first.setdefault(type(part).rows if part.shares_rows else name, name)
            for name, part in self.parts.items()
        }

    def rows(self, logits_BC: jax.Array, batch: Batch) -> dict[str, Rows]:
        """{name: rows}, for `contract.sum_rows`; those that metrics share stand at the first."""
        names = dict.fromkeys(self.sources.values())
        found = {name: self.parts[name].rows(logits_BC, batch, self.task) for name in names}
        for name, rows in found.items():
            shapes = [jnp.shape(row) for row in jax.tree.leaves(rows)]
            firsts = [shape[:1] for shape in shapes] if isinstance(rows, dict) else shapes
            if any(first != logits_BC.shape[:1] for first in firsts):
                raise InputError(
                    f"metrics={name!r}: gave the shapes {shapes} for logits {logits_BC.shape}; "
                    "needs one number for each image, or a dict of arrays with a row for each"
                )
        return found

    def finish(self, sums: Mapping[str, Any], number: float = 1.0) -> dict[str, Any]:
        """The metrics, from sums on the host; means are divided by `number`."""
        shared = {name: sums[first] for name, first in self.sources.items() if first in sums}
        return {
            name: self.parts[name].finish(found) if isinstance(found, dict) else found / number
            for name, found in {**sums, **shared}.items()
        }


def find_metrics(
    names: Iterable[str], multi_label: bool, num_classes: int | None = None, section: str = "",
    own: Collection[str] = (),
) -> dict[str, Metric]:  # fmt: skip
    """{name: metric} of the key `metrics` in `section`, such as "log.".

    `own`: names that an evaluator computes itself; their higher values are better.

    Raises:
      InputError: a name is unknown, or the data do not suit a metric.
    """
    faults, found = Faults(), dict[str, Metric]()
    for name in names:
        if part := Metric if name in own else faults.check_in(section, METRICS.find, name):
            found[name] = part()
            keys = "has keys, which no config can set" * bool(part.declared())
            why = "; ".join(filter(None, (keys, found[name].find_fault(multi_label, num_classes))))
            faults.need(not why, f"{section}metrics={name!r}: {why}")
    collect_faults(faults)
    return found


def make_metrics(
    names: Iterable[str], loss: Loss, multi_label: bool, num_classes: int | None = None,
    section: str = "",
) -> Metrics:  # fmt: skip
    """The metrics of a model trained with `loss`; raises as `find_metrics`."""
    parts = find_metrics(names, multi_label, num_classes, section)
    return Metrics(parts, Task(loss.bind(), loss.probabilities, multi_label))


def training_metrics(log: sections.Log, loss: Loss, data: sections.Data) -> Metrics:
    """The metrics of `log.metrics`; raises InputError as `find_metrics`."""
    several, names = data.multi_label, log.metrics
    names = (() if several else ("top1",)) if names is None else names
    return make_metrics(names, loss, several, data.num_classes, "log.")
