"""Objectives: what is minimised over a batch. One file and one line in OBJECTIVES each."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from vit_jax.errors import InputError, nearest
from vit_jax.objectives.supervised import LossFn, Objective, choose_fields, make_supervised

# name -> (model, loss, keys of its own) -> objective(params, model_state, batch, rng) ->
# `ObjectiveOutput`. Keys of its own come from plug-ins.
OBJECTIVES: dict[str, Callable[..., Objective]] = {"supervised": make_supervised}


def make_objective(model: nn.Module, loss: LossFn, name: str, **own: Any) -> Objective:
    """The objective called `name`; `own`: other keys of `config.objective`, None where not set.

    Raises:
      InputError: an unknown name, or a key that it lacks.
    """
    if name not in OBJECTIVES:
        raise InputError(f"objective.name={name!r}: {nearest(name, list(OBJECTIVES))}")
    make = OBJECTIVES[name]
    return make(model, loss, **choose_fields("objective", name, make, own))
