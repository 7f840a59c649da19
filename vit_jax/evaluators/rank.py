"""Effective rank: how many directions the features of a model fill, without labels.

Axes: N images, D features.
Source: Garrido et al. 2022 (arXiv:2210.02885), section 3, RankMe.
"""

import numpy as np

from vit_jax.config import SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.data import order
from vit_jax.evaluators.features import make_gather
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState

_EPS = 1e-7  # of the paper: added to each share of the singular values


def effective_rank(x_ND: np.ndarray) -> float:
    """exp of the entropy of the singular values of `x_ND` (N, D), divided by their sum.

    Between 1, where all rows are multiples of one, and min(N, D); 0 if every entry is 0, NaN if one
    is not finite. The features are not centred.
    """
    if not np.isfinite(x_ND).all():
        return float("nan")
    x_ND = x_ND.astype(np.float64)
    gram = x_ND.T @ x_ND if x_ND.shape[0] > x_ND.shape[1] else x_ND @ x_ND.T
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))
    if not values.sum() > 0:
        return 0.0
    p = values / values.sum() + _EPS
    return float(np.exp(-(p * np.log(p)).sum()))


class Rank(SplitEvaluator):
    """Effective rank of the features of some images: `rank`, and `share` = rank / D; no labels.

    A falling rank shows a collapse. A high one does not show that the features are useful: the rank
    of random weights may be higher. The rank cannot exceed the number of images, so take more than
    the model is wide. Every host holds their features and computes the same values.
    """

    num_images: int = key(
        25_600, "images to take of a larger split, evenly spaced", within="[2, inf)"
    )

    learns_classes = True
    output = "features"
    multi_label = None
    shows_worth = False
    measures_rank = True

    def reports(self) -> dict[str, Better]:
        return {"rank": "neither", "share": "higher"}

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, total = make_gather(inputs), inputs.source().num_examples
        number = min(self.num_images, total)
        ids = None if number == total else order.spread(number, total)

        def measure(state: TrainState) -> dict[str, float]:
            x_ND = gather(state, "split", ids).x_ND
            rank = effective_rank(x_ND)
            return {"rank": rank, "share": rank / x_ND.shape[1]}

        return measure
