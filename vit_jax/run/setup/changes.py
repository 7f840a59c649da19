"""The keys that may change when a run goes on; its end may, where its past stays as it was.

The past is the schedules of all steps done.
"""

import logging
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, collect_faults
from vit_jax.config import Settings, changed_evals, changed_keys, say_changes
from vit_jax.config.durations import total_steps
from vit_jax.data import without_places
from vit_jax.experiment.schedules import half_cosine, schedule_of
from vit_jax.run.setup.workdir import StoredRun

logger = logging.getLogger("vit_jax")

# Keys that decide where a run ends, and how.
KEYS_OF_THE_END = ("duration", "schedule.cooldown")

HARDLY_LEARNS = 0.05  # with such a share of its peak rate a model hardly learns


def changed_settings(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """`changed_keys` of the config of a run and of one for its resume."""
    changed = changed_keys(old, new)
    if without_places(old.data.mix) == without_places(new.data.mix):
        changed.pop("data.mix", None)  # its folders may move, as data.data_dir may
    return changed


def check_settings(
    config: ConfigDict, before: StoredRun, workdir: epath.Path, free: Sequence[str]
) -> None:
    """Raise InputError if `config` and the run that was `before` differ in a fixed key.

    `free`: keys that may change, besides those that always may.
    """
    if before.stored is None:
        return
    changed = changed_settings(before.stored.resolved, config)
    collect_faults(
        say_changes({key: values for key, values in changed.items() if key not in free}),
        f"--workdir={workdir} already holds a run with other settings; restore them, use a new "
        "--workdir, or start from its weights with --config.init_from=...",
    )


def check_unchanged(
    settings: Settings, before: StoredRun, workdir: epath.Path, free: Sequence[str] = ()
) -> None:
    """Raise InputError if the run that was `before` has other `settings`, or another past.

    Warns of changed evaluators, whose values do not compare with earlier ones.

    `free`: keys that may differ.
    """
    if before.stored is None:
        return
    config, resolved = settings.to_config(), before.stored.resolved
    check_settings(config, before, workdir, (*free, *KEYS_OF_THE_END))
    changed = changed_settings(resolved, config)
    in_both = {*resolved.evals} & {*config.evals}
    evals = changed_evals(resolved, config)
    evals = {key: values for key, values in evals.items() if key.split(".")[1] in in_both}
    if evals:
        logger.warning(
            "%s: evaluators have changed since the run began, so their results may not be "
            "comparable with earlier ones: %s", workdir, "; ".join(say_changes(evals)),
        )  # fmt: skip
    of_end = {key: changed[key] for key in KEYS_OF_THE_END if key in changed}
    if not of_end:
        return
    steps_done = next(iter(before.saved_steps), 0)
    cause = find_other_past(resolved, config, steps_done)
    if cause is not None:
        has_ended = cause.startswith("duration=")
        longer = "" if has_ended else branch_command(resolved, config, workdir, steps_done)
        raise InputError(
            f"--workdir={workdir}: the run cannot get another end, as {cause}; "
            f"{'; '.join(say_changes(of_end))}"
            f"{f'; or train on in a new workdir: {longer}' * bool(longer)}"
        )
    logger.info("%s: the run gets another end: %s", workdir, "; ".join(say_changes(of_end)))


def branch_command(
    stored: ConfigDict, config: ConfigDict, workdir: epath.Path, steps_done: int
) -> str:
    """The command that trains a run on, in a new workdir, to the end that `config` gives it.

    From the run's last learning rate, or with a new cosine if that has fallen to almost 0.
    """
    peak = stored.optimizer.peak_lr
    rates = past_of(Settings.read(stored), steps_done)["the learning rate"]
    rule = ["--rule=constant"]
    if rates[-1] < HARDLY_LEARNS * peak:
        warmup = max((total_steps(config) - steps_done) // 20, 1)
        rule = ["--rule=cosine", f"--config.optimizer.peak_lr={peak}",
                f"--config.schedule.warmup={warmup} steps"]  # fmt: skip
    new = ["--workdir=NEW", f"--config.duration={config.duration}"]
    return shlex.join(["vit_jax", "branch", f"--init_from={workdir}", *new, *rule])


def find_other_past(stored: ConfigDict, config: ConfigDict, steps_done: int) -> str | None:
    """Why a run cannot go on to the end that `config` gives it; None: it can.

    Args:
      stored: the config that it began with, resolved.
      config: that it is to go on with, which differs from `stored` in KEYS_OF_THE_END only.
      steps_done: of its newest checkpoint.

    Raises:
      InputError: the new schedule does not fit into the new duration.
    """
    before, after = Settings.read(stored), Settings.read(config)
    if after.run.duration < steps_done:
        return f"duration={config.duration!r} ends before step {steps_done:,}, where it is"
    was, now = past_of(before, steps_done), past_of(after, steps_done)
    for name in was:
        differing = np.flatnonzero(was[name] != now[name])
        if len(differing):
            first = differing[0]
            return (
                f"step {first + 1:,} had {name}={was[name][first]:.9g}, and would have had "
                f"{now[name][first]:.9g}"
            )
    return None


def past_of(settings: Settings, steps_done: int) -> dict[str, np.ndarray]:
    """{name: its values in the first `steps_done` steps} of all that changes during a run."""
    updates, o, total = np.arange(steps_done), settings.optimizer, settings.run.duration
    found = {"the learning rate": jax.jit(schedule_of(settings))(updates)}
    for key, first, end in (
        ("weight_decay", o.weight_decay, o.weight_decay_end),
        ("ema_decay", o.ema_decay, o.ema_decay_end),
    ):
        if first is not None and end is not None:
            found[f"optimizer.{key}"] = half_cosine(updates, total, first, end)
    return {name: np.asarray(values) for name, values in found.items()}
