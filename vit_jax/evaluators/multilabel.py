"""Multi-label classification: average precision, F1 and loss over one pass of a split.

Axes: N examples of the split, C classes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epy

from vit_jax.evaluators.features import NothingToMeasureError, make_gather
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.evaluators.labelled import ClassEvaluator, report
from vit_jax.experiment.state import TrainState

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


class MultiLabel(ClassEvaluator):
    """Mean average precision, F1 and loss of images with several labels.

    To find the average precision of a class, all images are ordered by their logit for it. Each
    image that shows the class has a precision: the share of such images among those up to it. The
    average precision is the mean of these. `mean_ap` is its mean over the classes that some image
    shows; `by_class` adds `average_precision/CLASS` for each class. Every host holds the logits of
    the whole split.

    F1 is 2 * correct / (images + predictions), where a class is predicted if its probability is at
    least 1/2. `macro_f1` is its mean over the classes that some image shows or that are predicted;
    `micro_f1` is F1 of all classes together, so frequent ones count more.

    Source: Everingham et al. 2010, "The Pascal VOC challenge", section 4.2, without interpolation.
    """

    multi_label = True
    usual = ("mean_ap", "macro_f1", "micro_f1", "loss")
    own = ("mean_ap",)
    of_class = "average_precision"

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, metrics = make_gather(inputs, "__call__"), self.make_metrics(inputs)
        classes = self.name_classes(inputs)

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
            if inputs.see is not None:
                inputs.see(Shown(logits_NC, labels_NC, id_N, precision_C))
            rows = metrics.rows(jnp.asarray(logits_NC), {"label": jnp.asarray(labels_NC)})
            sums = jax.tree.map(lambda row: np.asarray(row).sum(axis=0, dtype=np.float64), rows)
            values = metrics.finish(sums, len(logits_NC))
            values |= {"mean_ap": np.mean(precision_C[shown_C]), self.of_class: precision_C}
            names = *self.chosen, *([self.of_class] if self.by_class else [])
            found = {name: values[name] for name in names if name in values}
            return report(found, len(logits_NC), classes)

        return measure
