"""A run may get another end where its past stays as it was: the learning rate of each step done."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.config.stored import changed_keys, say_changes
from vit_jax.experiment.durations import parse_durations
from vit_jax.experiment.experiment import make_config_schedule

# Keys that decide where a run ends, and how.
KEYS_OF_THE_END = ("duration", "schedule.cooldown")


def find_other_past(
    stored: ConfigDict, config: ConfigDict, steps_done: int, workdir: epath.Path
) -> str | None:
    """Why the run in `workdir` cannot go on to the end that `config` gives it, and the remedies.

    None: it can.

    Args:
      stored: the config that it began with, resolved.
      config: that it is to go on with, which differs from `stored` in KEYS_OF_THE_END only.
      steps_done: of its newest checkpoint.

    Raises:
      InputError: the new schedule does not fit into the new duration.
    """
    durations = parse_durations(config)
    total = durations["duration"]
    if total < steps_done:
        return (
            f"duration={config.duration!r} ends at step {total:,}, but the run is at step "
            f"{steps_done:,} already; give more"
        )
    updates = np.arange(steps_done)
    was = np.asarray(make_config_schedule(stored, parse_durations(stored))(updates))
    now = np.asarray(make_config_schedule(config, durations)(updates))
    differing = np.flatnonzero(was != now)
    if not len(differing):
        return None
    first = differing[0]
    cooled = stored.schedule.name in ("constant", "rsqrt", "exponential", "multistep")
    cause = "its cooldown has begun" if cooled else f"schedule.name={stored.schedule.name!r}"
    changed = changed_keys(stored, config)
    of_end = {key: values for key, values in changed.items() if key in KEYS_OF_THE_END}
    return (
        f"the run cannot get another end, as {cause}: step {first + 1:,} had the learning rate "
        f"{was[first]:.6g}, and would have had {now[first]:.6g}; {'; '.join(say_changes(of_end))}; "
        f"or train on from its weights: --config.init_from={workdir} --config.init_head=kept and "
        "a new --workdir"
    )


def say_extension(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The changes of KEYS_OF_THE_END, for the log."""
    return ", ".join(f"{key} {was!r} -> {now!r}" for key, (was, now) in changed.items())
