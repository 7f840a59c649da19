"""Objectives: functions to minimise over a batch. One module and one line in OBJECTIVES each."""

from collections.abc import Callable

import flax.linen as nn

from vit_jax.config import KeyValue, choose_keys
from vit_jax.errors import InputError, nearest
from vit_jax.objectives.supervised import LossFn, Objective, make_supervised

# name -> function of (model, loss, own keys) that makes objective(params, model_state, batch, rng)
# -> `ObjectiveOutput`. Own keys come from plug-ins.
OBJECTIVES: dict[str, Callable[..., Objective]] = {"supervised": make_supervised}


def make_objective(model: nn.Module, loss: LossFn, name: str, **own: KeyValue) -> Objective:
    """Make the objective called `name`; `own`: other keys of `config.objective`, None if not set.

    Raises:
      InputError: for an unknown name, or a key that the objective does not take.
    """
    if name not in OBJECTIVES:
        raise InputError(f"objective.name={name!r}: {nearest(name, list(OBJECTIVES))}")
    make = OBJECTIVES[name]
    return make(model, loss, **choose_keys("objective", name, make, own))
