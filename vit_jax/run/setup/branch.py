"""A branch: a new workdir with the past of a run up to one of its saved steps, and another end.

It holds the checkpoint of that step, whole, with what the run wrote until then, and a config with
another schedule from there on. The run that it came from stays as it is.
"""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.base import files
from vit_jax.base.errors import InputError, check_version, collect_faults, nearest
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.history import read_history, warn_of_lost_rows
from vit_jax.checkpoints.seal import check_seal
from vit_jax.config import Settings
from vit_jax.config.base import shares_in_steps
from vit_jax.config.stored import StoredConfig, read_stored
from vit_jax.config.text import apply_overrides
from vit_jax.data.captions import TOKENIZER
from vit_jax.data.division import FILE
from vit_jax.experiment.optimizers import LOWERED
from vit_jax.experiment.schedules import schedule_of
from vit_jax.run.setup.changes import HARDLY_LEARNS, KEYS_OF_THE_END, past_of
from vit_jax.run.setup.validation import as_pairs, validate
from vit_jax.run.setup.workdir import check_writable, record_start
from vit_jax.run.writers import MetricWriter
from vit_jax.transfer.workdir import workdir_of

logger = logging.getLogger("vit_jax")

# {name of a rule: the schedule that it sets}; each begins at the last rate of the run, rsqrt of an
# rsqrt run at the next one.
RULES = {"constant": "constant", "cosine": "cosine", "rsqrt": "rsqrt", "cooldown": "linear"}

# Besides the rule.
KEYS = (*KEYS_OF_THE_END, "optimizer.peak_lr", "schedule.warmup", "schedule.timescale")

# Besides the checkpoint, config.json and TensorBoard's files. Rows after the step are dropped then.
_KEPT = ("classes.json", FILE, "teachers.json", "plugins", "starts.jsonl", "metrics.jsonl",
         TOKENIZER)  # fmt: skip

_BELOW_1 = 1 - 2**-24  # as float32; a decay of 1 is refused


