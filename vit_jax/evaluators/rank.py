"""Effective rank: how many directions the features of a model fill, without labels.

Axes: N images, D features.
Source: Garrido et al. 2022 (arXiv:2210.02885), section 3, RankMe.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.errors import collect_faults
from vit_jax.evaluators.features import FeatureGatherer
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

_EPS = 1e-7  # of the paper: added to each share of the singular values

METRICS: dict[str, Better] = {"rank": "neither", "share": "higher"}


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


class Rank:
    """Effective rank of the features of some images: `rank`, and `share` = rank / D.

    Every process gathers the features and computes the same values, on its host.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      batches: one pass over the images.
      gathered: the sharding that puts a whole array on every process.
    """

    metrics = METRICS

    def __init__(
        self,
        features_fn: OutputFn,
        *,
        batches: Callable[[], Iterable[Batch]],
        gathered: jax.sharding.Sharding,
    ):
        self._batches = batches
        self._features = FeatureGatherer(features_fn, gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state`.

        Raises:
          InputError: on every process, if no image can be read; names the key `split`.
        """
        x_ND = self._features(state, self._batches(), "split").x_ND
        rank = effective_rank(x_ND)
        return {"rank": rank, "share": rank / x_ND.shape[1]}


def check_number(num_images: int) -> None:
    """Raise InputError, naming the key, if `num_images` is no valid number for a `Rank`."""
    if not (type(num_images) is int and num_images > 1):
        collect_faults([f"num_images={num_images}: needs an int of at least 2, e.g. 25600"])


def rank(
    *,
    split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
    num_images: int = 25_600,
) -> ConfigDict:
    """Make an entry of `evals`: effective rank of the features; reads no labels.

    Of a larger split, `num_images` images are taken, evenly spaced. The rank cannot exceed the
    number of images, so take more than the model is wide. Every host holds their features. All
    other arguments are as in `classification`.
    """
    return typed_entry("rank", locals())


def make_rank(inputs: EvalInputs) -> Rank:
    """Make the evaluator for an entry from `rank`."""
    total = inputs.source().num_examples
    number = min(inputs.entry.num_images, total)
    ids = None if number == total else np.arange(number, dtype=np.int64) * total // number
    return Rank(
        functools.partial(inputs.apply, method="features"),
        batches=functools.partial(inputs.batches, record_ids=ids),
        gathered=NamedSharding(inputs.mesh, P()),
    )


EVALUATOR = Evaluator(
    rank,
    make_rank,
    check=lambda entry: check_number(entry.num_images),
    learns_classes=True,
    multi_label=None,
    metrics=lambda entry: METRICS,
)
