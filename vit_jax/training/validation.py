"""The first check of a config: all that can be known before a file or a device is touched."""

import math
import re
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from vit_jax.config import (
    REQUIRED,
    default_config,
    flatten,
    image_hw,
    model_fields,
    optimizer_fields,
    step_fields,
    step_range,
)
from vit_jax.config.evals import EVALUATORS, entry_keys, find_evaluator
from vit_jax.data import (
    BROKEN_LABELS,
    check_classes,
    check_holdout,
    check_order,
    check_reader,
    parse_mix,
    parse_ops,
)
from vit_jax.data.device_ops import MIXING_OPS
from vit_jax.devices.mesh import PLATFORMS
from vit_jax.errors import Faults, InputError, collect_faults, nearest
from vit_jax.experiment.optimizers import make_optimizer
from vit_jax.experiment.schedules import check_duration, make_schedule, split_durations
from vit_jax.experiment.step import make_train_step
from vit_jax.models import create_model
from vit_jax.objectives import OBJECTIVES
from vit_jax.objectives.supervised import make_loss

# What W&B refuses in a project's name; the package need not be there to tell.
_NOT_IN_WANDB_NAMES = r"/\#?%:"
_MAX_WANDB_NAME = 128


def find_faults(config: ConfigDict, required: Sequence[str] = REQUIRED) -> list[str]:
    """Every fault of `config`, the first of each key, whose name it begins with.

    `required` are the keys that must be set.
    """
    faults = _all_faults(config, required)
    return list({re.match(r"[\w.*]*", fault)[0]: fault for fault in reversed(faults)}.values())[
        ::-1
    ]


def _all_faults(config: ConfigDict, required: Sequence[str]) -> list[str]:
    faults = Faults()
    check = faults.check

    def need(holds: bool, text: str) -> None:
        if not holds:
            faults.append(text)

    def known(key: str, value: str, names) -> None:
        need(value in names, f"{key}={value!r}: {nearest(value, list(names))}")

    def positive(key: str) -> None:
        value = values[key]
        need(value is None or value > 0, f"{key}={value}: needs a positive number")

    misshapen = _misshapen(config)
    if misshapen:  # nothing below would expect it
        return misshapen
    values, defaults = flatten(config), flatten(default_config(config.plugins))
    missing = {key for key in REQUIRED if values[key] is None}
    faults += [f"{key}: not set; set it in the config file or by --config.{key}=..."
               for key in required if key in missing]  # fmt: skip
    emptied = [
        key for key, default in defaults.items() if default is not None and values[key] is None
    ]
    if emptied:  # a config file can do that, and nothing below would expect it
        return faults + [f"{key}=None: needs a value, e.g. {defaults[key]!r}" for key in emptied]
    need(config.init_from != "",
         "init_from: not set; give --config.init_from=SOURCE, a workdir, a file or the name of a "
         "published one, or say --config.init_from=scratch")  # fmt: skip
    known("init_head", config.init_head, ("new", "kept"))
    for key, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        need(finite, f"{key}={value}: needs a finite number")

    durations = ["duration", "schedule.warmup", "schedule.cooldown", "schedule.timescale",
                 "checkpoint.every", "checkpoint.keep_every", "log.every"]  # fmt: skip
    for key in durations + [f"evals.{name}.every" for name in config.evals]:
        if values[key] is not None:
            positive_only = key == "duration" or key.endswith("every")
            check(check_duration, values[key], key=key, positive=positive_only)
    for text in split_durations(config.schedule.milestones):
        check(check_duration, text, key="schedule.milestones", positive=True)
    with_milestones = config.schedule.name == "multistep"
    need(with_milestones == bool(config.schedule.milestones),
         f"schedule.milestones={config.schedule.milestones!r}: "
         + ("multistep needs some, e.g. '3000 steps, 6000 steps'" if with_milestones
            else f"schedule.name={config.schedule.name!r} has none; leave them out"))  # fmt: skip

    seed = config.seed
    need(0 <= seed < 2**32, f"seed={seed}: needs a number from 0 to {2**32 - 1}")
    for key in ("global_batch_size", "data.num_classes", "data.num_examples"):
        positive(key)
    sizes = [key for key in ("data.image_size", "model.patch_size") if values[key] is not None]
    sizes_are_good = all([check(image_hw, values[key], key) for key in sizes])
    if sizes_are_good and not missing & {"data.image_size", "model.name"}:
        check(create_model, config.model.name, 1, config.data.image_size,  # 1: it is checked above
              prefix="model.", **model_fields(config))  # fmt: skip
    mixes = _check_ops(config, check, need)
    check(check_order, config.data.order, chunk_size=config.data.chunk_size,
          streams=config.data.streams, repeats=config.data.repeats,
          global_batch_size=config.global_batch_size, mixes=mixes)  # fmt: skip
    check(check_reader, config.data.reader)
    check(check_holdout, config.data.holdout)
    known("data.broken_labels", config.data.broken_labels, BROKEN_LABELS)
    check(check_classes, config.data.classes)
    need(config.data.classes is None or config.data.name != "synthetic",
         f"data.classes={config.data.classes}: synthetic data have data.num_classes")  # fmt: skip
    mixed = check(parse_mix, config.data.mix)
    need(not (mixed and config.data.name == "synthetic"),
         f"data.mix={config.data.mix!r}: synthetic data cannot be mixed with others")  # fmt: skip
    fraction = config.data.max_corrupt_fraction
    need(0 <= fraction <= 1, f"data.max_corrupt_fraction={fraction}: needs a number from 0 to 1")
    for key in ("data.mean", "data.std"):
        numbers = len(values[key]) == 3 and all(isinstance(v, int | float) for v in values[key])
        need(
            numbers, f"{key}={values[key]}: needs three numbers, one a channel, of pixels in [0, 1]"
        )
    need(all(config.data.std), f"data.std={config.data.std}: needs numbers other than 0")

    known("objective.name", config.objective.name, OBJECTIVES)
    check(make_loss, **config.loss)
    check(make_optimizer, **optimizer_fields(config), schedule=lambda step: 0.0)
    check(make_train_step, None, None, None, seed, **step_fields(config))
    size, accum_steps = config.global_batch_size, config.optimizer.accum_steps
    divides = size is None or accum_steps < 1 or size % accum_steps == 0
    need(divides, f"optimizer.accum_steps={accum_steps}: must divide global_batch_size={size}")
    peak_lr = config.optimizer.peak_lr or 0.0
    check(make_schedule, config.schedule.name, peak_lr=peak_lr, total_steps=1)

    if config.mesh.platform is not None:
        known("mesh.platform", config.mesh.platform, PLATFORMS)
    keep = config.checkpoint.keep_last
    need(keep >= 2, f"checkpoint.keep_last={keep}: needs at least 2, should the newest be damaged")
    for key in ("heartbeat_s", "step_deadline_s", "compile_deadline_s", "evaluation_deadline_s",
                "save_deadline_s"):  # fmt: skip
        positive(f"job.{key}")
    job = config.job
    late = job.step_deadline_s is not None and job.step_deadline_s > 0.75 * job.heartbeat_s
    need(
        not late,
        f"job.step_deadline_s={job.step_deadline_s}: needs at most 0.75 of "
        f"job.heartbeat_s={job.heartbeat_s}, after which JAX ends the run and cannot say why",
    )
    if config.log.profile is not None:
        check(step_range, config.log.profile, key="log.profile")
    if config.log.wandb is not None:
        project = config.log.wandb
        named = project.strip() and len(project) <= _MAX_WANDB_NAME
        need(named and not set(project) & set(_NOT_IN_WANDB_NAMES),
             f"log.wandb={project!r}: needs the name of a project, at most {_MAX_WANDB_NAME} "
             f"characters, none of them in {_NOT_IN_WANDB_NAMES}")  # fmt: skip
    for name, entry in config.evals.items():
        taken = name in ("train", "time") or not re.fullmatch(r"\w+", name)
        need(not taken, f"evals.{name}: choose a name of letters other than train and time, which "
             "the run's own metrics have")  # fmt: skip
        positive(f"evals.{name}.batch_size")
        prefix = f"evals.{name}."
        check(find_evaluator(entry.type).check, entry, prefix=prefix)
    return faults


