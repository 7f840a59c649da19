"""Classification: accuracy, loss and calibration over one pass of a labelled split.

Axes: B examples, C classes, K bins of confidence.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config import LOSSES
from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import LossFn
from vit_jax.objectives.losses import hits, make_loss
from vit_jax.tree import Batch

_NUM_BINS = 15  # as in the paper on calibration
METRICS: dict[str, Better] = {
    "top1": "higher", "top5": "higher", "loss": "lower", "ece": "lower", "num_examples": "neither",
}  # fmt: skip


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


class Classification:
    """Metrics top1, top5, loss, ece and num_examples of one labelled split.

    Sums over the split are divided once. `batch["mask"]` (B,) is 0 for rows that do not count. A
    model with five classes or fewer has no top5, which would always be 1.

    `ece` is the expected calibration error. Examples are put into 15 bins of equal width by their
    confidence, the probability of the predicted class, and
    ece = sum_k |hits in bin k - sum of the confidences in bin k| / examples. It is 0 if
    predictions made with confidence p are correct a fraction p of the time. Source: Guo et al. 2017
    (arXiv:1706.04599), section 2, equations 2 and 3.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      loss: (logits (B, C), labels) -> (B,).
      make_batches: one pass over the split, with as many batches on every process.
      probabilities: logits (B, C) -> probabilities (B, C), increasing in the logits.
      gathered: the sharding that puts a whole array on every process; None on a single device.
      num_classes: C; None: `metrics` has top5, which is reported if C > 5.
    """

    def __init__(
        self,
        logits_fn: OutputFn,
        loss: LossFn,
        make_batches: Callable[[], Iterable[Batch]],
        probabilities: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
        gathered: Sharding | None = None,
        *,
        num_classes: int | None = None,
    ):
        self._make_batches = make_batches
        self.metrics = dict(METRICS)
        if num_classes is not None and num_classes <= 5:
            del self.metrics["top5"]
        has_top5 = "top5" in self.metrics

        def count(logits_BC, batch):
            mask_B, label = batch["mask"], batch["label"]
            hits_B = hits(logits_BC, label)
            sums = {"top1": (mask_B * hits_B).sum()}
            if has_top5 and logits_BC.shape[-1] > 5:
                sums["top5"] = (mask_B * hits(logits_BC, label, k=5)).sum()
            sums["loss"] = (mask_B * loss(logits_BC, label)).sum()
            confidence_B = probabilities(logits_BC.astype(jnp.float32)).max(axis=1)
            in_bin_BK = mask_B[:, None] * jax.nn.one_hot(bins(confidence_B), _NUM_BINS)
            # Elementwise, since an accelerator may round the operands of a matrix product.
            gap_K = (in_bin_BK * (hits_B - confidence_B)[:, None]).sum(axis=0)
            return sums, gap_K, mask_B.sum()

        def predict(logits_BC, batch):
            label_B = batch["label"]
            p_BC = probabilities(logits_BC.astype(jnp.float32))
            right_B = jnp.take_along_axis(p_BC, label_B[:, None], axis=1)[:, 0]
            predicted_B = logits_BC.argmax(axis=1).astype(jnp.int32)
            found = Examples(label_B, predicted_B, batch["id"], p_BC.max(axis=1), right_B)
            return found, batch["mask"]

        def count_only(state, batch):
            return count(logits_fn(state, batch["image"]), batch)

        def count_and_predict(state, batch):
            logits_BC = logits_fn(state, batch["image"])
            return count(logits_BC, batch), predict(logits_BC, batch)

        self._count = jax.jit(count_only)
        self._count_and_predict = jax.jit(count_and_predict, out_shardings=gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state` over the split.

        Raises:
          NothingToMeasureError: if none of its images can be read.
        """
        return _metrics(list(fetch(self._count(state, b) for b in self._make_batches())))

    def run_with_examples(self, state: TrainState) -> tuple[dict[str, float], Examples]:
        """The metrics of `run`, and the prediction for each image, from one pass over the split.

        Raises:
          NothingToMeasureError: as `run`.
        """
        pairs = list(fetch(self._count_and_predict(state, b) for b in self._make_batches()))
        metrics = _metrics([counts for counts, _ in pairs])
        parts = [[leaf[mask > 0] for leaf in found] for _, (found, mask) in pairs]
        return metrics, Examples(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))


class Observed:
    """An evaluator that also passes the examples of each run to `see`."""

    def __init__(self, evaluator: Any, see: Callable[[Any], None]):
        self._evaluator, self._see = evaluator, see

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state` over the split."""
        metrics, examples = self._evaluator.run_with_examples(state)
        self._see(examples)
        return metrics


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


def classification(
    *,
    split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
) -> ConfigDict:
    """Make an entry of `evals`: top-1, top-5, loss and calibration error on one pass of `split`.

    `every` is a duration; `ops` are host ops. `batch_size` None: `global_batch_size`. `data_name`
    and `data_dir` None: those of the training data.
    """
    return typed_entry("classification", locals())


def make_classification(inputs: EvalInputs) -> Classification:
    """Make the evaluator for an entry from `classification`."""
    loss = inputs.loss
    probabilities = LOSSES.find(loss.name)().probabilities
    return Classification(
        inputs.apply,
        make_loss(**loss),
        inputs.batches,
        probabilities,
        gathered=NamedSharding(inputs.mesh, P()),
        num_classes=inputs.source().num_classes,
    )


EVALUATOR = Evaluator(classification, make_classification, metrics=lambda entry: METRICS)
