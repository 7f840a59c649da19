"""Classification of labelled images.

Axes: B examples, C classes.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import InputError, collect_faults, nearest
from vit_jax.tree import Batch, ModelState, Params

LossFn = Callable[[jax.Array, jax.Array], jax.Array]


class Loss(NamedTuple):
    """A loss by its name.

    fn: (logits (B, C), labels (B,) int or (B, C) float, label_smoothing, keys of its own) -> (B,).
    probabilities: logits (B, C) -> what a model trained with it says of each class, (B, C).
    """

    fn: Callable[..., jax.Array]
    probabilities: Callable[[jax.Array], jax.Array] = jax.nn.softmax


class ObjectiveOutput(NamedTuple):
    """Sums over a batch, to be divided once, by `weight_sum`."""

    loss_sum: jax.Array
    weight_sum: jax.Array
    metric_sums: dict[str, jax.Array]
    model_state: ModelState


# (params, model_state, batch, rng) -> the sums over the batch.
Objective = Callable[[Params, ModelState, Batch, jax.Array], ObjectiveOutput]


def as_targets(labels: jax.Array, num_classes: int) -> jax.Array:
    """Labels, int (B,) or float (B, C), as float targets (B, C)."""
    return jax.nn.one_hot(labels, num_classes) if labels.ndim == 1 else labels


def softmax_loss(logits_BC: jax.Array, labels: jax.Array, label_smoothing: float) -> jax.Array:
    """-sum_c t_c log softmax(logits)_c; t smoothed towards uniform. Shapes: -> (B,)."""
    targets_BC = optax.smooth_labels(as_targets(labels, logits_BC.shape[1]), label_smoothing)
    return optax.losses.softmax_cross_entropy(logits_BC, targets_BC)


def sigmoid_loss(logits_BC: jax.Array, labels: jax.Array, label_smoothing: float) -> jax.Array:
    """Sum over classes of the binary cross-entropies. Shapes: -> (B,).

    Source: Beyer et al. 2020 (arXiv:2006.07159), section 5.
    """
    targets_BC = optax.smooth_labels(as_targets(labels, logits_BC.shape[1]), label_smoothing)
    return optax.losses.sigmoid_binary_cross_entropy(logits_BC, targets_BC).sum(axis=-1)


LOSSES = {
    "softmax": Loss(softmax_loss),
    "sigmoid": Loss(sigmoid_loss, jax.nn.sigmoid),
}


def choose_fields(
    section: str, name: str, part: Callable, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of `values`, by the keys of a section of the config, that are set.

    Raises:
      InputError: `part`, which is called `name`, does not take one.
    """
    known = inspect.signature(part).parameters
    chosen = {key: value for key, value in values.items() if value is not None}
    collect_faults(
        [
            f"{section}.{key}={value!r}: is nothing that {name} has; set it to None"
            for key, value in chosen.items()
            if key not in known
        ]
    )
    return chosen


def make_loss(name: str, label_smoothing: float = 0.0, z_loss: float = 0.0, **own: Any) -> LossFn:
    """loss(logits (B, C), labels (B,) int or (B, C) float) -> (B,), by its name in LOSSES.

    Args:
      name: a key of LOSSES.
      label_smoothing: share of the target that goes to all classes alike.
      z_loss: of softmax: the loss grows by z_loss * log(Z)^2, Z = sum_c exp(logit_c), which keeps
        the logits from drifting; 0: it does not. Zoph et al. 2022 (arXiv:2202.08906);
        Chowdhery et al. 2022 (arXiv:2204.02311), section 5, take 1e-4.
      **own: keys that plug-ins add to `config.loss`; None where not set.

    Raises:
      InputError: unknown name, a number out of range, a z_loss where there is no softmax, or a key
        that the loss lacks.
    """
    if name not in LOSSES:
        raise InputError(f"loss.name={name!r}: {nearest(name, list(LOSSES))}")
    if not 0.0 <= label_smoothing < 1.0:
        raise InputError(f"loss.label_smoothing={label_smoothing}: needs a number in [0, 1)")
    if z_loss < 0.0:
        raise InputError(f"loss.z_loss={z_loss}: needs at least 0, which turns it off")
    if z_loss and name != "softmax":
        raise InputError(f"loss.z_loss={z_loss}: goes with loss.name=softmax alone; set it to 0")
    fn = LOSSES[name].fn
    fields = choose_fields("loss", name, fn, own)

    def loss(logits_BC: jax.Array, labels: jax.Array) -> jax.Array:
        loss_B = fn(logits_BC, labels, label_smoothing, **fields)
        if z_loss:
            loss_B += z_loss * jax.nn.logsumexp(logits_BC, axis=-1) ** 2
        return loss_B

    return loss


def hits(logits_BC: jax.Array, labels: jax.Array, k: int = 1) -> jax.Array:
    """1.0 where one of the k largest logits is of a right class, else 0.0. Shapes: -> (B,).

    Right is the class of the greatest target; where several have it, as where an image shows
    several things, each of them. So of mixed labels it is the one that weighs most: were the other
    right too, chance alone would score twice as much.
    """
    _, classes_Bk = jax.lax.top_k(logits_BC, min(k, logits_BC.shape[1]))
    targets_BC = as_targets(labels, logits_BC.shape[1])
    greatest_B = targets_BC.max(axis=1)
    found_B = jnp.take_along_axis(targets_BC, classes_Bk, axis=1).max(axis=1)
    return (found_B == greatest_B) & (greatest_B > 0)


def make_supervised(model: nn.Module, loss: LossFn) -> Objective:
    """The objective of classifying `batch["image"]` (B, H, W, 3) as `batch["label"]`.

    Returns:
      objective(params, model_state, batch, rng) -> ObjectiveOutput.
    """

    def objective(
        params: Params, model_state: ModelState, batch: Batch, rng: jax.Array
    ) -> ObjectiveOutput:
        variables = {"params": params, **model_state}
        logits = model.apply(variables, batch["image"], train=True, rngs={"dropout": rng})
        heads = jax.tree.leaves(logits)  # each of several is to tell the label
        loss_B = sum(loss(logits_BC, batch["label"]) for logits_BC in heads) / len(heads)
        logits_BC, mask_B = cast(jax.Array, sum(heads) / len(heads)), batch["mask"]
        return ObjectiveOutput(
            loss_sum=(mask_B * loss_B).sum(),
            weight_sum=mask_B.sum(),
            metric_sums={"top1": (mask_B * hits(logits_BC, batch["label"])).sum()},
            model_state=model_state,
        )

    return objective
