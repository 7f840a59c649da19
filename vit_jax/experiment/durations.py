"""Durations with a unit, and the steps that they stand for in a run.

Rounding, stated once: a duration is turned into steps by exact rational arithmetic and rounded to
the nearest step, halves up. "90 epochs" of 1,281,167 images in batches of 1024 are 112,603 steps.
"""

import math
from fractions import Fraction

from ml_collections import ConfigDict

from vit_jax.config import flatten
from vit_jax.errors import Faults, InputError, nearest

UNITS = ("steps", "epochs", "examples")


def parse_duration(text: str, *, num_examples: int, global_batch_size: int, key: str) -> int:
    """Steps in a duration such as "90 epochs", "10000 steps" or "5e6 examples".

    Args:
      text: a number (an integer, a decimal or 5e6) and a unit, singular or plural.
      num_examples: examples in an epoch.
      global_batch_size: examples in a step.
      key: the config key that `text` was given for, named in errors.

    Raises:
      InputError: `text` is no duration.
    """
    number, unit = _split_duration(text, key)
    examples_per_unit = {"steps": global_batch_size, "epochs": num_examples, "examples": 1}[unit]
    steps = number * examples_per_unit / global_batch_size
    return math.floor(steps + Fraction(1, 2))


def split_durations(text: str) -> list[str]:
    """ "3000 steps, 6000 steps" -> the durations in it; "" has none."""
    return [part.strip() for part in text.split(",")] if text else []


def check_duration(text: str, *, key: str, positive: bool = False) -> None:
    """Raises InputError where `parse_duration` would; needs neither the data nor the batch.

    `positive`: 0 of anything is refused too.
    """
    number, _ = _split_duration(text, key)
    if positive and not number:
        raise InputError(f'{key}={text!r} is never; give more than 0, such as "1000 steps"')


def _split_duration(text: str, key: str) -> tuple[Fraction, str]:
    example = 'write a number and a unit, such as "90 epochs", "10000 steps" or "5e6 examples"'
    try:
        amount, unit = str(text).split()
        number = Fraction(amount)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{key}={text!r} is not a duration; {example}") from None
    plural = unit if unit.endswith("s") else f"{unit}s"
    if plural not in UNITS:
        raise InputError(f"{key}={text!r} has an unknown unit; {nearest(plural, UNITS)}")
    if number < 0:
        raise InputError(f"{key}={text!r} is negative; {example}")
    return number, plural


# The keys that hold a duration, or None; of these and of evals.*.every the last part says whether
# it is an interval.
KEYS = ("duration", "schedule.warmup", "schedule.cooldown", "schedule.timescale",
        "checkpoint.every", "checkpoint.keep_every", "log.every")  # fmt: skip


def duration_keys(config: ConfigDict) -> list[str]:
    """Every key of `config` that holds a duration, or None."""
    return [*KEYS, *(f"evals.{name}.every" for name in config.evals)]


def is_interval(key: str) -> bool:
    """Whether the duration of `key` lies between two events; it is then at least a step."""
    return key.endswith("every")


def parse_durations(config: ConfigDict) -> dict[str, int]:
    """{key: steps} of every duration of a config in which `data.num_examples` is set.

    An interval is at least 1 step; a key that holds None is left out.
    """
    texts = flatten(config)
    steps = {}
    for key in duration_keys(config):
        if texts[key] is not None:
            found = _steps(config, texts[key], key)
            steps[key] = max(found, 1) if is_interval(key) else found
    return steps


def parse_milestones(config: ConfigDict) -> list[int]:
    """The steps of `schedule.milestones`."""
    key = "schedule.milestones"
    return [_steps(config, text, key) for text in split_durations(config.schedule.milestones)]


def _steps(config: ConfigDict, text: str, key: str) -> int:
    return parse_duration(
        text,
        num_examples=config.data.num_examples,
        global_batch_size=config.global_batch_size,
        key=key,
    )


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks every duration; needs neither the data nor the batch."""
    texts = flatten(config)
    for key in duration_keys(config):
        if texts[key] is not None:
            positive = key == "duration" or is_interval(key)
            faults.check(check_duration, texts[key], key=key, positive=positive)
    milestones = config.schedule.milestones
    for text in split_durations(milestones):
        faults.check(check_duration, text, key="schedule.milestones", positive=True)
    takes_them = config.schedule.name == "multistep"
    remedy = f"schedule.name={config.schedule.name!r} has none; leave them out"
    if takes_them:
        remedy = "multistep needs some, e.g. '3000 steps, 6000 steps'"
    faults.need(takes_them == bool(milestones), f"schedule.milestones={milestones!r}: {remedy}")