def branch(
    source: epath.PathLike,
    workdir: epath.PathLike,
    rule: str,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Make a new workdir that trains on from a saved step of a run, with all its state.

        vit_jax.branch("runs/a", "runs/b", "cosine", {"duration": "20 epochs"})
        vit_jax.train(None, "runs/b")

    The weights, the optimizer, averages, the objective's state and the place in the data are those
    of the step. The schedule begins there, at the last rate of the run:

        constant  stays there
        cosine    half a cosine to 0
        rsqrt     goes on as 1 / sqrt(step), or with the timescale of a run that has rsqrt
        cooldown  linear to 0

    What else moves until the end of a run (optimizer.weight_decay_end, ema_decay_end) stays as it
    was in the last step.

    Args:
      source: the workdir of a run, for its newest checkpoint, or RUN/checkpoints/STEP.
      workdir: a new folder.
      rule: a key of RULES.
      overrides: {key: value} for any of KEYS. `duration` counts from the start of the run.

    Raises:
      InputError: names the argument or the key; nothing is left in `workdir`.
    """
    workdir, source = files.absolute(workdir), files.absolute(source)
    if rule not in RULES:
        raise InputError(f"--rule={rule}: no such rule; {nearest(rule, list(RULES))}")
    check_writable(workdir)
    if workdir.exists() and any(workdir.iterdir()):
        raise InputError(f"--workdir={workdir}: is not empty; remove it, or give a new folder")
    parent = workdir_of(source)
    if not (parent / "config.json").exists():
        raise InputError(f"--init_from={source}: has no config.json; give the workdir of a run, or "
                         "RUN/checkpoints/STEP")  # fmt: skip
    stored, step = read_stored(parent), _find_step(source, parent)
    lowered = _read_lowered(stored.resolved, parent / f"checkpoints/{step}")
    new = _with_rule(stored, step, rule, dict(as_pairs(overrides)), lowered)
    command = {"branch_of": str(parent), "rule": rule, "overrides": dict(overrides or {})}
    try:
        events = files.LiteralPath(parent).glob("events.out.tfevents.*")
        for name in (*_KEPT, *(path.name for path in events)):
            if (parent / name).exists():
                files.copy_tree(parent / name, workdir / name)
        MetricWriter(workdir, restored_step=step).close()
        record_start(workdir, (), step, command)
        _copy_step(parent, workdir, step)
        last = max((row["step"] for row in read_history(parent)), default=0)
        warn_of_lost_rows(parent, last, restore.read_meta(workdir / f"checkpoints/{step}"))
        files.write_whole(workdir / "config.json", new.to_json())  # last: now it is a run
    except BaseException:
        workdir.rmtree(missing_ok=True)
        raise
    settings = Settings.read(new.resolved)
    _tell(workdir, rule, step, settings, lowered)
    was, now = stored.resolved.optimizer.peak_lr, settings.optimizer.peak_lr
    if now < HARDLY_LEARNS * was:
        _warn_of_rate(now, was, is_given="optimizer.peak_lr" in dict(as_pairs(overrides)))


def _tell(workdir: epath.Path, rule: str, step: int, settings: Settings, lowered: float) -> None:
    """Log the way of the learning rate from `step` on, and the command that trains the branch."""
    first, warmup = lowered * float(schedule_of(settings)(step)), settings.schedule.warmup
    peak = settings.optimizer.peak_lr
    rises = f", which rises to {peak:.4g} by step {step + warmup}" * (warmup > 0)
    logger.info(
        "%s: %s from step %d to step %d, at first with a learning rate of %.4g%s; to train it: "
        "vit_jax --workdir=%s%s", workdir, rule, step, settings.run.duration, first, rises, workdir,
        " --trust_plugins" * bool(settings.run.plugins),
    )  # fmt: skip


def _warn_of_rate(now: float, was: float, *, is_given: bool) -> None:
    """Warn of a peak of the rate, `now`, below a twentieth of the run's, `was`."""
    logger.warning(
        "--config.optimizer.peak_lr=%.3g: a model hardly learns with less than a "
        "twentieth of the run's peak of %.3g; raise it" if is_given else
        "the learning rate is %.3g at this step of the run, after a peak of %.3g; to raise it "
        "again, give --config.optimizer.peak_lr and --config.schedule.warmup, or branch from "
        "an earlier step", now, was,
    )  # fmt: skip


def _find_step(source: epath.Path, parent: epath.Path) -> int:
    """The saved step of the run in `parent` that `source` names."""
    kept = restore.saved_steps(parent / "checkpoints")
    step = int(source.name) if source != parent else next(iter(kept), None)
    if step in kept:
        return step
    raise InputError(
        f"--init_from={source}: no such checkpoint; the run keeps checkpoints of the steps "
        f"{', '.join(map(str, sorted(kept))) or '(none yet)'} (checkpoint.keep_every)"
    )


def _read_lowered(config: ConfigDict, path: epath.Path) -> float:
    """The factor of the rate in the checkpoint at `path`; see `optimizers.LOWERED`."""
    if config.optimizer.on_spike != "lower":
        return 1.0
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {"opt_state": {LOWERED: jax.ShapeDtypeStruct((), np.float32, sharding=device)}}
    return float(restore.restore_step(path, target, partial=True)[0]["opt_state"][LOWERED])


def _with_rule(
    stored: StoredConfig, step: int, rule: str, overrides: Mapping[str, str], lowered: float = 1.0
) -> StoredConfig:
    """The content of the branch's config.json.

    `lowered`: what `optimizer.on_spike=lower` has left of the scheduled rate; the optimizer's state
    keeps it.
    """
    other = [key for key in overrides if key not in KEYS]
    collect_faults([
        f"--config.{key}: a branch may set {', '.join(KEYS)}; keys that a resumed run may change "
        "are given when you train the branch"
        for key in other
    ])  # fmt: skip
    was = stored.resolved
    before = Settings.read(was)
    # In steps, as a share of the run such as "5 %" would move what is past.
    lengths = before.durations.items()
    fixed = {key: f"{n} steps" for key, n in lengths if not config_lib.is_free_on_resume(key)}
    lasts = {name: float(str(values[-1])) for name, values in past_of(before, step).items()}
    defaults = config_lib.flatten(config_lib.default_config(was.plugins).schedule, "schedule.")
    changes = fixed | defaults
    rate = lasts.pop("the learning rate")
    changes |= {"schedule.name": RULES[rule], "schedule.start": f"{step} steps"}
    changes |= {"duration": was.duration, "schedule.lowered": lowered}
    if rule == "rsqrt":
        timescale = step
        if was.schedule.name == "rsqrt":
            risen = before.schedule.start + before.schedule.warmup
            timescale = before.durations["schedule.timescale"] + max(step - risen, 0)
            # It goes on falling; where a cooldown has ended at 0, it keeps the last rate.
            rate = float(schedule_of(before)(step)) or rate
        changes["schedule.timescale"] = f"{timescale} steps"
    changes["optimizer.peak_lr"] = lowered * rate
    for key, last in lasts.items():  # from here on it moves from one value to the same
        last = min(last, _BELOW_1) if key == "optimizer.ema_decay" else last
        changes |= {key: last, f"{key}_end": last}
    asked = config_lib.with_values(stored.asked, changes)
    faults = apply_overrides(asked, list(overrides.items()))
    validate(asked, faults, f"a branch of step {step}")
    flat = config_lib.flatten(asked)
    changes |= {key: flat[key] for key in overrides}
    resolved = config_lib.with_values(was, changes)
    resolved = config_lib.with_values(resolved, shares_in_steps(resolved))
    schedule_of(Settings.read(resolved))  # checks that it fits
    return StoredConfig(asked, resolved, {**stored.decided_by, **dict.fromkeys(changes, "branch")})


def _copy_step(parent: epath.Path, workdir: epath.Path, step: int) -> None:
    """Copy a checkpoint; raises InputError if it is damaged, or has another format."""
    source, target = (path / "checkpoints" / str(step) for path in (parent, workdir))
    try:
        files.copy_tree(source, target)
        check_seal(target)
        version = restore.read_meta(target).get("format_version", 1)
    except (FileNotFoundError, ValueError) as e:
        raise InputError(
            f"--init_from={source}: is damaged, or its run has removed it meanwhile ({e}); take "
            "another step"
        ) from None
    check_version(str(source), version, restore.FORMAT_VERSION)
