"""Few-shot linear evaluation: what a few images a class tell through frozen features.

Axes: N support images, M test images, D features, C classes.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.1, "Metrics".
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.errors import collect_faults
from vit_jax.evaluators.features import FeatureGatherer, Features, gather_labels, need_images
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

logger = logging.getLogger("vit_jax")

_STD_FLOOR = 1e-5
_CONSTANT = 100.0  # so large that its weight, the bias, is hardly regularised


def check_choices(shots: tuple[int, ...], l2: tuple[float, ...], num_draws: int) -> None:
    """Raises InputError, naming them by their keys, if these are no choices of a `FewShot`."""

    def positive(numbers, kinds):
        some = isinstance(numbers, tuple) and len(numbers) > 0
        return some and all(isinstance(n, kinds) and n > 0 for n in numbers)

    faults = []
    if not positive(shots, int):
        faults.append(f"shots={shots}: needs positive ints, images a class, e.g. 1,5,10,25")
    if not positive(l2, int | float):
        faults.append(f"l2={l2}: needs positive numbers, e.g. 1024,")
    if num_draws < 1:
        faults.append(f"num_draws={num_draws}: needs a positive int")
    collect_faults(faults)


def draw_support(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """Record ids of `shots` images of each class, drawn at random: int64 (num_classes, shots).

    The first k of each row are the draw of k shots. -1 stands where a class has fewer. It is a
    function of (labels, seed) alone.
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    bounds = np.searchsorted(labels[by_class], np.arange(num_classes + 1))
    drawn = np.full((num_classes, shots), -1, np.int64)
    for row, start, stop in zip(drawn, bounds[:-1], bounds[1:], strict=True):
        ids = by_class[start : min(stop, start + shots)]
        row[: len(ids)] = ids
    return drawn


def ridge(x_ND: np.ndarray, y_NC: np.ndarray, l2: float) -> np.ndarray:
    """The W (D, C) that minimises |x W - y|^2 + l2 |W|^2, by the cheaper of its two forms."""
    num_examples, width = x_ND.shape
    if num_examples < width:
        gram_NN = x_ND @ x_ND.T + l2 * np.eye(num_examples)
        return x_ND.T @ np.linalg.solve(gram_NN, y_NC)
    return np.linalg.solve(x_ND.T @ x_ND + l2 * np.eye(width), x_ND.T @ y_NC)


def predict(
    support_ND: np.ndarray,
    label_N: np.ndarray,
    test_MD: np.ndarray,
    *,
    num_classes: int,
    l2: Sequence[float],
) -> Iterator[np.ndarray]:
    """The predicted class of each test image, int (M,), for each weight of `l2`; in float64.

    Features are whitened by the mean and standard deviation of the support set and a constant one
    is added; targets are 1 for an image's class and -1 for the others.
    """
    support_ND = support_ND.astype(np.float64)
    mean_D, std_D = support_ND.mean(axis=0), support_ND.std(axis=0) + _STD_FLOOR

    def whiten(x):
        x = (x - mean_D) / std_D
        return np.concatenate([x, np.full((len(x), 1), _CONSTANT)], axis=1)

    support_ND, test_MD = whiten(support_ND), whiten(test_MD.astype(np.float64))
    y_NC = 2.0 * (label_N[:, None] == np.arange(num_classes)) - 1.0
    for weight in l2:
        yield (test_MD @ ridge(support_ND, y_NC, weight)).argmax(axis=1)


