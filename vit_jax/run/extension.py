"""A run may get another end where its past stays as it was: the schedules of all steps done."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.config.stored import changed_keys, say_changes
from vit_jax.experiment.durations import parse_durations
from vit_jax.experiment.schedules import half_cosine, make_config_schedule

# Keys that decide where a run ends, and how.
KEYS_OF_THE_END = ("duration", "schedule.cooldown")
# Keys of `optimizer` whose values go to the value of KEY_end at the end of a run.
_MOVING = ("weight_decay", "ema_decay")


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
    if len(differing):
        first = differing[0]
        cooled = stored.schedule.name in ("constant", "rsqrt", "exponential", "multistep")
        cause = "its cooldown has begun" if cooled else f"schedule.name={stored.schedule.name!r}"
        cause += (
            f": step {first + 1:,} had the learning rate {was[first]:.9g}, and would have had "
            f"{now[first]:.9g}"
        )
    else:
        found = _find_moving(stored, parse_durations(stored)["duration"], total, steps_done)
        if found is None:
            return None
        cause = found
    changed = changed_keys(stored, config)
    of_end = {key: values for key, values in changed.items() if key in KEYS_OF_THE_END}
    return (
        f"the run cannot get another end, as {cause}; {'; '.join(say_changes(of_end))}; "
        f"or train on from its weights: --config.init_from={workdir} --config.init_head=kept and "
        "a new --workdir"
    )


def _find_moving(config: ConfigDict, total: int, new_total: int, steps_done: int) -> str | None:
    """Which of _MOVING would have had other values in the steps done; None: none."""
    o = config.optimizer
    if total == new_total or steps_done < 2:  # the first step has the value of the start
        return None
    for key in _MOVING:
        end = o[f"{key}_end"]
        if end is not None and end != o[key]:
            was, now = (half_cosine(1, steps, o[key], end) for steps in (total, new_total))
            return (
                f"optimizer.{key}_end={end} is reached at its end: step 2 had "
                f"optimizer.{key}={was:.6g}, and would have had {now:.6g}"
            )
    return None


def say_extension(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The changes of KEYS_OF_THE_END, for the log."""
    return ", ".join(f"{key} {was!r} -> {now!r}" for key, (was, now) in changed.items())
