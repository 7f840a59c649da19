"""Few-shot linear evaluation: accuracy of a linear classifier from a few images per class.

Axes: N support images, M test images, D features, C classes.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.1, "Metrics".
"""

import functools
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.linalg

from vit_jax.base.errors import Faults, SharedInputError
from vit_jax.config import POSITIVE, key
from vit_jax.config.evals import Better
from vit_jax.data import check_classes
from vit_jax.evaluators.features import (
    FeatureEvaluator,
    Features,
    fit_whitening,
    gather_labels,
    make_gather,
    need_images,
)
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState

logger = logging.getLogger("vit_jax")

# Of big_vision's few-shot evaluator; so large that the bias, its weight, is hardly regularised.
_CONSTANT = 100.0


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

    def with_constant(x: np.ndarray) -> np.ndarray:
        return np.concatenate([whiten(x), np.full((len(x), 1), _CONSTANT)], axis=1)

    support_ND, test_MD = with_constant(support_ND), with_constant(test_MD)
    y_NC = 2.0 * (label_N[:, None] == np.arange(num_classes)) - 1.0
    for weight in l2:
        yield (test_MD @ ridge(support_ND, y_NC, weight)).argmax(axis=1)


class FewShot(FeatureEvaluator):
    """Top-1 by regularised least squares on frozen features of a few images per class.

    For each k in `shots`: `{k}shot_top1`, the mean over the draws, and `{k}shot_top1_std`, their
    sample standard deviation (for several draws). Of several weights `l2`, the one with the best
    mean on the test split itself is reported, which is slightly optimistic; `{k}shot_l2` is that
    weight. Classes with fewer than k images contribute all they have.

    The draws use the seeds 0, 1, ..., whatever the run's seed, so that all runs are compared on the
    same images. Features are computed on the devices and gathered by every process; each process
    then solves the same problem on its host.

    To draw, all labels of `train_split` are read once per start of the process. In TFRecord files
    they are stored with the images, so use a slice of a large data set: "train[:5%]".
    """

    shots: tuple[int, ...] = key(
        (1, 5, 10, 25), "images of each class that are drawn from train_split", within=POSITIVE
    )
    l2: tuple[float, ...] = key(
        (1024.0,),
        "weight of the squared norm; of several, the best on test_split is reported",
        within=POSITIVE,
    )
    num_draws: int = key(3, "draws to average over", within=POSITIVE)
    classes: tuple[int, ...] | None = key(
        None,
        "labels of both splits to keep, such as those that were not trained on; None: as "
        "data.classes",
    )

    def check(self) -> list[str]:
        faults = Faults()
        faults.check(check_classes, self.classes, "classes")
        return faults

    def reports(self) -> dict[str, Better]:
        metrics: dict[str, Better] = {}
        for k in self.shots:
            metrics[f"{k}shot_top1"] = "higher"
            if self.num_draws > 1:
                metrics[f"{k}shot_top1_std"] = "neither"
            if len(self.l2) > 1:
                metrics[f"{k}shot_l2"] = "neither"
        return metrics

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, source = make_gather(inputs), inputs.source("train_split")

        @functools.cache
        def draws() -> list[np.ndarray]:
            labels, most = gather_labels(source), max(self.shots)
            seeds = range(self.num_draws)
            drawn = [draw_support(labels, source.num_classes, most, seed) for seed in seeds]
            if short := int((drawn[0] < 0).any(axis=1).sum()):
                logger.warning(
                    "few-shot: %d of %d classes have fewer than %d images in the support split; "
                    "using all that they have", short, source.num_classes, most,
                )  # fmt: skip
            return drawn

        def measure(state: TrainState) -> dict[str, float]:
            chosen = np.unique(draws())
            support = gather(state, "train_split", chosen[chosen >= 0])
            test = gather(state, "test_split")
            results = {}
            for shots in self.shots:
                drawn = [ids[:, :shots] for ids in draws()]
                top1 = np.array([self._top1(d, support, test, source.num_classes) for d in drawn])
                best = top1.mean(axis=0).argmax()
                results[f"{shots}shot_top1"] = float(top1[:, best].mean())
                if self.num_draws > 1:
                    results[f"{shots}shot_top1_std"] = float(top1[:, best].std(ddof=1))
                if len(self.l2) > 1:
                    results[f"{shots}shot_l2"] = float(self.l2[best])
            return results

        return measure

    def _top1(
        self, drawn: np.ndarray, support: Features, test: Features, num_classes: int
    ) -> list[float]:
        """Accuracy for each weight in `l2`."""
        rows = np.isin(support.id_N, drawn)
        need_images(rows.sum(), "train_split")
        x_ND, label_N = support.x_ND[rows], support.label_N[rows]
        predictions = predict(x_ND, label_N, test.x_ND, num_classes=num_classes, l2=self.l2)
        return [float((predicted == test.label_N).mean()) for predicted in predictions]
