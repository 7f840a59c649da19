"""Objectives: functions to minimise over a batch. One module and one line in OBJECTIVES each."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from ml_collections import ConfigDict

from vit_jax.config import KeyValue, choose_keys
from vit_jax.errors import InputError, nearest
from vit_jax.objectives.contract import Objective, PlainObjective, RunFacts, as_objective
from vit_jax.objectives.distillation import (
    check_distillation,
    make_distillation,
    needs_labels,
    parse_teachers,
)
from vit_jax.objectives.lejepa import check_lejepa, make_lejepa
from vit_jax.objectives.mae import check_mae, make_mae
from vit_jax.objectives.masked_patches import check_masked_patches, make_masked_patches
from vit_jax.objectives.self_distillation import make_self_distillation
from vit_jax.objectives.self_distillation_keys import check_self_distillation
from vit_jax.objectives.supervised import LossFn, make_supervised

# name -> function of (model, loss, own keys) that makes an `Objective`, or in its short form
# objective(params, model_state, batch, rng) -> `ObjectiveOutput`. One that names `setting` in its
# signature gets a `RunFacts`. Other keys come from `config.objective`; those of plug-ins too.
OBJECTIVES: dict[str, Callable[..., Objective | PlainObjective]] = {
    "supervised": make_supervised,
    "distillation": make_distillation,
    "masked_patches": make_masked_patches,
    "mae": make_mae,
    "lejepa": make_lejepa,
    "self_distillation": make_self_distillation,
}

# name -> function that raises InputError for wrong values of the objective's own keys.
_CHECKS: dict[str, Callable[..., None]] = {
    "masked_patches": check_masked_patches,
    "mae": check_mae,
    "lejepa": check_lejepa,
    "self_distillation": check_self_distillation,
}


def make_objective(
    model: nn.Module,
    loss: LossFn,
    name: str,
    setting: RunFacts | None = None,
    **own: KeyValue,
) -> Objective:
    """Make the objective called `name`; `own`: other keys of `config.objective`, None if not set.

    Raises:
      InputError: for an unknown name, or a key that the objective does not take.
    """
    chosen: dict[str, Any] = choose_own_keys(name, **own)
    make = OBJECTIVES[name]
    if "setting" in inspect.signature(make).parameters:
        chosen["setting"] = setting
    return as_objective(make(model, loss, **chosen))


def choose_own_keys(name: str, **own: KeyValue) -> dict[str, KeyValue]:
    """The keys of `config.objective` that are set, for the objective called `name`.

    Raises:
      InputError: for an unknown name, or a key that the objective does not take.
    """
    if name not in OBJECTIVES:
        raise InputError(f"objective.name={name!r}: {nearest(name, list(OBJECTIVES))}")
    return choose_keys("objective", name, OBJECTIVES[name], own)


def check_objective(config: ConfigDict) -> None:
    """Raise InputError if the section `objective` is wrong, as far as that shows without files."""
    own: dict[str, Any] = choose_own_keys(**config.objective)
    if config.objective.name == "distillation":
        check_distillation(config.loss.name, **own)
    elif config.objective.name in _CHECKS:
        _CHECKS[config.objective.name](**own)


def learns_labels(config: ConfigDict) -> bool:
    """Whether the objective of `config` needs labels; True for one of a plug-in means "perhaps"."""
    o = config.objective
    return o.name == "supervised" or (o.name == "distillation" and needs_labels(o.weight))


def teachers_of(config: ConfigDict) -> dict[str, float]:
    """{source: weight} of the teachers of `config`; {} if its objective has none."""
    return {} if config.objective.teacher is None else parse_teachers(config.objective.teacher)
