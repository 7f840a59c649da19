"""Multi-label classification: mean average precision and loss over one pass of a split.

Axes: B examples of a batch, N examples of the split, C classes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.evaluators.features import FeatureGatherer, NothingToMeasureError
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import LossFn
from vit_jax.objectives.losses import make_loss
from vit_jax.tree import Batch

with epy.lazy_imports():
    import sklearn.metrics


class Shown(NamedTuple):
    """The readable images of a pass over a split, in the split's order, and their predictions.

    logits_NC: float32; shown_NC: float32, 1 for each class that the image shows; id_N: int32, the
    index of the record. precision_C: the average precision of each class, float64, NaN for a class
    that no image shows.
    """

    logits_NC: np.ndarray
    shown_NC: np.ndarray
    id_N: np.ndarray
    precision_C: np.ndarray


class MultiLabel:
    """mean_ap, loss and num_examples of images whose labels are float (B, C), 1 for each class.

    The average precision of a class orders all images by their logit for it: the mean of the
    precision at each image that shows the class, over those images. `mean_ap` is its mean over the
    classes that some image shows. The logits of the whole split are held on every host.

    Source: Everingham et al. 2010, "The Pascal VOC challenge", section 4.2, without interpolation.

    Args:
      logits_fn: (state, uint8 images (B, H, W, 3)) -> logits (B, C).
      loss: (logits (B, C), labels (B, C)) -> (B,).
      make_batches: one pass over the split, the same number of batches on every process.
      gathered: the sharding by which every process holds the whole of an array.
    """

    metrics: Mapping[str, Better] = {
        "mean_ap": "higher", "loss": "lower", "num_examples": "neither",
    }  # fmt: skip

    def __init__(
        self,
        logits_fn: OutputFn,
        loss: LossFn,
        make_batches: Callable[[], Iterable[Batch]],
        gathered: jax.sharding.Sharding,
    ):
        self._make_batches, self._loss = make_batches, loss
        self._logits = FeatureGatherer(logits_fn, gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """The metrics of `state` over the split.

        Raises:
          NothingToMeasureError: no image of it can be read, or none shows a class.
        """
        return self.run_with_examples(state)[0]

    def run_with_examples(self, state: TrainState) -> tuple[dict[str, float], Shown]:
        """The metrics of `run`, and what they were computed from.

        Raises:
          NothingToMeasureError: as `run`.
        """
        logits_NC, labels_NC, id_N = self._logits(state, self._make_batches(), "split")
        shown_C = labels_NC.any(axis=0)
        if not shown_C.any():
            raise NothingToMeasureError("split: no image has a label; choose another split")
        precision_C = np.full(labels_NC.shape[1], np.nan)
        for c in np.flatnonzero(shown_C):
            precision_C[c] = sklearn.metrics.average_precision_score(
                labels_NC[:, c], logits_NC[:, c]
            )
        loss_N = np.asarray(self._loss(jnp.asarray(logits_NC), jnp.asarray(labels_NC)), np.float64)
        metrics = {
            "mean_ap": float(np.mean(precision_C[shown_C])),
            "loss": float(loss_N.mean()),
            "num_examples": len(logits_NC),
        }
        return metrics, Shown(logits_NC, labels_NC, id_N, precision_C)


def multilabel(
    *,
    split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
) -> ConfigDict:
    """An entry of `evals`: mean average precision and loss of images with several labels.

    Its arguments mean what they mean in `classification`.
    """
    return typed_entry("multilabel", locals())


def make_multilabel(inputs: EvalInputs) -> MultiLabel:
    """The evaluator of an entry that `multilabel` made."""
    gathered = NamedSharding(inputs.mesh, P())
    return MultiLabel(inputs.apply, make_loss(**inputs.loss), inputs.batches, gathered)


EVALUATOR = Evaluator(
    multilabel, make_multilabel, multi_label=True, metrics=lambda entry: MultiLabel.metrics
)
