"""Classification: accuracy and loss over one pass of a labelled split."""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.objectives.supervised import Loss, hits, make_loss

_BATCHES_IN_FLIGHT = 2


class Classification:
    """top1, top5, loss and num_examples; `batch["mask"]` (B,) is 0 for what does not count.

    Sums over the split, divided once. With fewer than five classes top5 is 1.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      loss: (logits (B, C), labels) -> (B,).
      make_batches: one pass over the split, the same number of batches on every process.
    """

    def __init__(self, logits_fn: Callable, loss: Loss, make_batches: Callable[[], Iterable[dict]]):
        self._make_batches = make_batches

        def count(state, batch):
            logits_BC = logits_fn(state, batch["image"])
            mask_B, label = batch["mask"], batch["label"]
            sums = {
                "top1": (mask_B * hits(logits_BC, label)).sum(),
                "top5": (mask_B * hits(logits_BC, label, k=5)).sum(),
                "loss": (mask_B * loss(logits_BC, label)).sum(),
            }
            return sums, mask_B.sum()

        self._count = jax.jit(count)

    def run(self, state) -> dict[str, float]:
        """The metrics of `state` over the split."""
        counts: list = []
        for batch in self._make_batches():
            counts.append(self._count(state, batch))
            if len(counts) > _BATCHES_IN_FLIGHT:  # each holds its images on the devices
                jax.block_until_ready(counts[-1 - _BATCHES_IN_FLIGHT])
        counts = jax.device_get(counts)
        seen = float(np.sum([weight for _, weight in counts], dtype=np.float64))
        totals = {
            name: np.sum([s[name] for s, _ in counts], dtype=np.float64) for name in counts[0][0]
        }
        means = {name: float(total / max(seen, 1.0)) for name, total in totals.items()}
        return means | {"num_examples": int(seen)}


def make_classification(inputs: EvalInputs) -> Classification:
    """The evaluator of an entry that `config.classification` made."""
    return Classification(inputs.apply, make_loss(**inputs.config.loss), inputs.batches)
