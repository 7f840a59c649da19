"""Linear probe: accuracy of a linear classifier trained on frozen features.

Axes: N training images, M test images, D features, C classes.
"""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.config import POSITIVE, key
from vit_jax.config.evals import Better
from vit_jax.devices.mesh import batch_sharding
from vit_jax.devices.sharding import place
from vit_jax.evaluators.features import FeatureEvaluator, fit_whitening, make_gather
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState

logger = logging.getLogger("vit_jax")

_HELD_OUT = 0.1  # fraction of the training images that selects the weight
_MAX_STEPS = 1000
_GRADIENT = 1e-5  # the fit has converged if no entry of the gradient is larger


class Classifier(NamedTuple):
    """A linear classifier; its logits are x W + b."""

    kernel_DC: jax.Array
    bias_C: jax.Array


@jax.jit
def fit(
    x_ND: jax.Array, label_N: jax.Array, counts_N: jax.Array, l2: jax.Array, start: Classifier
) -> tuple[Classifier, jax.Array]:
    """Minimise the mean cross-entropy + l2 / 2 |W|^2 by L-BFGS from `start`.

    Equals scikit-learn's LogisticRegression with C = 1 / (l2 * N); the bias is not regularised.
    `counts_N` is 0 for rows that do not count. Returns the classifier and the largest entry of the
    remaining gradient, which shows whether the fit has converged.
    """

    def loss(classifier: Classifier) -> jax.Array:
        logits_NC = (
            jnp.matmul(x_ND, classifier.kernel_DC, precision="highest") + classifier.bias_C[None]
        )
        loss_N = optax.losses.softmax_cross_entropy_with_integer_labels(logits_NC, label_N)
        mean = (counts_N * loss_N).sum() / counts_N.sum()
        return mean + l2 / 2 * jnp.square(classifier.kernel_DC).sum()

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        classifier, state, steps, _ = carry
        value, gradient = value_and_grad(classifier, state=state)
        updates, state = solver.update(
            gradient, state, classifier, value=value, grad=gradient, value_fn=loss
        )
        classifier = optax.apply_updates(classifier, updates)
        left = optax.tree.norm(optax.tree.get(state, "grad"), ord=jnp.inf)
        return classifier, state, steps + 1, left

    def unfinished(carry: tuple[Any, ...]) -> jax.Array:
        *_, steps, left = carry
        return (steps < _MAX_STEPS) & (left > _GRADIENT)

    begin = (start, solver.init(start), jnp.int32(0), jnp.float32(jnp.inf))
    classifier, _, _, left = jax.lax.while_loop(unfinished, step, begin)
    return classifier, left


class LinearProbe(FeatureEvaluator):
    """Top-1 of multinomial logistic regression on frozen features.

    Features are whitened by the mean and standard deviation of the training images. Of several
    weights `l2`, the one that classifies a held-out tenth of the training images best, drawn at
    random, is chosen; the classifier is then fitted to all training images. The test split is used
    once, for `top1`. With several weights, `l2` is the chosen one and `held_out_top1` its accuracy
    on the held-out tenth.

    Every process gathers the features; the fit splits the training images over the devices.
    """

    l2: tuple[float, ...] = key(
        (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        "weight of half the squared norm, added to the mean cross-entropy; of several, the best "
        "on a tenth of train_split is chosen",
        within=POSITIVE,
    )

    def reports(self) -> dict[str, Better]:
        some: dict[str, Better] = {"top1": "higher"}
        return some if len(self.l2) == 1 else some | {"l2": "neither", "held_out_top1": "higher"}

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, put = make_gather(inputs), functools.partial(split_over_devices, inputs.mesh)
        num_classes = inputs.source("train_split").num_classes
        weights = sorted(self.l2, reverse=True)  # easiest fit first; each starts from the last one

        def measure(state: TrainState) -> dict[str, float]:
            train, test = gather(state, "train_split"), gather(state, "test_split")
            whiten = fit_whitening(train.x_ND)
            train_ND, test_MD = (whiten(x).astype(np.float32) for x in (train.x_ND, test.x_ND))
            x_ND, label_N = put(train_ND), put(train.label_N)
            num_images, width = train_ND.shape
            zeros = functools.partial(jnp.zeros, device=inputs.replicated)
            classifier = Classifier(zeros((width, num_classes)), zeros((num_classes,)))

            chosen, results = weights[0], {}
            if len(weights) > 1:
                held_out = np.zeros(num_images, bool)
                shuffled = np.random.default_rng(0).permutation(num_images)
                held_out[shuffled[: max(round(_HELD_OUT * num_images), 1)]] = True
                counts_N = put((~held_out).astype(np.float32))
                best = -1.0
                for l2 in weights:
                    classifier = fit_or_warn(x_ND, label_N, counts_N, l2, classifier)
                    top1 = _top1(classifier, train_ND[held_out], train.label_N[held_out])
                    if top1 > best:
                        best, chosen = top1, l2
                results = {"l2": float(chosen), "held_out_top1": best}
            counts_N = put(np.ones(num_images, np.float32))
            classifier = fit_or_warn(x_ND, label_N, counts_N, chosen, classifier)
            return {"top1": _top1(classifier, test_MD, test.label_N)} | results

        return measure


def split_over_devices(mesh: Mesh, column: np.ndarray) -> jax.Array:
    """Split (N, ...), which every process has, over the devices, zero-padded at the end."""
    sharding = batch_sharding(mesh)
    padding = -len(column) % sharding.num_devices
    column = np.pad(column, [(0, padding)] + [(0, 0)] * (column.ndim - 1))
    return place(column, sharding)


def fit_or_warn(
    x_ND: jax.Array, label_N: jax.Array, counts_N: jax.Array, l2: float, start: Classifier
) -> Classifier:
    """Run `fit`, and warn if it did not converge."""
    classifier, left = fit(x_ND, label_N, counts_N, l2, start)
    if not np.isfinite(left):
        logger.warning("linear probe: the fit with l2=%g is not finite; check the features", l2)
    elif left > _GRADIENT:
        logger.warning(
            "linear probe: the fit with l2=%g did not converge: gradient %.2g after %d steps, "
            "needs at most %g; a larger l2 is easier to fit", l2, left, _MAX_STEPS, _GRADIENT,
        )  # fmt: skip
    return classifier


def _top1(classifier: Classifier, x_MD: np.ndarray, label_M: np.ndarray) -> float:
    kernel_DC, bias_C = jax.device_get(classifier)
    return float(((x_MD @ kernel_DC + bias_C[None]).argmax(axis=1) == label_M).mean())
