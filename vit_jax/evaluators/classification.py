"""Classification: accuracy, loss and calibration over one pass of a labelled split.

Axes: B examples, C classes, K bins of confidence.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.supervised import LOSSES, LossFn, hits, make_loss
from vit_jax.tree import Batch

_NUM_BINS = 15  # as in the paper of calibration


class Classification:
    """top1, top5, loss, ece and num_examples; `batch["mask"]` (B,) is 0 for what does not count.

    Sums over the split, divided once. With fewer than five classes top5 is 1.

    `ece` is the expected calibration error: examples are put into 15 bins of equal width by their
    confidence, the probability of the class that is predicted, and
    ece = sum_k |hits in bin k - sum of the confidences in bin k| / examples. It is 0 if
    predictions made with confidence p are correct a fraction p of the time. Source: Guo et al. 2017
    (arXiv:1706.04599), section 2, equations 2 and 3.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      loss: (logits (B, C), labels) -> (B,).
      make_batches: one pass over the split, the same number of batches on every process.
      probabilities: logits (B, C) -> probabilities (B, C), which grow with the logits.
    """

    def __init__(
        self,
        logits_fn: OutputFn,
        loss: LossFn,
        make_batches: Callable[[], Iterable[Batch]],
        probabilities: Callable[[jax.Array], jax.Array] = jax.nn.softmax,
    ):
        self._make_batches = make_batches

        def count(state, batch):
            logits_BC = logits_fn(state, batch["image"])
            mask_B, label = batch["mask"], batch["label"]
            hits_B = hits(logits_BC, label)
            sums = {
                "top1": (mask_B * hits_B).sum(),
                "top5": (mask_B * hits(logits_BC, label, k=5)).sum(),
                "loss": (mask_B * loss(logits_BC, label)).sum(),
            }
            confidence_B = probabilities(logits_BC.astype(jnp.float32)).max(axis=1)
            in_bin_BK = mask_B[:, None] * jax.nn.one_hot(bins(confidence_B), _NUM_BINS)
            # Elementwise, not a matrix product, whose operands an accelerator may round.
            gap_K = (in_bin_BK * (hits_B - confidence_B)[:, None]).sum(axis=0)
            return sums, gap_K, mask_B.sum()

        self._count = jax.jit(count)

    def run(self, state: TrainState) -> dict[str, float]:
        """The metrics of `state` over the split.

        Raises:
          NothingToMeasureError: if no image of it can be read.
        """
        counts = fetch(self._count(state, batch) for batch in self._make_batches())
        sums, gaps_K, weights = zip(*counts, strict=True)
        seen = float(np.sum(weights, dtype=np.float64))
        need_images(int(seen), "split")
        totals = {name: np.sum([s[name] for s in sums], dtype=np.float64) for name in sums[0]}
        totals["ece"] = np.abs(np.sum(gaps_K, axis=0, dtype=np.float64)).sum()
        means = {name: float(total / seen) for name, total in totals.items()}
        return means | {"num_examples": int(seen)}


def bins(confidence_B: jax.Array) -> jax.Array:
    """The bin of each confidence, int (B,): k where it is above k / 15 and at most (k + 1) / 15."""
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
    """An entry of `evals`: top-1, top-5, loss, calibration error over one pass of `split`.

    `every` is a duration; `ops` are host ops; `batch_size` None means `global_batch_size`;
    `data_name` and `data_dir` None mean those of training.
    """
    return typed_entry("classification", locals())


def make_classification(inputs: EvalInputs) -> Classification:
    """The evaluator of an entry that `classification` made."""
    loss = inputs.loss
    probabilities = LOSSES[loss.name].probabilities
    return Classification(inputs.apply, make_loss(**loss), inputs.batches, probabilities)


EVALUATOR = Evaluator(classification, make_classification)
