"""Learning-rate schedules.

    lr(step) = peak_lr * min(1, s / warmup_steps)
             * decay(max(0, s - warmup_steps))
             * cooldown(min(1, (total_steps - step) / cooldown_steps))

where s = max(0, step - start), cooldown(x) is x, or 1 - sqrt(1 - x) for wsd, and decay(t), with
T = total_steps - start - warmup_steps, is

    constant  1, and wsd
    linear    1 - t / T
    cosine    end_share + (1 - end_share) (1 + cos(pi t / T)) / 2, with end_share 0 by default
    rsqrt     sqrt(timescale / (timescale + t))
    power     max(1, t / timescale)^-0.51
    exponential 0.97^floor(t / timescale)
    multistep 0.1^(number of milestones reached)

With a warm-up, the first update (step 0) has learning rate 0. Steps after the end of the run have
the final rate. `start` is 0, or the step at which a branch left its run: all that came before had
the run's own rates.

Sources: linear and cosine: Dosovitskiy et al. 2020 (arXiv:2010.11929), table 3; rsqrt with
cooldown: Zhai et al. 2021 (arXiv:2106.04560), section 3.5; multistep: Kolesnikov et al. 2019
(arXiv:1912.11370), section 3.3; exponential: Tan & Le 2019 (arXiv:1905.11946), section 5.2; power:
Shen et al. 2024 (arXiv:2408.13359); wsd: Hu et al. 2024 (arXiv:2404.06395), with the cooldown of
Hägele et al. 2024 (arXiv:2405.18392).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.config import SCHEDULES, SHARE, Part, Settings, key, sections

# Number of the update, from 0 -> learning rate, a float32 scalar.
Schedule = Callable[[jax.typing.ArrayLike], jax.Array | float]

# Number of the update, from 0, and the optimizer's state after it -> share of averages that stays.
Keep = Callable[..., jax.Array | float]


class Decay(sections.Schedule, Part):
    """The interface of a decay."""

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        """The factor of the peak rate, `since` steps after the end of the warm-up.

        Args:
          span: steps from there to the end of the run.
          steps: {own key: value}, durations in steps; milestones are counted from there too.
        """
        raise NotImplementedError

    def fall(self, left: jax.Array) -> jax.Array:
        """The factor of the rate when the share `left` of the cooldown is to come."""
        return left


class Constant(Decay):
    """1."""

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return jnp.ones_like(since)


class Wsd(Constant):
    """1, "warm-up, stable, decay": set schedule.cooldown, which falls as 1 - sqrt(share done).

    Hu et al. 2024 (arXiv:2404.06395); this cooldown: Hägele et al. 2024 (arXiv:2405.18392).
    """

    def fall(self, left: jax.Array) -> jax.Array:
        return 1 - jnp.sqrt(1 - left)


class Linear(Decay):
    """1 - t / T (Dosovitskiy et al. 2020, table 3)."""

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return 1 - since / span


class Cosine(Decay):
    """(1 + cos(pi t / T)) / 2 (Dosovitskiy et al. 2020, table 3), or from 1 to `end_share`."""

    end_share: float = key(0.0, "the last learning rate / optimizer.peak_lr", within=SHARE)

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        end = self.end_share
        return end + (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * since / span))


class Rsqrt(Decay):
    """sqrt(timescale / (timescale + t)) (Zhai et al. 2021, section 3.5)."""

    timescale: int = key("10000 steps", "steps in which the rate falls", form="interval")

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return jnp.sqrt(self.timescale / (self.timescale + since))


class Power(Decay):
    """max(1, t / timescale)^-0.51 (Shen et al. 2024, arXiv:2408.13359, without its cooldown)."""

    timescale: int = key("10000 steps", "steps in which the rate falls", form="interval")

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return jnp.maximum(since / self.timescale, 1) ** -0.51


class Exponential(Decay):
    """0.97^floor(t / timescale) (Tan & Le 2019, section 5.2)."""

    timescale: int = key("10000 steps", "steps in which the rate falls", form="interval")

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return 0.97 ** jnp.floor(since / self.timescale)


class Multistep(Decay):
    """0.1^(number of milestones reached) (Kolesnikov et al. 2019, section 3.3)."""

    milestones: tuple[int, ...] = key(
        "", '"200 steps, 300 steps"; each divides the rate by 10', form="list"
    )

    def check(self) -> list[str]:
        faults = ["milestones='': multistep needs them, e.g. '3000 steps, 6000 steps'"]
        return [] if self.milestones else faults

    def factor(self, since: jax.Array, span: int, steps: Mapping[str, Any]) -> jax.Array | float:
        return 0.1 ** sum(1.0 * (since >= at) for at in steps["milestones"])


def make_schedule(decay: Decay, peak_lr: float, total_steps: int) -> Schedule:
    """Make the learning rate as a function of the step: a float32 scalar, usable under jit.

    The equations are at the top of this module. The rate is multiplied by the optimizer's factor
    LOWERED, which is `schedule.lowered` at the start, and which `peak_lr` includes.

    Args:
      decay: the section `schedule` of a resolved config.
      peak_lr: learning rate at the end of the warm-up.
      total_steps: length of the run, including warm-up and cooldown.

    Raises:
      InputError: the durations do not fit together.
    """
    start, warmup, cooldown = decay.start, decay.warmup, decay.cooldown
    steps = {k: getattr(decay, k) for k in SCHEDULES.keys_of(type(decay))}
    milestones = steps.get("milestones", ())
    _check_spans(total_steps, start, warmup, cooldown, milestones)
    risen, peak_lr = start + warmup, peak_lr / decay.lowered
    span = max(total_steps - risen, 1)  # avoids 0 / 0 if the run is all warm-up
    steps["milestones"] = [at - risen for at in milestones]

    def schedule(count: jax.typing.ArrayLike) -> jax.Array | float:
        step = jnp.minimum(jnp.asarray(count, jnp.float32), total_steps)
        lr = peak_lr * decay.factor(jnp.maximum(step - risen, 0), span, steps)
        if warmup:
            since = jnp.maximum(step - start, 0) if start else step
            lr *= jnp.minimum(since / warmup, 1)
        if cooldown:
            lr *= decay.fall(jnp.minimum((total_steps - step) / cooldown, 1))
        return lr

    return schedule


def schedule_of(settings: Settings) -> Schedule:
    """The learning rate of a resolved config; see `make_schedule`."""
    return make_schedule(settings.schedule, settings.optimizer.peak_lr, settings.run.duration)


def make_ema_decay(
    ema_decay: float | None, ema_decay_end: float | None = None, total_steps: int = 1
) -> Keep | None:
    """Make the share of the running averages that stays in the update after `step` earlier ones.

    It is min(ema_decay, (1 + step) / (10 + step)), so that in a short run the average does not stay
    near the initial parameters. With `ema_decay_end` the average is a teacher, whose share goes
    from ema_decay to ema_decay_end at `total_steps` by half a cosine. None: there is no average.
    """
    if ema_decay is None:
        return None
    if ema_decay_end is not None:
        return lambda step, opt_state=None: half_cosine(step, total_steps, ema_decay, ema_decay_end)
    return lambda step, opt_state=None: jnp.minimum(ema_decay, (1.0 + step) / (10.0 + step))


def half_cosine(
    step: jax.typing.ArrayLike, total_steps: int, first: float, last: float
) -> jax.Array:
    """A value that goes from `first` at step 0 to `last` at `total_steps` by half a cosine."""
    share = jnp.minimum(jnp.asarray(step, jnp.float32) / total_steps, 1)
    return last + (first - last) * 0.5 * (1 + jnp.cos(jnp.pi * share))


def _check_spans(
    total_steps: int, start: int, warmup_steps: int, cooldown_steps: int, milestones: Sequence[int]
) -> None:
    """Raise InputError if the parts of a schedule do not fit into the run."""
    if total_steps < 1:
        raise InputError(f"duration: is {total_steps} steps; must be at least one")
    if total_steps <= start:
        raise InputError(
            f"duration: ends at step {total_steps}, and the run is at step {start} already; it "
            f"counts from the run's start: give e.g. --config.duration='{2 * start} steps'"
        )
    if start + warmup_steps + cooldown_steps > total_steps:
        after = f" after schedule.start ({start} steps)" if start else ""
        raise InputError(
            f"schedule.warmup ({warmup_steps} steps) and schedule.cooldown ({cooldown_steps} "
            f"steps) do not fit into duration ({total_steps} steps){after}; shorten them, e.g. "
            "--config.schedule.warmup='5 %'"
        )
    bounds = [start + warmup_steps, *milestones, total_steps]
    if milestones and any(now >= then for now, then in itertools.pairwise(bounds)):
        raise InputError(
            f"schedule.milestones={list(milestones)} (steps): must increase, and lie between the "
            f"end of the warm-up ({start + warmup_steps}) and of the run ({total_steps}); set "
            "--config.schedule.milestones and --config.schedule.warmup to match the duration"
        )
