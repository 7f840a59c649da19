"""Few-shot linear evaluation: accuracy of a linear classifier from a few images per class.

Axes: N support images, M test images, D features, C classes.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.1, "Metrics".
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
import scipy.linalg
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.data import check_classes
from vit_jax.errors import SharedInputError, collect_faults
from vit_jax.evaluators.features import (
    FeatureGatherer,
    Features,
    fit_whitening,
    gather_labels,
    need_images,
)
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

logger = logging.getLogger("vit_jax")

# Of big_vision's few-shot evaluator; so large that the bias, its weight, is hardly regularised.
_CONSTANT = 100.0


def _check_entry(entry: ConfigDict) -> None:
    """Raise InputError, naming the keys, if an entry from `fewshot` is not valid."""
    check_choices(entry.shots, entry.l2, entry.num_draws)
    check_classes(entry.classes, "classes")


def check_choices(shots: tuple[int, ...], l2: tuple[float, ...], num_draws: int) -> None:
    """Raise InputError, naming the keys, if these are not valid settings of a `FewShot`."""

    def positive(numbers, kinds):
        some = isinstance(numbers, tuple) and len(numbers) > 0
        return some and all(isinstance(n, kinds) and n > 0 for n in numbers)

    faults = []
    if not positive(shots, int):
        faults.append(f"shots={shots}: needs positive ints, images per class, e.g. 1,5,10,25")
    if not positive(l2, int | float):
        faults.append(f"l2={l2}: needs positive numbers, e.g. 1024,")
    if num_draws < 1:
        faults.append(f"num_draws={num_draws}: needs a positive int")
    collect_faults(faults)


def draw_support(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """Draw record ids of `shots` images of each class: int64 (num_classes, shots).

    The first k entries of each row are the draw of k shots. Classes with fewer images are padded
    with -1. The result depends on (labels, seed) only.
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    bounds = np.searchsorted(labels[by_class], np.arange(num_classes + 1))
    drawn = np.full((num_classes, shots), -1, np.int64)
    for row, start, stop in zip(drawn, bounds[:-1], bounds[1:], strict=True):
        ids = by_class[start : min(stop, start + shots)]
        row[: len(ids)] = ids
    return drawn


def metrics_of(shots: Sequence[int], l2: Sequence[float], num_draws: int) -> dict[str, Better]:
    """The metrics that a `FewShot` reports."""
    metrics: dict[str, Better] = {}
    for k in shots:
        metrics[f"{k}shot_top1"] = "higher"
        if num_draws > 1:
            metrics[f"{k}shot_top1_std"] = "neither"
        if len(l2) > 1:
            metrics[f"{k}shot_l2"] = "neither"
    return metrics


def ridge(x_ND: np.ndarray, y_NC: np.ndarray, l2: float) -> np.ndarray:
    """W (D, C) that minimises |x W - y|^2 + l2 |W|^2; solves the smaller of the two systems.

    If features are not finite, W is NaN.

    Raises:
      SharedInputError: if `l2` is lost in the rounding of float64; all processes solve the same.
    """
    num_examples, width = x_ND.shape
    dual = num_examples < width
    gram = x_ND @ x_ND.T if dual else x_ND.T @ x_ND
    gram += l2 * np.eye(len(gram))
    target = y_NC if dual else x_ND.T @ y_NC
    if not np.isfinite(gram).all():  # the model has diverged; scipy 1.16 would raise
        return np.full((width, y_NC.shape[1]), np.nan)
    try:
        solution = scipy.linalg.solve(gram, target, assume_a="pos", check_finite=False)
    except np.linalg.LinAlgError:
        raise SharedInputError(
            f"l2={l2}: too small: the least squares of {num_examples} images with {width} features "
            "have no unique solution in float64; choose a larger l2"
        ) from None
    return x_ND.T @ solution if dual else solution


def predict(
    support_ND: np.ndarray,
    label_N: np.ndarray,
    test_MD: np.ndarray,
    *,
    num_classes: int,
    l2: Sequence[float],
) -> Iterator[np.ndarray]:
    """Predicted class of each test image, int (M,), for each weight in `l2`; in float64.

    Features are whitened by the mean and standard deviation of the support set, and a constant
    feature of 100 is appended. Targets are 1 for an image's class and -1 for the others.
    """
    whiten = fit_whitening(support_ND)

    def with_constant(x):
        return np.concatenate([whiten(x), np.full((len(x), 1), _CONSTANT)], axis=1)

    support_ND, test_MD = with_constant(support_ND), with_constant(test_MD)
    y_NC = 2.0 * (label_N[:, None] == np.arange(num_classes)) - 1.0
    for weight in l2:
        yield (test_MD @ ridge(support_ND, y_NC, weight)).argmax(axis=1)


class FewShot:
    """Top-1 accuracy of regularised least squares on frozen features of a few images per class.

    For each k in `shots`: `{k}shot_top1`, the mean over the draws, and `{k}shot_top1_std`, their
    sample standard deviation (for several draws). Of several weights `l2`, the one with the best
    mean on the test split itself is reported, which is slightly optimistic; `{k}shot_l2` is that
    weight. Classes with fewer than k images contribute all they have.

    The draws use the seeds 0, 1, ..., whatever the run's seed, so that all runs are compared on the
    same images. Features are computed on the devices and gathered by every process; each process
    then solves the same problem on its host.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      labels: () -> labels of the support split, int (n,), by record id.
      support_batches: record ids -> batches of these records.
      test_batches: one pass over the test split.
      num_classes: number of classes in both splits.
      gathered: the sharding that puts a whole array on every process.
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
        self.metrics = metrics_of(shots, l2, num_draws)

    @functools.cached_property
    def _draws(self) -> list[np.ndarray]:
        """Record ids of each draw, (C, k) for the largest k."""
        labels, most = self._labels(), max(self._shots)
        draws = [
            draw_support(labels, self._num_classes, most, seed) for seed in range(self._num_draws)
        ]
        short = int((draws[0] < 0).any(axis=1).sum())
        if short:
            logger.warning(
                "few-shot: %d of %d classes have fewer than %d images in the support split; "
                "using all that they have", short, self._num_classes, most,
            )  # fmt: skip
        return draws

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state`.

        Raises:
          InputError: on every process, if no image of the test split, or none of those drawn from
            the support split, can be read; names the key of the split.
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
        """Accuracy for each weight in `l2`."""
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
    classes: tuple[int, ...] | None = None,
) -> ConfigDict:
    """Make an entry of `evals`: top-1 by least squares on frozen features, few images per class.

    For each k in `shots`, k images of each class are drawn from `train_split`, `num_draws` times.
    `l2` is the weight of the squared norm; of several, the best on `test_split` is reported. The
    classes may differ from those trained on; `classes` keeps some labels of both splits, such as
    those that were not trained on (None: as `data.classes`). All other arguments are as in
    `classification`.

    To draw, all labels of `train_split` are read once per start of the process. In TFRecord files
    they are stored with the images, so use a slice of a large data set: "train[:5%]".
    """
    return typed_entry("fewshot", locals())


def make_fewshot(inputs: EvalInputs) -> FewShot:
    """Make the evaluator for an entry from `fewshot`."""
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
    check=_check_entry,
    learns_classes=True,
    metrics=lambda entry: metrics_of(entry.shots, entry.l2, entry.num_draws),
)
