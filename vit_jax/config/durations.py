"""Durations with a unit, and their conversion to steps.

A duration is converted by exact rational arithmetic and rounded to the nearest step, halves up:
"90 epochs" of 1,281,167 images in batches of 1024 are 112,603 steps. A share of the run, "5 %", is
converted from `duration` as it is written, before rounding: of "90 epochs" it is "4.5 epochs".
"""

import math
from fractions import Fraction

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, nearest

UNITS = ("steps", "epochs", "examples")
_LENGTH = '"90 epochs", "10000 steps" or "5e6 examples"'
_MOST_STEPS = 2**31 - 1  # a state counts its steps in int32


def parse_duration(
    text: str, *, num_examples: int, global_batch_size: int, key: str, duration: str | None = None
) -> int:
    """Number of steps in a duration such as "90 epochs", "10000 steps", "5e6 examples" or "5 %".

    Args:
      text: a number (an integer, a decimal or 5e6) and a unit, singular or plural.
      num_examples: examples per epoch.
      global_batch_size: examples per step.
      key: config key that holds `text`, named in errors.
      duration: of the run, for a share of it; None: `text` may be no share.

    Raises:
      InputError: if `text` is not a duration.
    """
    number, unit = split_duration(text, key, shares=duration is not None)
    if unit == "%":
        length, unit = split_duration(str(duration), "duration", shares=False)
        number *= length / 100
    examples_per_unit = {"steps": global_batch_size, "epochs": num_examples, "examples": 1}[unit]
    steps = math.floor(number * examples_per_unit / global_batch_size + Fraction(1, 2))
    if steps > _MOST_STEPS:
        raise InputError(f"{key}={text!r}: is too long; needs at most {_MOST_STEPS:,} steps")
    return steps


def split_durations(text: str) -> list[str]:
    """Split a list such as "3000 steps, 6000 steps" into its durations; "" has none."""
    return [part.strip() for part in text.split(",")] if text else []


def check_duration(text: str, *, key: str, form: str = "duration") -> None:
    """Raise InputError if `text` is not a duration; needs neither the data nor the batch size.

    `form`: as in `config.Key`; an interval and a length are above 0, and a length is no share.
    """
    number, _ = split_duration(text, key, shares=form != "length")
    if form != "duration" and not number:
        raise InputError(f'{key}={text!r}: must be more than 0, such as "1000 steps"')


def split_duration(text: str, key: str, *, shares: bool) -> tuple[Fraction, str]:
    """(90, "epochs") of "90 epochs", the value of `key`; raises InputError if it is none.

    `shares`: whether it may be a share of the run, (5, "%").
    """
    example = f"write a number and a unit, such as {_LENGTH}"
    example += ', or a share of the run, "5 %"' if shares else ""
    try:
        amount, unit = str(text).replace("%", " %").split()
        number = Fraction(str(float(amount)))  # of 1e999999999 itself it would not end
    except ValueError:
        raise InputError(f"{key}={text!r}: not a duration; {example}") from None
    unit = unit if unit.endswith(("s", "%")) else f"{unit}s"
    if unit == "%" and not shares:
        raise InputError(f"{key}={text!r}: a share of the run, whose length it is; {example}")
    if unit not in (*UNITS, "%"):
        raise InputError(f"{key}={text!r}: unknown unit; {nearest(unit, UNITS)}")
    if number < 0:
        raise InputError(f"{key}={text!r}: is negative; {example}")
    return number, unit


def to_steps(config: ConfigDict, text: str, key: str) -> int:
    """A duration of a resolved config in steps; `key` holds it, and is named in errors."""
    return parse_duration(
        text,
        num_examples=config.data.num_examples,
        global_batch_size=config.global_batch_size,
        key=key,
        duration=None if key == "duration" else config.duration,
    )


def total_steps(config: ConfigDict) -> int:
    """`duration` of a resolved config in steps."""
    return to_steps(config, config.duration, "duration")
