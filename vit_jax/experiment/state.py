"""The train state: everything that a step takes and returns."""

from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.base.tree import OBJECTIVE, ModelState, Params
from vit_jax.models.block_ops import PLAIN
from vit_jax.models.contract import about, with_known


class TrainState(flax.struct.PyTreeNode):
    """Everything that a run carries from step to step.

    step: int32 scalar, number of updates made so far.
    params: float32 parameters: the model's, and under "objective" the objective's, if any.
    model_state: other variables of the model, such as batch statistics; {} if it has none.
    opt_state: state of the optimizer.
    ema: running average of the parameters, float32, a tree like `params`; {} if it is off.
    ema_model_state: running average of `model_state`, of integers the newest; {} if it is off.
    objective_state: state of the objective, such as centres; {} if it has none.
    """

    step: jax.Array
    params: Params
    model_state: ModelState
    opt_state: optax.OptState
    ema: Params = flax.struct.field(default_factory=dict)
    ema_model_state: ModelState = flax.struct.field(default_factory=dict)
    objective_state: ModelState = flax.struct.field(default_factory=dict)

    def averaged(self) -> "TrainState":
        """The running averages in place of the parameters and the model state."""
        return self.replace(
            params=self.ema, model_state=self.ema_model_state, ema={}, ema_model_state={}
        )


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_size: tuple[int, int],
    seed: int,
    *,
    with_ema: bool = False,
    init_objective: Callable[[jax.Array], tuple[Params, ModelState]] | None = None,
) -> TrainState:
    """The state before the first step; pure, to be jitted with its shardings.

    `init_objective`: `Objective.init`.
    """
    images = jnp.zeros((1, *image_size, about(model).channels))
    model = with_known(model, ops=PLAIN)  # kernels would split the image over devices
    model_state = dict(model.init(jax.random.key(seed), images))
    params = model_state.pop("params")
    objective_state: ModelState = {}
    if init_objective is not None:
        learned, objective_state = init_objective(jax.random.fold_in(jax.random.key(seed), 1))
        params |= {OBJECTIVE: learned} if learned else {}
    state = TrainState(
        jnp.zeros((), jnp.int32),
        params,
        model_state,
        tx.init(params),
        objective_state=objective_state,
    )
    return start_from(state, params, model_state) if with_ema else state


def start_from(
    state: TrainState, params: Params, model_state: ModelState | None = None
) -> TrainState:
    """`state` with `params` and `model_state` and, as copies, their running averages.

    The averages get their own arrays, so that the whole state can be donated. With
    `model_state` None the one in `state` stays.
    """
    model_state = state.model_state if model_state is None else model_state
    ema, ema_model_state = jax.tree.map(jnp.copy, (params, model_state))
    return state.replace(
        params=params, model_state=model_state, ema=ema, ema_model_state=ema_model_state
    )
