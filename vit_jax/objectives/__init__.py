"""Objectives: what is minimised over a batch. One file each, and a line in config/registries.py."""

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults
from vit_jax.config import OBJECTIVES
from vit_jax.objectives.contract import ObjectivePart
from vit_jax.objectives.metrics import find_metrics


def objective_of(config: ConfigDict) -> ObjectivePart:
    """The objective that a config chooses, with its keys.

    Raises:
      InputError: no such objective, a key of another one, or values that are out of range.
    """
    return OBJECTIVES.make(config.objective)


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the objective together with other sections; `config.checks` has checked its keys."""
    objective = Faults().check(objective_of, config)
    if objective is not None:
        faults += objective.find_conflicts(config)
        names, name = config.log.metrics, config.objective.name
        faults.check(find_metrics, names or (), config.data.multi_label, section="log.")
        faults.need(
            names is None or objective.learns_labels,
            f"log.metrics={names!r}: objective.name={name!r} learns no labels; set it to None",
        )
