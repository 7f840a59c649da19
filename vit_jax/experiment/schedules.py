"""Learning-rate schedules.

    lr(step) = peak_lr * min(1, step / warmup_steps)
             * decay(max(0, step - warmup_steps))
             * min(1, (total_steps - step) / cooldown_steps)

where decay(t), with T = total_steps - warmup_steps, is

    constant  1
    linear    1 - t / T
    cosine    (1 + cos(pi t / T)) / 2
    rsqrt     sqrt(timescale / (timescale + t))
    exponential 0.97^floor(t / timescale)
    multistep 0.1^(number of milestones reached)

With a warm-up, the first update (step 0) has learning rate 0. Steps after the end of the run have
the final rate.

Sources: linear and cosine: Dosovitskiy et al. 2020 (arXiv:2010.11929), table 3; rsqrt with
cooldown: Zhai et al. 2021 (arXiv:2106.04560), section 3.5; multistep: Kolesnikov et al. 2019
(arXiv:1912.11370), section 3.3; exponential: Tan & Le 2019 (arXiv:1905.11946), section 5.2.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax.errors import Faults, InputError, collect_faults, nearest
from vit_jax.experiment.durations import parse_milestones

# Number of the update, from 0 -> learning rate, a float32 scalar.
Schedule = Callable[[jax.typing.ArrayLike], jax.Array | float]


class Decay(NamedTuple):
    """Numbers that a decay depends on, in steps.

    span: from the end of the warm-up to the end of the run.
    timescale: for rsqrt and exponential.
    milestones: for multistep, counted from the end of the warm-up.
    """

    span: int
    timescale: int
    milestones: Sequence[int]


# name -> function of (steps since the end of the warm-up, a `Decay`): a factor of the peak rate.
SCHEDULES: dict[str, Callable[[jax.Array, Decay], jax.Array | float]] = {
    "constant": lambda since, decay: jnp.ones_like(since),
    "linear": lambda since, decay: 1 - since / decay.span,
    "cosine": lambda since, decay: 0.5 * (1 + jnp.cos(jnp.pi * since / decay.span)),
    "rsqrt": lambda since, decay: jnp.sqrt(decay.timescale / (decay.timescale + since)),
    "exponential": lambda since, decay: 0.97 ** jnp.floor(since / decay.timescale),
    "multistep": lambda since, decay: 0.1 ** sum(1.0 * (since >= at) for at in decay.milestones),
}


def make_schedule(
    name: str,
    *,
    peak_lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    timescale: int = 10_000,
    milestones: Sequence[int] = (),
) -> Schedule:
    """Make the learning rate as a function of the step: a float32 scalar, usable under jit.

    The equations are at the top of this module.

    Args:
      name: a key of `SCHEDULES`.
      peak_lr: learning rate at the end of the warm-up.
      total_steps: length of the run, including warm-up and cooldown.
      warmup_steps: the rate rises linearly from 0.
      cooldown_steps: the rate falls linearly to 0 at the end of the run, on top of the decay.
      timescale: for rsqrt and exponential, in steps.
      milestones: for multistep, in steps from the start of the run; each divides the rate by 10.

    Raises:
      InputError: if the name is unknown, or the numbers do not fit together.
    """
    check_schedule(name, peak_lr)
    if timescale <= 0:
        raise InputError(f"schedule.timescale={timescale}: must be more than 0 steps")
    _check_spans(total_steps, warmup_steps, cooldown_steps, milestones)
    factor = SCHEDULES[name]
    decay = Decay(
        span=max(total_steps - warmup_steps, 1),  # avoids 0 / 0 if the run is all warm-up
        timescale=timescale,
        milestones=[at - warmup_steps for at in milestones],
    )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array | float:
        step = jnp.minimum(jnp.asarray(count, jnp.float32), total_steps)
        lr = peak_lr * factor(jnp.maximum(step - warmup_steps, 0), decay)
        if warmup_steps:
            lr *= jnp.minimum(step / warmup_steps, 1)
        if cooldown_steps:
            lr *= jnp.minimum((total_steps - step) / cooldown_steps, 1)
        return lr

    return schedule


def check_schedule(name: str, peak_lr: float) -> None:
    """Raise InputError for what is wrong in a run of any length."""
    if name not in SCHEDULES:
        raise InputError(f"schedule.name={name!r}: unknown; {nearest(name, list(SCHEDULES))}")
    if peak_lr < 0:
        raise InputError(f"optimizer.peak_lr={peak_lr}: must be at least 0")


def make_config_schedule(config: ConfigDict, durations: Mapping[str, int]) -> Schedule:
    """The learning rate of a resolved config, whose durations in steps are `durations`."""
    return make_schedule(
        config.schedule.name,
        peak_lr=config.optimizer.peak_lr,
        total_steps=durations["duration"],
        warmup_steps=durations["schedule.warmup"],
        cooldown_steps=durations["schedule.cooldown"],
        timescale=durations["schedule.timescale"],
        milestones=parse_milestones(config),
    )


def make_ema_decay(
    ema_decay: float | None, ema_decay_end: float | None = None, total_steps: int = 1
) -> Schedule | None:
    """Make the share of the running averages that stays in the update after `step` earlier ones.

    It is min(ema_decay, (1 + step) / (10 + step)), so that in a short run the average does not stay
    near the initial parameters. With `ema_decay_end` the average is a teacher, whose share goes
    from ema_decay to ema_decay_end at `total_steps` by half a cosine. None: there is no average.

    Raises:
      InputError: if a number is out of range.
    """
    check_ema_decay(ema_decay, ema_decay_end)
    if ema_decay is None:
        return None
    if ema_decay_end is not None:
        return lambda step: half_cosine(step, total_steps, ema_decay, ema_decay_end)
    return lambda step: jnp.minimum(ema_decay, (1.0 + step) / (10.0 + step))


def check_ema_decay(ema_decay: float | None, ema_decay_end: float | None) -> None:
    """Raise InputError if a number is out of range."""
    faults = Faults()
    faults.need(
        ema_decay is None or 0.0 < ema_decay < 1.0,
        f"optimizer.ema_decay={ema_decay}: must be between 0 and 1, or None",
    )
    faults.need(
        ema_decay_end is None or (ema_decay is not None and 0.0 < ema_decay_end <= 1.0),
        f"optimizer.ema_decay_end={ema_decay_end}: needs a number above 0, at most 1, and "
        "optimizer.ema_decay at the start of the run; None keeps the decay constant",
    )
    collect_faults(faults)


def half_cosine(
    step: jax.typing.ArrayLike, total_steps: int, first: float, last: float
) -> jax.Array:
    """A value that goes from `first` at step 0 to `last` at `total_steps` by half a cosine."""
    share = jnp.minimum(jnp.asarray(step, jnp.float32) / total_steps, 1)
    return last + (first - last) * 0.5 * (1 + jnp.cos(jnp.pi * share))


def _check_spans(
    total_steps: int, warmup_steps: int, cooldown_steps: int, milestones: Sequence[int]
) -> None:
    """Raise InputError if the parts of a schedule do not fit into the run."""
    if total_steps < 1:
        raise InputError(f"duration: is {total_steps} steps; must be at least one")
    if warmup_steps + cooldown_steps > total_steps:
        raise InputError(
            f"schedule.warmup ({warmup_steps} steps) and schedule.cooldown ({cooldown_steps} "
            f"steps) do not fit into duration ({total_steps} steps); shorten them, e.g. "
            f"--config.schedule.warmup='{total_steps // 10} steps'"
        )
    bounds = [warmup_steps, *milestones, total_steps]
    if milestones and any(now >= then for now, then in itertools.pairwise(bounds)):
        raise InputError(
            f"schedule.milestones={list(milestones)} (steps): must increase, and lie between the "
            f"end of the warm-up ({warmup_steps}) and of the run ({total_steps}); set "
            "--config.schedule.milestones and --config.schedule.warmup to match the duration"
        )
