"""Learning-rate schedules.

    lr(step) = peak_lr * min(1, step / warmup_steps)
             * decay(max(0, step - warmup_steps))
             * min(1, (total_steps - step) / cooldown_steps)

where decay(t), with T = total_steps - warmup_steps, is

    constant  1
    linear    1 - t / T
    cosine    (1 + cos(pi t / T)) / 2
    rsqrt     sqrt(timescale / (timescale + t))
    multistep 0.1^(number of milestones reached)

With a warm-up, the first update (step 0) has the rate 0. A step after the end of the run has the
rate of the end.

Sources: linear and cosine: Dosovitskiy et al. 2020 (arXiv:2010.11929), table 3; rsqrt with
cooldown: Zhai et al. 2021 (arXiv:2106.04560), section 3.5; multistep: Kolesnikov et al. 2019
(arXiv:1912.11370), section 3.3.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.errors import InputError, nearest

# The number of an update, from 0 -> its learning rate, a float32 scalar.
Schedule = Callable[[jax.typing.ArrayLike], jax.Array | float]


class Decay(NamedTuple):
    """The run's figures that a decay depends on, in steps.

    span: from the warm-up's end to the run's.
    timescale: of rsqrt.
    milestones: of multistep, counted from the warm-up's end.
    """

    span: int
    timescale: int
    milestones: Sequence[int]


# Each maps (steps since the warm-up's end, a `Decay`) to a factor of the peak learning rate.
SCHEDULES: dict[str, Callable[[jax.Array, Decay], jax.Array | float]] = {
    "constant": lambda since, decay: jnp.ones_like(since),
    "linear": lambda since, decay: 1 - since / decay.span,
    "cosine": lambda since, decay: 0.5 * (1 + jnp.cos(jnp.pi * since / decay.span)),
    "rsqrt": lambda since, decay: jnp.sqrt(decay.timescale / (decay.timescale + since)),
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
    """The learning rate as a function of the step: a float32 scalar, safe under jit.

    The equations stand at the top of this module.

    Args:
      name: a key of `SCHEDULES`.
      peak_lr: the rate at the end of the warm-up.
      total_steps: the whole run, warm-up and cooldown included.
      warmup_steps: linear from 0.
      cooldown_steps: linear to 0 at the end of the run, on top of the decay.
      timescale: of rsqrt, in steps.
      milestones: of multistep, in steps from the start of the run; each divides the rate by 10.

    Raises:
      InputError: an unknown name, or numbers that fit no run.
    """
    if name not in SCHEDULES:
        raise InputError(f"schedule.name={name!r} is unknown; {nearest(name, list(SCHEDULES))}")
    if peak_lr < 0:
        raise InputError(f"optimizer.peak_lr={peak_lr} must be at least 0")
    if timescale <= 0:
        raise InputError(f"schedule.timescale={timescale} must be more than 0 steps")
    _check_spans(total_steps, warmup_steps, cooldown_steps, milestones)
    factor = SCHEDULES[name]
    decay = Decay(
        span=max(total_steps - warmup_steps, 1),  # 1: the run is all warm-up and never decays
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


def _check_spans(
    total_steps: int, warmup_steps: int, cooldown_steps: int, milestones: Sequence[int]
) -> None:
    """Raises InputError for parts of a schedule that do not fit into the run."""
    if total_steps < 1:
        raise InputError(f"duration is {total_steps} steps; give at least one")
    if warmup_steps + cooldown_steps > total_steps:
        raise InputError(
            f"schedule.warmup ({warmup_steps} steps) and schedule.cooldown ({cooldown_steps} "
            f"steps) do not fit into duration ({total_steps} steps); shorten them"
        )
    bounds = [warmup_steps, *milestones, total_steps]
    if milestones and any(now >= then for now, then in itertools.pairwise(bounds)):
        raise InputError(
            f"schedule.milestones={list(milestones)} (steps) must rise, between the warm-up's end "
            f"({warmup_steps}) and the run's ({total_steps}); set --config.schedule.milestones and "
            "--config.schedule.warmup with the duration"
        )
