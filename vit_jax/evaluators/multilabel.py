"""Multi-label classification: mean average precision and loss over one pass of a split.

Axes: N examples of the split, C classes.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epy

from vit_jax.config import SplitEvaluator
from vit_jax.evaluators.features import NothingToMeasureError, make_gather
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.losses import make_loss

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


class MultiLabel(SplitEvaluator):
    """Mean average precision and loss of images with several labels.

    The average precision of a class orders all images by their logit for it: the mean of the
    precision at each image that shows the class, over those images. `mean_ap` is its mean over the
    classes that some image shows. The logits of the whole split are held on every host.

    Source: Everingham et al. 2010, "The Pascal VOC challenge", section 4.2, without interpolation.
    """

    multi_label = True
    shows_images = True

    def metrics(self):
        return {"mean_ap": "higher", "loss": "lower", "num_examples": "neither"}

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, loss = make_gather(inputs, "__call__"), make_loss(**inputs.config.loss)

        def measure(state: TrainState) -> dict[str, float]:
            logits_NC, labels_NC, id_N = gather(state, "split")
            shown_C = labels_NC.any(axis=0)
            if not shown_C.any():
                raise NothingToMeasureError("split: no image has a label; choose another split")
            precision_C = np.full(labels_NC.shape[1], np.nan)
            for c in np.flatnonzero(shown_C):
                precision_C[c] = sklearn.metrics.average_precision_score(
                    labels_NC[:, c], logits_NC[:, c]
                )
            loss_N = np.asarray(loss(jnp.asarray(logits_NC), jnp.asarray(labels_NC)), np.float64)
            if inputs.see is not None:
                inputs.see(Shown(logits_NC, labels_NC, id_N, precision_C))
            return {
                "mean_ap": float(np.mean(precision_C[shown_C])),
                "loss": float(loss_N.mean()),
                "num_examples": len(logits_NC),
            }

        return measure
