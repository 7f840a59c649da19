"""The first check of a config: all that can be known before a file or a device is touched."""

import math
from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax.config import (
    REQUIRED,
    InputError,
    collect_faults,
    flatten,
    image_hw,
    model_fields,
    nearest,
    step_range,
)
from vit_jax.data import parse_ops
from vit_jax.evaluators import EVALUATORS
from vit_jax.mesh import PLATFORMS
from vit_jax.models import create_model
from vit_jax.objectives import OBJECTIVES
from vit_jax.objectives.supervised import make_loss
from vit_jax.optimizers import make_optimizer
from vit_jax.schedules import check_duration, make_schedule


def find_faults(config: ConfigDict) -> list[str]:
    """Every fault of `config`, each naming its key."""
    faults = []

    def check(fn: Callable, *args, prefix: str = "", **kwargs) -> None:
        try:
            fn(*args, **kwargs)
        except InputError as e:
            faults.append(f"{prefix}{e}")

    def need(holds: bool, text: str) -> None:
        if not holds:
            faults.append(text)

    def known(key: str, value: str, names) -> None:
        need(value in names, f"{key}={value!r}: {nearest(value, list(names))}")

    values = flatten(config)
    missing = {key for key in REQUIRED if values[key] is None}
    faults += [f"{key}: not set; set it in the config file or by --config.{key}=..."
               for key in REQUIRED if key in missing]  # fmt: skip

    durations = ["duration", "schedule.warmup", "schedule.cooldown", "schedule.timescale",
                 "checkpoint.every", "checkpoint.keep_every", "log.every"]  # fmt: skip
    for key in durations + [f"evals.{name}.every" for name in config.evals]:
        if values[key] is not None:
            check(check_duration, values[key], key=key)

    size = config.global_batch_size
    need(size is None or size > 0, f"global_batch_size={size}: needs a positive number")
    image_size = config.data.image_size
    if image_size is not None:
        check(image_hw, image_size, prefix="data.")
    if not any(fault.startswith("data.image_size") for fault in faults) and "model.name" not in missing:
        check(create_model, config.model.name, config.data.num_classes, image_size,
              prefix="model.", **model_fields(config))  # fmt: skip
        _check_ops(config, check, need)
    for key in ("mean", "std"):
        value = config.data[key]
        need(
            len(value) == 3 and all(isinstance(v, int | float) for v in value),
            f"data.{key}={value}: needs three numbers, one a channel, of pixels in [0, 1]",
        )
    need(all(config.data.std), f"data.std={config.data.std}: needs numbers other than 0")

    known("objective.name", config.objective.name, OBJECTIVES)
    check(make_loss, **config.loss)
    optimizer = {k: v for k, v in config.optimizer.items() if k != "peak_lr"}
    check(make_optimizer, **optimizer, schedule=lambda step: 0.0)
    check(make_schedule, config.schedule.name, peak_lr=config.optimizer.peak_lr or 0.0, total_steps=1)
    lr = config.optimizer.peak_lr
    need(lr is None or math.isfinite(lr), f"optimizer.peak_lr={lr}: needs a finite number")

    if config.mesh.platform is not None:
        known("mesh.platform", config.mesh.platform, PLATFORMS)
    keep = config.checkpoint.keep_last
    need(keep >= 2, f"checkpoint.keep_last={keep}: needs at least 2, should the newest be damaged")
    if config.log.profile is not None:
        check(step_range, config.log.profile, key="log.profile")
    for name, entry in config.evals.items():
        known(f"evals.{name}.type", entry.type, EVALUATORS)
        batch = entry.batch_size
        need(batch is None or batch > 0, f"evals.{name}.batch_size={batch}: needs a positive number")
    return faults


def _check_ops(config: ConfigDict, check: Callable, need: Callable) -> None:
    image_size = image_hw(config.data.image_size)
    check(parse_ops, config.data.ops, image_size, key="data.ops")
    for name, entry in config.evals.items():
        key = f"evals.{name}.ops"

        def host_only(ops=entry.ops, key=key):
            _, device_ops = parse_ops(ops, image_size, key=key)
            names = ", ".join(op.text for op in device_ops)
            need(not device_ops, f"{key}={ops!r}: {names} is for training; leave it out here")

        check(host_only)


def validate(config: ConfigDict, override_faults: list[str], where: str) -> None:
    """Raises one InputError with every fault of a config and of the overrides given to it."""
    collect_faults(override_faults + find_faults(config), where)
