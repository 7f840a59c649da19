"""Twins: short runs on a CPU, one or more for each recipe family, whose numbers are stored.

A twin is a file `reference_curves/NAME.json`. A new one has its recipe, config and overrides; the
command `check --record NAME` adds the numbers.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import scipy.stats
from etils import epath

from vit_jax.base.errors import InputError, nearest
from vit_jax.base.files import write_whole
from vit_jax.config import Settings
from vit_jax.config import text as config_text
from vit_jax.diagnosis.trace import Place, trace_runs
from vit_jax.job.software import software
from vit_jax.run.setup.validation import validate

FOLDER = epath.Path(__file__).parent / "reference_curves"
SEEDS = (0, 1, 2, 3, 4)  # of the band; the first is the one that is run again
TOLERANCE = 1e-3  # relative, of the numbers of the first steps
_TINY = 1e-6  # absolute, for numbers that are 0 but for rounding
_OUTSIDE = 1e-3  # probability that a further seed leaves the band at one point
_LEAST = 0.01  # half the width of the band, relative, where the seeds agree
_DIGITS = 6  # stored of a number
_VERSIONS = ("Python", "jax", "jaxlib", "flax", "optax")
# Stored numbers come from float32 on a CPU; bfloat16 rounds differently on other CPUs.
_ALL = {"model.dtype": "float32", "mesh.platform": "cpu"}

Limits = Mapping[Place, tuple[float, float]]


class Twin(NamedTuple):
    """A short run with the settings of a recipe, and its stored numbers; {} until it is recorded.

    recipe: what it stands for, in a few words.
    config: NAME[:words] of a shipped config.
    overrides: {key: text}, as after `--config.`; the model is small, and the data are the digits
      unless the recipe needs colours.
    versions: of the software that the numbers were recorded with.
    first_steps: {name: its values at the first steps}, of the first seed.
    curve: {"NAME at STEP": the values of all seeds}.
    """

    recipe: str
    config: str
    overrides: Mapping[str, str]
    versions: Mapping[str, str] = {}
    first_steps: Mapping[str, Sequence[float]] = {}
    curve: Mapping[str, Sequence[float]] = {}

    @property
    def data(self) -> str:
        """The data set that it trains on: digits, which the package holds, or one of TFDS."""
        return self.overrides.get("data.name", "digits")


class Departure(NamedTuple):
    """A number that is not where the twin has it: `value` outside `low` to `high`.

    `value` is None if the run has no such number; `low` and `high` are if the twin has none.
    """

    step: int
    name: str
    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} is missing"
        if self.low is None or self.high is None:
            return f"{self.name} has no stored values"
        middle = (self.low + self.high) / 2
        off = f" ({(self.value - middle) / abs(middle):+.2%})" if middle else ""
        return f"{self.name} is {self.value:.6g}{off}, outside {self.low:.6g} to {self.high:.6g}"


def twin_names() -> list[str]:
    """The names of all twins."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_twin(name: str) -> Twin:
    """The twin called `name`; raises InputError with the nearest name if there is none."""
    if name not in twin_names():
        raise InputError(f"{name!r}: no such twin; {nearest(name, twin_names())}")
    return Twin(**json.loads((FOLDER / f"{name}.json").read_text()))


def write_twin(twin: Twin, name: str) -> epath.Path:
    """Write `twin` as FOLDER/NAME.json, one line for each entry; returns the path."""
    parts = []
    for field, value in twin._asdict().items():
        text = json.dumps(value)
        if not isinstance(value, str):
            rows = (f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            text = "{\n" + ",\n".join(rows) + "\n  }"
        parts.append(f'  "{field}": {text}')
    path = FOLDER / f"{name}.json"
    write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")
    return path


def twin_settings(
    twin: Twin, seed: int, overrides: Sequence[tuple[str, str]] = (), data_dir: str | None = None
) -> Settings:
    """The settings of `twin` with a seed, and further `overrides` as after `--config.`.

    `data_dir`: folder of prepared data sets, for twins that do not train on the digits.

    Raises:
      InputError: lists the faults of the overrides.
    """
    config = config_text.load_config(twin.config)
    settings = {**_ALL, **twin.overrides, "seed": str(seed)}
    if data_dir is not None and twin.data != "digits":
        settings["data.data_dir"] = data_dir
    faults = config_text.apply_overrides(config, [*settings.items(), *overrides])
    validate(config, faults, f"--config={twin.config}")
    return Settings.of(config)


def record(twin: Twin, data_dir: str | None = None) -> Twin:
    """Run `twin` with every seed of `SEEDS`; returns it with new numbers."""
    trace = trace_runs([twin_settings(twin, seed, data_dir=data_dir) for seed in SEEDS])
    found = software()
    first_steps: dict[str, list[float]] = {}
    for (_, name), value in trace.first_steps.items():
        first_steps.setdefault(name, []).append(_rounded(value))
    return twin._replace(
        versions={name: found[name] for name in _VERSIONS},
        first_steps=first_steps,
        curve={
            f"{name} at {step}": [_rounded(value) for value in values]
            for (step, name), values in sorted(trace.curve.items(), key=lambda item: item[0][::-1])
        },
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def band(values: Sequence[float]) -> tuple[float, float]:
    """The interval that a further seed leaves with a probability of 1 in 1000.

    It is the prediction interval of a normal distribution, mean ± t s sqrt(1 + 1 / n), and at
    least 1 % of the mean to either side.
    """
    n, mean = len(values), statistics.fmean(values)
    t = float(scipy.stats.t.ppf(1 - _OUTSIDE / 2, n - 1))
    half = max(t * statistics.stdev(values) * math.sqrt(1 + 1 / n), _LEAST * abs(mean), _TINY)
    return mean - half, mean + half


def first_limits(twin: Twin) -> Limits:
    """The numbers of the first steps, `TOLERANCE` to either side."""
    found = {}
    for name, values in twin.first_steps.items():
        for step, value in enumerate(values, start=1):
            margin = TOLERANCE * abs(value) + _TINY
            found[step, name] = value - margin, value + margin
    return found


def curve_limits(twin: Twin) -> Limits:
    """The band over the seeds at each point of the curve."""
    found = {}
    for place, values in twin.curve.items():
        name, _, step = place.rpartition(" at ")
        found[int(step), name] = band(values)
    return found


def find_departures(limits: Limits, values: Mapping[Place, float]) -> list[Departure]:
    """The numbers outside their limits, and those that only the twin or only the run has."""
    found = []
    for place in sorted(limits.keys() | values.keys()):
        low, high = limits.get(place, (None, None))
        value = values.get(place)
        # The comparison is also False if `value` is not a number.
        if value is None or low is None or high is None or not low <= value <= high:
            found.append(Departure(*place, value, low, high))
    return found
