"""Durations with a unit, and their conversion to steps.

A duration is converted by exact rational arithmetic and rounded to the nearest step, halves up:
"90 epochs" of 1,281,167 images in batches of 1024 are 112,603 steps.
"""

import math
from fractions import Fraction

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, InputError, nearest
from vit_jax.config import declared_keys, values_in_force

UNITS = ("steps", "epochs", "examples")
_MOST_STEPS = 2**31 - 1  # a state counts its steps in int32


def parse_duration(text: str, *, num_examples: int, global_batch_size: int, key: str) -> int:
    """Number of steps in a duration such as "90 epochs", "10000 steps" or "5e6 examples".

    Args:
      text: a number (an integer, a decimal or 5e6) and a unit, singular or plural.
      num_examples: examples per epoch.
      global_batch_size: examples per step.
      key: config key that holds `text`, named in errors.

    Raises:
      InputError: if `text` is not a duration.
    """
    number, unit = split_duration(text, key)
    examples_per_unit = {"steps": global_batch_size, "epochs": num_examples, "examples": 1}[unit]
    steps = math.floor(number * examples_per_unit / global_batch_size + Fraction(1, 2))
    if steps > _MOST_STEPS:
        raise InputError(f"{key}={text!r}: is too long; needs at most {_MOST_STEPS:,} steps")
    return steps


def split_durations(text: str) -> list[str]:
    """Split a list such as "3000 steps, 6000 steps" into its durations; "" has none."""
    return [part.strip() for part in text.split(",")] if text else []


def check_duration(text: str, *, key: str, positive: bool = False) -> None:
    """Raise InputError if `text` is not a duration; needs neither the data nor the batch size.

    `positive`: reject durations of 0 as well.
    """
    number, _ = split_duration(text, key)
    if positive and not number:
        raise InputError(f'{key}={text!r}: must be more than 0, such as "1000 steps"')


def split_duration(text: str, key: str) -> tuple[Fraction, str]:
    """(90, "epochs") of "90 epochs", the value of `key`; raises InputError if it is none."""
    example = 'write a number and a unit, such as "90 epochs", "10000 steps" or "5e6 examples"'
    try:
        amount, unit = str(text).split()
        number = Fraction(str(float(amount)))  # of 1e999999999 itself it would not end
    except ValueError:
        raise InputError(f"{key}={text!r}: not a duration; {example}") from None
    plural = unit if unit.endswith("s") else f"{unit}s"
    if plural not in UNITS:
        raise InputError(f"{key}={text!r}: unknown unit; {nearest(plural, UNITS)}")
    if number < 0:
        raise InputError(f"{key}={text!r}: is negative; {example}")
    return number, plural


def _texts_of(config: ConfigDict, form: str) -> dict[str, str]:
    """{key: text} of the keys with this declared form, unless they are None."""
    values = values_in_force(config)
    keys = (key for key, declared in declared_keys(config).items() if declared.form == form)
    return {key: values[key] for key in keys if values[key] is not None}


def parse_durations(config: ConfigDict) -> dict[str, int]:
    """Convert every duration of a config to steps: {key: steps}.

    `data.num_examples` must be set. Intervals are at least 1 step; keys set to None are left out.

    Raises:
      InputError: names each that is not a duration, or lasts longer than the run.
    """
    return {
        **{k: _steps(config, text, k) for k, text in _texts_of(config, "duration").items()},
        **{k: max(_steps(config, t, k), 1) for k, t in _texts_of(config, "interval").items()},
    }


def parse_milestones(config: ConfigDict) -> list[int]:
    """`schedule.milestones` as steps."""
    key = "schedule.milestones"
    return [_steps(config, text, key) for text in split_durations(config.schedule.milestones or "")]


def _steps(config: ConfigDict, text: str, key: str) -> int:
    return parse_duration(
        text,
        num_examples=config.data.num_examples,
        global_batch_size=config.global_batch_size,
        key=key,
    )


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check every duration; needs neither the data nor the batch size."""
    for key, text in _texts_of(config, "duration").items():
        faults.check(check_duration, text, key=key)
    for key, text in _texts_of(config, "interval").items():
        faults.check(check_duration, text, key=key, positive=True)
    for key, texts in _texts_of(config, "list").items():
        for text in split_durations(texts):
            faults.check(check_duration, text, key=key, positive=True)
