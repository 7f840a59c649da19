"""Losses of one example: a part each, with what every classifier may add.

Axes: B examples, C classes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base.errors import Faults, InputError
from vit_jax.config import Part, key, sections
from vit_jax.objectives.contract import LossFn


def as_targets(labels: jax.Array, num_classes: int) -> jax.Array:
    """Labels, int (B,) or float (B, C), as float targets (B, C)."""
    return jax.nn.one_hot(labels, num_classes) if labels.ndim == 1 else labels


class Loss(sections.Loss, Part):
    """A loss, as `loss.name` selects it; its fields are keys of the section `loss`.

    excludes: True if the classes of an image exclude each other, as with the softmax: z_loss may be
      added, and a class weight multiplies the loss of an example. False if each class has a binary
      cross-entropy, whose term a class weight multiplies: its probabilities need not add up to 1,
      so that it is no teacher with objective.mode=soft. None: it says neither, and takes neither
      z_loss nor class weights.
    """

    def check(self) -> list[str]:
        faults = Faults()
        faults.need(
            not self.z_loss or self.excludes,
            f"z_loss={self.z_loss}: needs classes that exclude each other, and those of "
            f"loss.name={self.name} do not; set it to 0, or set --config.loss.name=softmax",
        )
        faults.need(
            self.class_weights is None or self.excludes is not None,
            f"class_weights={self.class_weights!r}: loss.name={self.name} has no weights of "
            "classes; set it to None, or set --config.loss.name=softmax or sigmoid",
        )
        faults.check(parse_class_weights, self.class_weights)
        return faults

    def __call__(
        self, logits_BC: jax.Array, labels: jax.Array, label_smoothing: float
    ) -> jax.Array:
        """The loss (B,) for labels, (B,) int or (B, C) float."""
        raise NotImplementedError

    def probabilities(self, logits_BC: jax.Array) -> jax.Array:
        """The class probabilities (B, C) of a model trained with the loss."""
        return jax.nn.softmax(logits_BC)

    def bind(self) -> LossFn:
        """Make loss(logits (B, C), labels (B,) int or (B, C) float) -> (B,), with all its keys.

        Evaluators report this loss too. What is only for training goes into `loss_sum` of
        `Supervised`. z_loss: Zoph et al. 2022 (arXiv:2202.08906); Chowdhery et al. 2022
        (arXiv:2204.02311), section 5, use 1e-4.
        """
        z_loss, weights = self.z_loss, parse_class_weights(self.class_weights)

        def loss(logits_BC: jax.Array, labels: jax.Array) -> jax.Array:
            loss_B = self(logits_BC, labels, self.label_smoothing)
            if loss_B.shape != logits_BC.shape[:1]:
                raise InputError(
                    f"loss.name={self.name!r}: gave the shape {loss_B.shape} for logits "
                    f"{logits_BC.shape}; needs one number for each image"
                )
            if weights is not None:
                targets_BC = as_targets(labels, logits_BC.shape[1])
                weights_1C = jnp.reshape(jnp.asarray(weights, jnp.float32), (1, -1))
                if self.excludes:
                    loss_B *= (targets_BC * weights_1C).sum(axis=1)
                else:
                    more_BC = (weights_1C - 1) * targets_BC * jax.nn.softplus(-logits_BC)
                    loss_B += more_BC.sum(axis=1)
            if z_loss:
                loss_B += z_loss * jax.nn.logsumexp(logits_BC, axis=-1) ** 2
            return loss_B

        return loss


def cross_entropy(
    logits_BC: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
    """The softmax cross-entropy (B,) with targets smoothed towards uniform."""
    targets_BC = optax.smooth_labels(as_targets(labels, logits_BC.shape[1]), label_smoothing)
    return optax.losses.softmax_cross_entropy(logits_BC, targets_BC)


class Softmax(Loss):
    """-sum_c t_c log softmax(logits)_c; targets t are smoothed towards uniform."""

    excludes = True

    def __call__(
        self, logits_BC: jax.Array, labels: jax.Array, label_smoothing: float
    ) -> jax.Array:
        return cross_entropy(logits_BC, labels, label_smoothing)


class Sigmoid(Loss):
    """Binary cross-entropy, summed over the classes.

    Source: Beyer et al. 2020 (arXiv:2006.07159), section 5; whole targets: Wightman et al. 2021
      (arXiv:2110.00476), section 3.2.
    """

    excludes = False
    whole_targets: bool = key(
        False,
        "a class with a share of the target has all of it, as both classes of a mixed image",
    )

    def __call__(
        self, logits_BC: jax.Array, labels: jax.Array, label_smoothing: float
    ) -> jax.Array:
        targets_BC = as_targets(labels, logits_BC.shape[1])
        if self.whole_targets:
            targets_BC = jnp.ceil(targets_BC)
        targets_BC = optax.smooth_labels(targets_BC, label_smoothing)
        return optax.losses.sigmoid_binary_cross_entropy(logits_BC, targets_BC).sum(axis=-1)

    def probabilities(self, logits_BC: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(logits_BC)


def parse_class_weights(text: str | None) -> list[float] | None:
    """The numbers in `loss.class_weights`; None where they are not set, or not yet known.

    Raises:
      InputError: they are no positive numbers.
    """
    if text in (None, "balanced"):
        return None
    try:
        weights = [float(number) for number in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise InputError(
            f"class_weights={text!r}: needs balanced, or a positive number for each class, "
            "e.g. 1,2.5"
        )
    return weights


def balanced_weights(counts_C: np.ndarray, num_examples: int, excludes: bool) -> np.ndarray:
    """The class weights (C,) by which rare classes count as much as frequent ones.

    If classes exclude each other N / (C n_c), n_c of the N examples being of class c, so that their
    mean over the examples is 1; else (N - n_c) / n_c, so that an image with the class and those
    without weigh the same. 1 for a class without examples, or of all.

    Source: King and Zeng 2001, "Logistic regression in rare events data", section 4, for the first.
    """
    counts_C = np.asarray(counts_C, np.float64)
    others = num_examples / len(counts_C) if excludes else num_examples - counts_C
    weights_C = others / np.where(counts_C > 0, counts_C, 1)
    return np.where((counts_C > 0) & (weights_C > 0), weights_C, 1.0)


def hits(logits_BC: jax.Array, labels: jax.Array, k: int = 1) -> jax.Array:
    """1.0 if one of the k largest logits belongs to a correct class, else 0.0. Shapes: -> (B,).

    Correct classes are those with the largest target: several, if an image shows several things. Of
    mixed labels only the one with the larger weight is correct; otherwise random guesses would
    score twice as high.
    """
    _, classes_Bk = jax.lax.top_k(logits_BC, min(k, logits_BC.shape[1]))
    targets_BC = as_targets(labels, logits_BC.shape[1])
    greatest_B = targets_BC.max(axis=1)
    found_B = jnp.take_along_axis(targets_BC, classes_Bk, axis=1).max(axis=1)
    return (found_B == greatest_B) & (greatest_B > 0)
