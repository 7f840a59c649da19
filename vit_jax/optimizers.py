"""Optimizers: optax chains with decoupled weight decay on the leaves that a regex names."""

import re
from collections.abc import Callable

import optax

from vit_jax import tree
from vit_jax.config import InputError, collect_faults, nearest

# What turns clipped gradients into a direction; each takes the hyper-parameters that it has.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": lambda *, b1, b2, eps, **_: optax.scale_by_adam(b1, b2, eps),
    "sgd": lambda *, momentum, **_: optax.trace(momentum),
}


def make_optimizer(
    name: str,
    *,
    schedule: optax.Schedule,
    weight_decay: float = 0.0,
    weight_decay_on: str = ".*/kernel",
    grad_clip_norm: float | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    momentum: float = 0.9,
) -> optax.GradientTransformation:
    """A chain of four named parts: clip, direction, weight_decay, learning_rate.

        g <- g * min(1, grad_clip_norm / ||g||)       over all parameters together
        d <- m_hat / (sqrt(v_hat) + eps)              adamw; m_hat, v_hat corrected for their start
             m, with m <- g + momentum * m            sgd
        p <- p - schedule(step) * (d + weight_decay * p)

    The decay is added after the momentum and multiplied by the current learning rate. For adamw
    that is optax.adamw; it departs from Loshchilov & Hutter, whose decay is not multiplied by the
    base rate, only by the schedule's shape. For sgd it departs from L2 regularisation, whose decay
    would pass through the momentum.

    Args:
      name: a key of `OPTIMIZERS`.
      schedule: update's number, from 0 -> learning rate.
      weight_decay: factor of the parameters that decay.
      weight_decay_on: regex; parameters whose whole name (`tree.leaf_names`) matches decay.
      grad_clip_norm: greatest global norm of the gradients; None: no clipping.
      b1, b2, eps: of adamw alone.
      momentum: of sgd alone.

    Raises:
      InputError: an unknown name or a number out of range; from `init` and `update`, a
        `weight_decay_on` that matches no parameter though `weight_decay` is not 0.

    Source: Loshchilov & Hutter 2017 (arXiv:1711.05101), algorithms 1 and 2.
    """
    faults = []

    def need(key: str, value, holds: bool, what: str) -> None:
        if not holds:
            faults.append(f"optimizer.{key}={value!r} {what}")

    need("name", name, name in OPTIMIZERS, f"is unknown; {nearest(name, list(OPTIMIZERS))}")
    need("weight_decay", weight_decay, weight_decay >= 0, "must be at least 0")
    clips = grad_clip_norm is None or grad_clip_norm > 0
    need("grad_clip_norm", grad_clip_norm, clips, "must be more than 0; None turns it off")
    for key, value in (("b1", b1), ("b2", b2), ("momentum", momentum)):
        need(key, value, 0 <= value < 1, "must be at least 0 and less than 1")
    need("eps", eps, eps > 0, "must be more than 0")
    try:
        re.compile(weight_decay_on)
    except re.error as error:
        need("weight_decay_on", weight_decay_on, False, f"is not a regular expression: {error}")
    collect_faults(faults)

    def decays(params):
        chosen = tree.mask(params, weight_decay_on)
        if weight_decay and not any(tree.flatten_names(chosen).values()):
            raise InputError(
                f"optimizer.weight_decay_on={weight_decay_on!r} matches the whole name of no "
                f"parameter; the names are like {', '.join(list(tree.flatten_names(params))[:3])}"
            )
        return chosen

    clip = optax.identity() if grad_clip_norm is None else optax.clip_by_global_norm(grad_clip_norm)
    return optax.named_chain(
        ("clip", clip),
        ("direction", OPTIMIZERS[name](b1=b1, b2=b2, eps=eps, momentum=momentum)),
        ("weight_decay", optax.add_decayed_weights(weight_decay, mask=decays)),
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
    )