class FewShot:
    """Top-1 accuracy by regularised least squares from a few images a class, features frozen.

    For each k of `shots`: `{k}shot_top1`, the mean over the draws, and `{k}shot_top1_std`, their
    sample standard deviation (if there are several). Of several weights `l2` the one counts whose
    mean on the test split itself is best, which flatters a little; `{k}shot_l2` tells which. A
    class with fewer than k images gives those that it has.

    Draws have the seeds 0, 1, ..., whatever the run's seed, so that runs are compared on the same
    images. Features are computed on the devices and gathered by every process; each then solves
    for itself, on its host, the same problem.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      labels: () -> the labels of the support split, int (n,), by record id.
      support_batches: record ids -> batches of these.
      test_batches: one pass over the test split.
      num_classes: of both.
      gathered: the sharding by which every process holds the whole of an array.
      shots, l2, num_draws: see `fewshot`.
    """

    def __init__(
        self,
        features_fn: OutputFn,
        *,
        labels: Callable[[], np.ndarray],
        support_batches: Callable[[np.ndarray], Iterable[Batch]],
        test_batches: Callable[[], Iterable[Batch]],
        num_classes: int,
        gathered: jax.sharding.Sharding,
        shots: tuple[int, ...],
        l2: tuple[float, ...],
        num_draws: int,
    ):
        check_choices(shots, l2, num_draws)
        self._labels, self._num_classes = labels, num_classes
        self._support_batches, self._test_batches = support_batches, test_batches
        self._shots, self._l2, self._num_draws = shots, l2, num_draws
        self._features = FeatureGatherer(features_fn, gathered)

    @functools.cached_property
    def _draws(self) -> list[np.ndarray]:
        """The record ids of each draw, (C, k) for the largest k."""
        labels, most = self._labels(), max(self._shots)
        draws = [
            draw_support(labels, self._num_classes, most, seed) for seed in range(self._num_draws)
        ]
        short = int((draws[0] < 0).any(axis=1).sum())
        if short:
            logger.warning(
                "few-shot: %d of %d classes have fewer than %d images in the support split; "
                "all that they have are used", short, self._num_classes, most,
            )  # fmt: skip
        return draws

    def run(self, state: TrainState) -> dict[str, float]:
        """The metrics of `state`.

        Raises:
          InputError: naming the split's key, if no image of the test split, or none of those drawn
            from the support split, can be read; the same on every process.
        """
        chosen = np.unique(self._draws)
        support_batches = self._support_batches(chosen[chosen >= 0])
        support = self._features(state, support_batches, "train_split")
        test = self._features(state, self._test_batches(), "test_split")
        results = {}
        for shots in self._shots:
            top1 = np.array([self._top1(drawn[:, :shots], support, test) for drawn in self._draws])
            best = top1.mean(axis=0).argmax()
            results[f"{shots}shot_top1"] = float(top1[:, best].mean())
            if self._num_draws > 1:
                results[f"{shots}shot_top1_std"] = float(top1[:, best].std(ddof=1))
            if len(self._l2) > 1:
                results[f"{shots}shot_l2"] = float(self._l2[best])
        return results

    def _top1(self, drawn: np.ndarray, support: Features, test: Features) -> list[float]:
        """The accuracy for each weight of `l2`."""
        rows = np.isin(support.id_N, drawn)
        need_images(rows.sum(), "train_split")
        predictions = predict(
            support.x_ND[rows],
            support.label_N[rows],
            test.x_ND,
            num_classes=self._num_classes,
            l2=self._l2,
        )
        return [float((predicted == test.label_N).mean()) for predicted in predictions]


def fewshot(
    *,
    train_split: str,
    test_split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
    shots: tuple[int, ...] = (1, 5, 10, 25),
    l2: tuple[float, ...] = (1024.0,),
    num_draws: int = 3,
) -> ConfigDict:
    """An entry of `evals`: top-1 by least squares from frozen features of a few images a class.

    For each k of `shots`, k images of each class are drawn from `train_split`, `num_draws` times.
    `l2` is the weight of the squared norm; of several the best on `test_split` is reported. The
    classes may be others than those trained on. What else there is means what it means in
    `classification`.

    To draw, the labels of all of `train_split` are read, once each time the process starts. From
    TFRecord files they come with the images, so of a large set take a slice: "train[:5%]".
    """
    return typed_entry("fewshot", locals())


def make_fewshot(inputs: EvalInputs) -> FewShot:
    """The evaluator of an entry that `fewshot` made."""
    entry, source = inputs.entry, inputs.source("train_split")
    return FewShot(
        functools.partial(inputs.apply, method="features"),
        labels=functools.partial(gather_labels, source),
        support_batches=functools.partial(inputs.batches, "train_split"),
        test_batches=functools.partial(inputs.batches, "test_split"),
        num_classes=source.num_classes,
        gathered=NamedSharding(inputs.mesh, P()),
        shots=entry.shots,
        l2=entry.l2,
        num_draws=entry.num_draws,
    )


EVALUATOR = Evaluator(
    fewshot,
    make_fewshot,
    check=lambda entry: check_choices(entry.shots, entry.l2, entry.num_draws),
    learns_classes=True,
)
