"""The first check of a config: every fault that can be found without files or devices.

Each room checks its own section of the config; CHECKS lists these checks.
"""

import re
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from vit_jax import checkpoints, models
from vit_jax.config import REQUIRED, checks, decided_later, evals
from vit_jax.data import checks as data
from vit_jax.devices import mesh
from vit_jax.errors import Faults, collect_faults
from vit_jax.experiment import checks as experiment
from vit_jax.experiment import durations
from vit_jax.job import watchdog
from vit_jax.metrics import profiler, weights_and_biases
from vit_jax.run import selection

# Each adds the faults that it finds; the config has all keys, with values of the right types.
CHECKS: tuple[Callable[[ConfigDict, Faults], None], ...] = (
    checks.check_config,
    durations.check_config,
    models.check_config,
    data.check_config,
    experiment.check_config,
    mesh.check_config,
    checkpoints.check_config,
    watchdog.check_config,
    profiler.check_profile,
    weights_and_biases.check_project,
    evals.check_config,
    data.check_eval_ops,
    selection.check_config,
)


def find_faults(config: ConfigDict, required: Sequence[str] = REQUIRED) -> list[str]:
    """The faults of `config`, at most one per key, each starting with its key.

    `required`: keys that must be set.
    """
    faults = Faults(checks.find_misshapen(config))
    if not faults:
        later = decided_later(config)
        faults += checks.find_unset(config, [key for key in required if key not in later])
        emptied = checks.find_emptied(config)
        faults += emptied
        for check in () if emptied else CHECKS:
            check(config, faults)
    first_of_each_key = {re.split(r"[^\w.*]", fault)[0]: fault for fault in reversed(faults)}
    return list(first_of_each_key.values())[::-1]


def validate(
    config: ConfigDict,
    override_faults: list[str],
    where: str,
    required: Sequence[str] = REQUIRED,
) -> None:
    """Raise one InputError with all faults of a config and of the overrides applied to it."""
    collect_faults(override_faults + find_faults(config, required), where)
