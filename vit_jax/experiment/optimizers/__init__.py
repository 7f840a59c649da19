"""Optimizers: optax chains with decoupled weight decay on the leaves that a regex names.

The update of a parameter p with the gradient g:

    g <- g * min(1, grad_clip_norm / ||g||)       over all parameters together
    d <- m_hat / (sqrt(v_hat) + eps)              adamw; m_hat, v_hat corrected for their start
         with m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2
         m                                        sgd; m <- g + momentum m
         sign(b1 m + (1 - b1) g)                  lion; then m <- b2 m + (1 - b2) g
         m                                        adafactor; m <- b1 m + (1 - b1) g / sqrt(V)
         with V = r c^T / mean(r) of a matrix, r and c the means over its columns and rows of
         V <- b V + (1 - b) (g^2 + eps), b = min(b2, 1 - t^-0.8) at the t-th step
    p <- p - k * schedule(step) * (d + weight_decay * p)
         with k = 1, or layer_decay^(depth + 1 - i) for the i-th part of the model

The decay is added after the momentum and multiplied by the current learning rate. For adamw
that is optax.adamw; it departs from Loshchilov & Hutter, whose decay is not multiplied by the
base rate, only by the schedule's shape. For sgd it departs from L2 regularisation, whose decay
would pass through the momentum.

Of adafactor the paper takes: the factored second moment, its rate capped at adam's 0.999, a
first moment in bfloat16, and a learning rate that is not scaled by the parameters' norms. Its
updates are not clipped, and its moments are not corrected for their start: the first update is
a tenth of the later ones. Vectors, and matrices with a side below 32, keep the whole second
moment. It is mapped over scanned layers, so that it factors each layer's own matrix.

Source: Loshchilov & Hutter 2017 (arXiv:1711.05101), algorithms 1 and 2; layer_decay: Clark et al.
2020 (arXiv:2003.10555), Bao et al. 2021 (arXiv:2106.08254).
"""

import inspect
import re

import optax

from vit_jax.errors import collect_faults, nearest
from vit_jax.experiment.optimizers import masks
from vit_jax.experiment.optimizers.directions import MOMENTUM_DTYPES, OPTIMIZERS
from vit_jax.experiment.optimizers.layers import over_layers, scale_layers

__all__ = ["MOMENTUM_DTYPES", "OPTIMIZERS", "make_optimizer", "over_layers"]


def make_optimizer(
    name: str,
    *,
    schedule: optax.Schedule,
    weight_decay: float = 0.0,
    weight_decay_on: str = ".*/kernel",
    grad_clip_norm: float | None = None,
    layer_decay: float | None = None,
    freeze: str | None = None,
    **hyperparameters: float | str | None,
) -> optax.GradientTransformation:
    """The update at the top of this module, as a chain of named parts.

    frozen_gradients, clip, direction, weight_decay, layer_decay, learning_rate, frozen_updates; a
    part that a setting turns off does nothing.

    Args:
      name: a key of `OPTIMIZERS`.
      schedule: update's number, from 0 -> learning rate.
      weight_decay: factor of the parameters that decay.
      weight_decay_on: regex over whole names; what matches decays. Layers are named as in the
        unrolled model (`encoder/layer_3/.*`) also where they are scanned.
      grad_clip_norm: greatest global norm of the gradients; None: no clipping.
      layer_decay: each layer learns at this share of the rate of the one above it: i is 0 for the
        embedding (patches, class token, positions), l + 1 for layer l, depth + 1 for the last norm
        and the head. None: all learn at the schedule's rate.
      freeze: regex over the same names. What matches is never changed, not a bit of it; its
        gradients do not count in the clip's norm; a leaf that is frozen whole has no state. None:
        everything learns.
      **hyperparameters: arguments of `OPTIMIZERS[name]`; None: its own default.

    Raises:
      InputError: an unknown name, a number out of range, or one that the optimizer does not have;
        from `init` and `update`, a `weight_decay_on` that matches no parameter though
        `weight_decay` is not 0, a `freeze` that matches none or all, a `layer_decay` for a model
        without layers.
    """
    given = {key: value for key, value in hyperparameters.items() if value is not None}
    _check(name, given, weight_decay, weight_decay_on, grad_clip_norm, layer_decay, freeze)
    clip = optax.identity() if grad_clip_norm is None else optax.clip_by_global_norm(grad_clip_norm)
    direction = OPTIMIZERS[name](**given)
    drop_frozen = optax.identity()
    if freeze is not None:
        direction = optax.masked(direction, lambda params: masks.leaves_that_learn(params, freeze))
        drop_frozen = masks.drop_frozen(freeze)
    return optax.named_chain(
        ("frozen_gradients", drop_frozen),
        ("clip", clip),
        ("direction", direction),
        ("weight_decay", masks.decay_weights(weight_decay, weight_decay_on)),
        ("layer_decay", optax.identity() if layer_decay is None else scale_layers(layer_decay)),
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
        ("frozen_updates", drop_frozen),
    )


def _check(name, given, weight_decay, weight_decay_on, grad_clip_norm, layer_decay, freeze) -> None:
    """Raises InputError with every fault of `make_optimizer`'s arguments."""
    faults = []

    def need(key: str, value, holds: bool, what: str) -> None:
        if not holds:
            faults.append(f"optimizer.{key}={value!r} {what}")

    need("name", name, name in OPTIMIZERS, f"is unknown; {nearest(name, list(OPTIMIZERS))}")
    need("weight_decay", weight_decay, weight_decay >= 0, "must be at least 0")
    clips = grad_clip_norm is None or grad_clip_norm > 0
    need("grad_clip_norm", grad_clip_norm, clips, "must be more than 0; None turns it off")
    for key in given.keys() & {"b1", "b2", "momentum"}:
        need(key, given[key], 0 <= given[key] < 1, "must be at least 0 and less than 1")
    if "eps" in given:
        need("eps", given["eps"], given["eps"] > 0, "must be more than 0")
    dtype = given.get("momentum_dtype", "float32")
    hint = f"is unknown; {nearest(dtype, MOMENTUM_DTYPES)}"
    need("momentum_dtype", dtype, dtype in MOMENTUM_DTYPES, hint)
    decays_by_layer = layer_decay is None or 0 < layer_decay <= 1
    need("layer_decay", layer_decay, decays_by_layer, "must be more than 0 and at most 1")
    for key, pattern in (("weight_decay_on", weight_decay_on), ("freeze", freeze)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            need(key, pattern, False, f"is not a regular expression: {error}")
    if name in OPTIMIZERS:
        own = inspect.signature(OPTIMIZERS[name]).parameters
        for key in given.keys() - own.keys():
            need(key, given[key], False, f"is nothing that {name} has; set it to None")
    collect_faults(faults)
