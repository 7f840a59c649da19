"""The first check of a config: all that can be known before a file or a device is touched.

Each room checks its own section; the list here gathers the checks.
"""

import re
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from vit_jax import checkpoints, models
from vit_jax.config import REQUIRED, checks, evals
from vit_jax.data import checks as data
from vit_jax.devices import mesh
from vit_jax.errors import Faults, collect_faults
from vit_jax.experiment import durations, experiment
from vit_jax.job import watchdog
from vit_jax.metrics import profiler, weights_and_biases

# Each adds the faults that it finds in a config whose keys are all there.
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
)


def find_faults(config: ConfigDict, required: Sequence[str] = REQUIRED) -> list[str]:
    """Every fault of `config`, the first of each key, whose name it begins with.

    `required` are the keys that must be set.
    """
    faults = Faults(checks.find_misshapen(config))
    if not faults:
        faults += checks.find_unset(config, required)
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
    """Raises one InputError with every fault of a config and of the overrides given to it."""
    collect_faults(override_faults + find_faults(config, required), where)
