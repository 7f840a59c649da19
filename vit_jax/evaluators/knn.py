"""k nearest neighbours: accuracy of a vote among similar images, without training.

Axes: N training images, M test images, D features, C classes, K neighbours.
Source: Wu et al. 2018 (arXiv:1805.01978), section 3.4.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.errors import InputError, collect_faults
from vit_jax.evaluators.features import FeatureGatherer, Features
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

_SIMILARITIES_AT_ONCE = 1 << 26  # 256 MiB of float32


def check_neighbours(num_neighbours: tuple[int, ...], temperature: float) -> None:
    """Raise InputError, naming the keys, if these are not valid settings of a `Knn`."""
    faults = []
    some = isinstance(num_neighbours, tuple) and len(num_neighbours) > 0
    if not (some and all(type(k) is int and k > 0 for k in num_neighbours)):
        faults.append(f"num_neighbours={num_neighbours}: needs positive ints, e.g. 10,20,200")
    if not temperature > 0:
        faults.append(f"temperature={temperature}: needs a positive number, e.g. 0.07")
    collect_faults(faults)


def metrics_of(num_neighbours: Sequence[int]) -> dict[str, Better]:
    """The metrics that a `Knn` reports."""
    return {f"{k}nn_top1": "higher" for k in num_neighbours}


def votes(
    similarity_MN: np.ndarray, label_N: np.ndarray, num_neighbours: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights of each row's nearest neighbours, nearest first; both (M, K).

    A neighbour with similarity s has the weight exp(s / temperature), relative to the nearest
    neighbour's weight.
    """
    num_neighbours = min(num_neighbours, similarity_MN.shape[1])
    nearest_MK = np.argpartition(-similarity_MN, num_neighbours - 1, axis=1)[:, :num_neighbours]
    similarity_MK = np.take_along_axis(similarity_MN, nearest_MK, axis=1)
    order_MK = np.argsort(-similarity_MK, axis=1, kind="stable")
    nearest_MK = np.take_along_axis(nearest_MK, order_MK, axis=1)
    similarity_MK = np.take_along_axis(similarity_MK, order_MK, axis=1).astype(np.float64)
    return label_N[nearest_MK], np.exp((similarity_MK - similarity_MK[:, :1]) / temperature)


class Knn:
    """Top-1 accuracy of a vote among the nearest training images, by frozen features.

    For each k in `num_neighbours`: `{k}nn_top1`. The similarity of two images is the cosine of the
    angle between their features. Each of the k most similar training images votes for its class
    with weight exp(similarity / temperature). If there are fewer than k images, all vote.

    Features are computed on the devices and gathered by every process. Each process then compares
    its share of the test images with all training images, on its host.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      train_batches, test_batches: one pass over the split.
      num_classes: number of classes in both splits.
      gathered: the sharding that puts a whole array on every process.
      num_neighbours, temperature: see `knn`.
    """

    def __init__(
        self,
        features_fn: OutputFn,
        *,
        train_batches: Callable[[], Iterable[Batch]],
        test_batches: Callable[[], Iterable[Batch]],
        num_classes: int,
        gathered: jax.sharding.Sharding,
        num_neighbours: tuple[int, ...],
        temperature: float,
    ):
        check_neighbours(num_neighbours, temperature)
        self._train_batches, self._test_batches = train_batches, test_batches
        self._num_classes = num_classes
        self.metrics = metrics_of(num_neighbours)
        self._num_neighbours, self._temperature = num_neighbours, temperature
        self._features = FeatureGatherer(features_fn, gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state`.

        Raises:
          InputError: on every process, if no image of a split can be read; names the split's key.
        """
        train = self._features(state, self._train_batches(), "train_split")
        test = self._features(state, self._test_batches(), "test_split")
        mine = slice(jax.process_index(), None, jax.process_count())
        hits = self._hits(train, Features(*(column[mine] for column in test)))
        hits = multihost_utils.process_allgather(hits).reshape(-1, len(hits)).sum(axis=0)
        return {
            f"{k}nn_top1": float(count / len(test.label_N))
            for k, count in zip(self._num_neighbours, hits, strict=True)
        }

    def _hits(self, train: Features, test: Features) -> np.ndarray:
        """Number of correctly classified test images for each number of neighbours."""
        train_ND = _unit(train.x_ND)
        hits = np.zeros(len(self._num_neighbours), np.int32)
        rows = max(_SIMILARITIES_AT_ONCE // len(train_ND), 1)
        for start in range(0, len(test.x_ND), rows):
            some = slice(start, start + rows)
            similarity_MN = _unit(test.x_ND[some]) @ train_ND.T
            most = max(self._num_neighbours)
            labels_MK, weights_MK = votes(similarity_MN, train.label_N, most, self._temperature)
            for i, k in enumerate(self._num_neighbours):
                scores_MC = np.zeros((len(labels_MK), self._num_classes))
                images = np.arange(len(labels_MK))[:, None]
                np.add.at(scores_MC, (images, labels_MK[:, :k]), weights_MK[:, :k])
                hits[i] += (scores_MC.argmax(axis=1) == test.label_N[some]).sum()
        return hits


def _unit(x_MD: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; rows of zeros stay zero."""
    length_M1 = np.linalg.norm(x_MD, axis=1, keepdims=True)
    return x_MD / np.where(length_M1 > 0, length_M1, 1)


def knn(
    *,
    train_split: str,
    test_split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
    num_neighbours: tuple[int, ...] = (10, 20, 100, 200),
    temperature: float = 0.07,
) -> ConfigDict:
    """Make an entry of `evals`: top-1 by a vote among the nearest training images.

    Reports one value for each k in `num_neighbours` up to the number of training images. A lower
    `temperature` gives the nearest images more weight. Every host holds the features of all of
    `train_split`. The classes may differ from those trained on. All other arguments are as in
    `classification`.
    """
    return typed_entry("knn", locals())


def make_knn(inputs: EvalInputs) -> Knn:
    """Make the evaluator for an entry from `knn`."""
    entry, num_images = inputs.entry, inputs.source("train_split").num_examples
    num_neighbours = tuple(k for k in entry.num_neighbours if k <= num_images)
    if not num_neighbours:
        raise InputError(
            f"num_neighbours={entry.num_neighbours}: train_split has {num_images} images; choose "
            "numbers up to that"
        )
    return Knn(
        functools.partial(inputs.apply, method="features"),
        train_batches=functools.partial(inputs.batches, "train_split"),
        test_batches=functools.partial(inputs.batches, "test_split"),
        num_classes=inputs.source("train_split").num_classes,
        gathered=NamedSharding(inputs.mesh, P()),
        num_neighbours=num_neighbours,
        temperature=entry.temperature,
    )


EVALUATOR = Evaluator(
    knn,
    make_knn,
    check=lambda entry: check_neighbours(entry.num_neighbours, entry.temperature),
    learns_classes=True,
    metrics=lambda entry: metrics_of(entry.num_neighbours),
)
