"""Schedule-free AdamW: the average of the weights takes the place of a decaying learning rate.

    z <- z - lr * (g / (sqrt(v_hat) + eps) + weight_decay * y)        g: the gradient at y
    x <- (1 - c) x + c z                                              c = w / (sum of all w)
    y <- (1 - average_share) z + average_share x                      w = (largest lr so far)^2

The parameters of a run are y. x is its running average (`TrainState.ema`), which evaluators and
exports take. The state holds z - y instead of z, so that it suits any initial parameters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.parts import key
from vit_jax.experiment.optimizers.optimizers import Optimizer, decay_of, eps_of


class ScheduleFree(Optimizer):
    """AdamW of Defazio et al. 2024 (arXiv:2405.15682), algorithm 1; set schedule.name=constant.

    Evaluators and exports take the average of the weights.
    """

    average_share: float = key(
        0.9, "share of the average in the weights whose gradient is taken", within="[0, 1)"
    )
    b2: float = decay_of("second moment", 0.999)
    eps: float = eps_of(1e-8)
    averages = True

    def bind(self) -> optax.GradientTransformation:
        return optax.scale_by_rms(self.b2, self.eps, eps_in_sqrt=False, bias_correction=True)

    def after(
        self, weight_decay_on: str, schedule: optax.Schedule
    ) -> Mapping[str, optax.GradientTransformation]:
        return {"learning_rate": _follow(self.average_share, schedule)}


class ScheduleFreeState(NamedTuple):
    """ahead: z - y, a tree like the parameters; the others are scalars.

    A run that has lowered its rate multiplies what this part gives by a factor f; then `ahead` is
    (z - y) / f.

    step: number of updates so far.
    max_lr: the largest learning rate so far.
    weight: the sum of all w so far / the newest w.
    keep: share of the average that stayed in the last update, of y instead of z.
    """

    ahead: optax.Params
    step: jax.Array
    max_lr: jax.Array
    weight: jax.Array
    keep: jax.Array


def _follow(average_share: float, schedule: optax.Schedule) -> optax.GradientTransformation:
    """From updates of z to updates of y."""

    def init(params: optax.Params) -> ScheduleFreeState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ScheduleFreeState(zeros, jnp.zeros((), jnp.int32), *jnp.zeros((3,)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScheduleFreeState]:
        max_lr = jnp.maximum(state.max_lr, schedule(state.step))
        # In a warm-up from 0 the first update moves nothing, and has no weight.
        weight = 1 + state.weight * (state.max_lr / jnp.where(max_lr > 0, max_lr, 1)) ** 2
        c = 1 / weight
        moved = 1 - average_share * (1 - c)
        of_y = jax.tree.map(lambda ahead, u: c * ahead + moved * u, state.ahead, updates)
        ahead = jax.tree.map(
            lambda ahead, u: (1 - c) * (ahead + average_share * u), state.ahead, updates
        )
        return of_y, ScheduleFreeState(ahead, state.step + 1, max_lr, weight, 1 - c / moved)

    return optax.GradientTransformation(init, update)
