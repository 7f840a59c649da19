"""Classification: accuracy, F1, loss and calibration over one pass of a labelled split.

Axes: B examples, C classes, K bins of confidence.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.tree import Batch
from vit_jax.evaluators.by_class import ClassEvaluator, f1
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import LossFn
from vit_jax.objectives.losses import hits

_NUM_BINS = 15  # as in the paper on calibration

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
    """

    of_class = "accuracy"

    def metrics(self):
        better = {"top1": "higher", "top5": "higher", "loss": "lower", "ece": "lower"}
        better |= {"macro_top1": "higher", "macro_f1": "higher", "num_examples": "neither"}
        return better | super().metrics()

    def lacking(self, sources):
        number = sources["split"].num_classes
        return {} if number > 5 else {"top5": f"needs more than 5 classes; the data have {number}"}

    def bind(self, inputs: EvalInputs) -> Measure:
        loss, probabilities = inputs.settings.loss.bind(), inputs.settings.loss.probabilities
        name_classes = self.name_classes(inputs)

        @functools.partial(jax.jit, out_shardings=inputs.replicated)
        def compute(state, batch):
            logits_BC = inputs.apply(state, batch["image"])
            p_BC = probabilities(logits_BC.astype(jnp.float32))
            counts = _count(logits_BC, p_BC, batch, loss)
            seen = None if inputs.see is None else _predict(logits_BC, p_BC, batch)
            return _count_classes(logits_BC, batch), (counts, seen)

        def measure(state: TrainState) -> dict[str, float]:
            found, total_3C = [], np.zeros((3, 1), np.int64)
            for counts_3C, others in fetch(compute(state, batch) for batch in inputs.batches()):
                total_3C = total_3C + counts_3C
                found.append(others)
            metrics = _metrics([counts for counts, _ in found])
            if inputs.see is not None:
                parts = [[leaf[mask > 0] for leaf in some] for _, (some, mask) in found]
                inputs.see(Examples(*map(np.concatenate, zip(*parts, strict=True))))
            images_C, _, correct_C = total_3C
            accuracy_C = np.where(images_C > 0, correct_C / np.maximum(images_C, 1), np.nan)
            metrics["macro_top1"] = float(np.nanmean(accuracy_C))
            metrics["macro_f1"] = float(np.nanmean(f1(*total_3C)))
            metrics["num_examples"] = metrics.pop("num_examples")  # comes last
            return metrics | name_classes(accuracy_C)

        return measure


def _count(
    logits_BC: jax.Array, p_BC: jax.Array, batch: Batch, loss: LossFn
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Sums over a batch: of each metric, of hits - confidence in each bin, of the mask."""
    mask_B, label = batch["mask"], batch["label"]
    hits_B = hits(logits_BC, label)
    sums = {"top1": (mask_B * hits_B).sum()}
    if logits_BC.shape[-1] > 5:
        sums["top5"] = (mask_B * hits(logits_BC, label, k=5)).sum()
    sums["loss"] = (mask_B * loss(logits_BC, label)).sum()
    confidence_B = p_BC.max(axis=1)
    in_bin_BK = mask_B[:, None] * jax.nn.one_hot(bins(confidence_B), _NUM_BINS)
    # Elementwise, since an accelerator may round the operands of a matrix product.
    gap_K = (in_bin_BK * (hits_B - confidence_B)[:, None]).sum(axis=0)
    return sums, gap_K, mask_B.sum()


def _count_classes(logits_BC: jax.Array, batch: Batch) -> jax.Array:
    """int32 (3, C): the images of each class, its predictions, and those that are right."""
    mask_B, label = batch["mask"].astype(jnp.int32), batch["label"]
    predicted_B, hits_B = logits_BC.argmax(axis=1), hits(logits_BC, label)
    label_B = label if label.ndim == 1 else label.argmax(axis=1)
    true_B = jnp.where(hits_B, predicted_B, label_B)  # any class of an image is right
    rows = (true_B, mask_B), (predicted_B, mask_B), (true_B, mask_B * hits_B)
    return jnp.stack([jnp.bincount(c, n, length=logits_BC.shape[1]) for c, n in rows])


def _predict(logits_BC: jax.Array, p_BC: jax.Array, batch: Batch) -> tuple[Examples, jax.Array]:
    """The predictions for a batch, and its mask."""
    label_B = batch["label"]
    right_B = jnp.take_along_axis(p_BC, label_B[:, None], axis=1)[:, 0]
    predicted_B = logits_BC.argmax(axis=1).astype(jnp.int32)
    return Examples(label_B, predicted_B, batch["id"], p_BC.max(axis=1), right_B), batch["mask"]


def _metrics(counts: Sequence[tuple]) -> dict[str, float]:
    """The metrics of a split from the sums of its batches, added and divided once."""
    sums, gaps_K, weights = zip(*counts, strict=True)
    seen = float(np.sum(weights, dtype=np.float64))
    need_images(int(seen), "split")
    totals = {name: np.sum([s[name] for s in sums], dtype=np.float64) for name in sums[0]}
    totals["ece"] = np.abs(np.sum(gaps_K, axis=0, dtype=np.float64)).sum()
    means = {name: float(total / seen) for name, total in totals.items()}
    return means | {"num_examples": int(seen)}


def bins(confidence_B: jax.Array) -> jax.Array:
    """Bin of each confidence, int (B,): bin k holds confidences in (k / 15, (k + 1) / 15]."""
    return jnp.clip(jnp.ceil(confidence_B * _NUM_BINS).astype(jnp.int32) - 1, 0, _NUM_BINS - 1)