def _misshapen(config: ConfigDict) -> list[str]:
    """What a config that does not come from `base_config()` lacks, or has besides."""
    try:
        wanted = set(flatten(default_config(config.get("plugins", ()))))
    except InputError as e:
        return list(e.faults)
    evals = config.get("evals", {})
    found = set(flatten(config)) - {f"evals.{name}.{key}" for name in evals for key in evals[name]}
    faults = [f"{key}: missing; begin with base_config()" for key in sorted(wanted - found)]
    faults += [f"{key}: no such key; {nearest(key, sorted(wanted))}"
               for key in sorted(found - wanted)]  # fmt: skip
    for name in evals:
        kind = evals[name].get("type")
        if kind in EVALUATORS:
            faults += [f"evals.{name}.{key}: missing or unknown; make it by config.{kind}()"
                       for key in sorted(entry_keys(kind) ^ set(evals[name]))]  # fmt: skip
        else:
            faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return faults


def _check_ops(config: ConfigDict, check: Callable, need: Callable) -> bool:
    """Checks the ops of training and of evaluators; returns whether those of training mix images.

    Crops are compared with their images when the data are opened.
    """
    image_size = (1, 1)  # only the sizes that the ops leave out depend on it
    ops = check(parse_ops, config.data.ops, image_size, key="data.ops")
    for name, entry in config.evals.items():
        key = f"evals.{name}.ops"

        def host_only(ops=entry.ops, key=key):
            _, device_ops = parse_ops(ops, image_size, key=key)
            names = ", ".join(op.text for op in device_ops)
            need(not device_ops, f"{key}={ops!r}: {names} is for training; leave it out here")

        check(host_only)
    return bool(ops) and any(op.name in MIXING_OPS for op in ops[1])


def validate(
    config: ConfigDict,
    override_faults: list[str],
    where: str,
    required: Sequence[str] = REQUIRED,
) -> None:
    """Raises one InputError with every fault of a config and of the overrides given to it."""
    collect_faults(override_faults + find_faults(config, required), where)
