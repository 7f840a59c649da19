"""k nearest neighbours: what the likeness of frozen features tells, without training.

Axes: N training images, M test images, D features, C classes, K neighbours.
Source: Wu et al. 2018 (arXiv:1805.01978), section 3.4.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.errors import collect_faults
from vit_jax.evaluators.features import FeatureGatherer, Features
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

_SIMILARITIES_AT_ONCE = 1 << 26  # 256 MiB of float32


def check_neighbours(num_neighbours: tuple[int, ...], temperature: float) -> None:
    """Raises InputError, naming them by their keys, if these are no choices of a `Knn`."""
    faults = []
    some = isinstance(num_neighbours, tuple) and len(num_neighbours) > 0
    if not (some and all(type(k) is int and k > 0 for k in num_neighbours)):
        faults.append(f"num_neighbours={num_neighbours}: needs positive ints, e.g. 10,20,200")
    if not temperature > 0:
        faults.append(f"temperature={temperature}: needs a positive number, e.g. 0.07")
    collect_faults(faults)


def votes(
    similarity_MN: np.ndarray, label_N: np.ndarray, num_neighbours: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """The labels of each row's nearest neighbours, the nearest first, and the weights they have.

    A neighbour of similarity s votes with exp(s / temperature), here in units of the nearest one's
    vote. Shapes: both (M, K).
    """
    num_neighbours = min(num_neighbours, similarity_MN.shape[1])
    nearest_MK = np.argpartition(-similarity_MN, num_neighbours - 1, axis=1)[:, :num_neighbours]
    similarity_MK = np.take_along_axis(similarity_MN, nearest_MK, axis=1)
    order_MK = np.argsort(-similarity_MK, axis=1, kind="stable")
    nearest_MK = np.take_along_axis(nearest_MK, order_MK, axis=1)
    similarity_MK = np.take_along_axis(similarity_MK, order_MK, axis=1).astype(np.float64)
    return label_N[nearest_MK], np.exp((similarity_MK - similarity_MK[:, :1]) / temperature)


class Knn:
    """Top-1 accuracy of the vote of the nearest training images, features frozen.

    For each k of `num_neighbours`: `{k}nn_top1`. Likeness is the cosine of the angle between two
    images' features; each of the k most alike training images votes for its class with the weight
    exp(cosine / temperature). Where there are fewer than k, all vote.

    Features are computed on the devices and gathered by every process; each then compares its share
    of the test images with all training images, on its host.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      train_batches, test_batches: one pass over the split.
      num_classes: of both.
      gathered: the sharding by which every process holds the whole of an array.
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
        self._num_neighbours, self._temperature = num_neighbours, temperature
        self._features = FeatureGatherer(features_fn, gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """The metrics of `state`.

        Raises:
          InputError: naming the split's key, if no image of a split can be read; the same on every
            process.
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
        """How many test images are classified rightly for each number of neighbours."""
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
    """Each row with length 1; one of zeros stays so."""
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
    """An entry of `evals`: top-1 by a vote of the training images nearest in frozen features.

    For each k of `num_neighbours`; a lower `temperature` gives the nearest of them more weight. The
    features of all of `train_split` are held on every host. The classes may be others than those
    trained on. What else there is means what it means in `classification`.
    """
    return typed_entry("knn", locals())


def make_knn(inputs: EvalInputs) -> Knn:
    """The evaluator of an entry that `knn` made."""
    entry = inputs.entry
    return Knn(
        functools.partial(inputs.apply, method="features"),
        train_batches=functools.partial(inputs.batches, "train_split"),
        test_batches=functools.partial(inputs.batches, "test_split"),
        num_classes=inputs.source("train_split").num_classes,
        gathered=NamedSharding(inputs.mesh, P()),
        num_neighbours=entry.num_neighbours,
        temperature=entry.temperature,
    )


EVALUATOR = Evaluator(
    knn,
    make_knn,
    check=lambda entry: check_neighbours(entry.num_neighbours, entry.temperature),
    learns_classes=True,
)
