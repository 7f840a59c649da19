"""The train state: everything that a step takes and returns."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.models.fields import value_of
from vit_jax.tree import ModelState, Params


class TrainState(flax.struct.PyTreeNode):
    """Everything that a run carries from step to step.

    step: int32 scalar, number of updates made so far.
    params: float32 parameters.
    model_state: other variables of the model, such as batch statistics; {} if it has none.
    opt_state: state of the optimizer.
    ema: running average of the parameters, float32, a tree like `params`; {} if it is off.
    """

    step: jax.Array
    params: Params
    model_state: ModelState
    opt_state: optax.OptState
    ema: Params = flax.struct.field(default_factory=dict)


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: tuple[int, int],
    seed: int,
    *,
    with_ema: bool = False,
) -> TrainState:
    """The state before the first step; pure, to be jitted with its shardings."""
    images = jnp.zeros((1, *image_size, value_of(model, "channels")))
    model_state = dict(model.init(jax.random.key(seed), images))
    params = model_state.pop("params")
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, tx.init(params))
    return start_from(state, params) if with_ema else state


def start_from(state: TrainState, params: Params) -> TrainState:
    """`state` with `params` as its parameters and, as a copy, its running average.

    The average gets its own arrays, so that the whole state can be donated.
    """
    return state.replace(params=params, ema=jax.tree.map(jnp.copy, params))
