"""Stored numbers of the twins, and the comparison of a run with them."""

import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

from vit_jax.errors import InputError
from vit_jax.files import write_whole
from vit_jax.insight.trace import Trace, trace_seeds
from vit_jax.insight.twins import Twin, twin_config
from vit_jax.job.software import software

FOLDER = pathlib.Path(__file__).parent / "reference_curves"
SEEDS = (0, 1, 2, 3, 4)  # of the band; the first is the one that is run again
TOLERANCE = 1e-3  # relative, of the numbers of the first steps
_TINY = 1e-6  # absolute, for numbers that are 0 but for rounding
_OUTSIDE = 1e-3  # probability that a further seed leaves the band at one point
_LEAST = 0.01  # half the width of the band, relative, where the seeds agree
_DIGITS = 6  # stored of a number
_VERSIONS = ("Python", "jax", "jaxlib", "flax", "optax")


class Reference(NamedTuple):
    """The stored numbers of a twin.

    made_with: config and overrides of the twin, and versions of the software.
    first_steps: as `Trace.first_steps`, of the first seed.
    curve: {name: {step: the values of all seeds}}.
    """

    made_with: Mapping[str, Any]
    first_steps: Mapping[str, Sequence[float]]
    curve: Mapping[str, Mapping[int, Sequence[float]]]


class Departure(NamedTuple):
    """A number that is not where the reference has it: `value` outside `low` to `high`.

    `value` is None if the run has no such number; `low` and `high` are if the reference has none.
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


def record(twin: Twin, data_dir: str | None = None) -> Reference:
    """Run `twin` with every seed of `SEEDS` and return its numbers; `data_dir` as `twin_config`."""
    trace = trace_seeds([twin_config(twin, seed, data_dir=data_dir) for seed in SEEDS])
    return Reference(_made_with(twin), trace.first_steps, trace.curve)


def _made_with(twin: Twin) -> dict[str, Any]:
    found = software()
    settings = {"config": twin.config, "overrides": dict(twin.overrides)}
    return settings | {"versions": {name: found[name] for name in _VERSIONS}}


def write(reference: Reference, name: str, folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """Write `reference` as FOLDER/NAME.json, one line for each number; returns the path."""
    tables = {
        "first_steps": {n: _rounded(values) for n, values in reference.first_steps.items()},
        "curve": {
            f"{n} at {step}": _rounded(values)
            for n, points in reference.curve.items()
            for step, values in points.items()
        },
    }
    lines = [f'  "made_with": {json.dumps(reference.made_with)}']
    for title, rows in tables.items():
        body = ",\n".join(f"    {json.dumps(n)}: {json.dumps(row)}" for n, row in rows.items())
        lines.append(f'  "{title}": {{\n{body}\n  }}')
    path = folder / f"{name}.json"
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def is_recorded(name: str, folder: pathlib.Path = FOLDER) -> bool:
    """Whether the numbers of the twin `name` are stored."""
    return (folder / f"{name}.json").exists()


def read(name: str, twin: Twin, folder: pathlib.Path = FOLDER) -> Reference:
    """The stored numbers of `twin`.

    Raises:
      InputError: there are none, or they were recorded with other settings of the twin.
    """
    if not is_recorded(name, folder):
        raise InputError(f"no stored numbers; record them with check --record {name}")
    stored = json.loads((folder / f"{name}.json").read_text())
    made_with = stored["made_with"]
    now = {"config": twin.config, "overrides": dict(twin.overrides)}
    if any(made_with[key] != value for key, value in now.items()):
        raise InputError(
            f"the twin has other settings than its stored numbers; record them again with "
            f"check --record {name}"
        )
    curve: dict[str, dict[int, Sequence[float]]] = {}
    for place, values in stored["curve"].items():
        metric, _, step = place.rpartition(" at ")
        curve.setdefault(metric, {})[int(step)] = values
    return Reference(made_with, stored["first_steps"], curve)


def band(values: Sequence[float]) -> tuple[float, float]:
    """The interval that a further seed leaves with a probability of 1 in 1000.

    It is the prediction interval of a normal distribution, mean ± t s sqrt(1 + 1 / n), and at
    least 1 % of the mean to either side.
    """
    n, mean = len(values), statistics.fmean(values)
    t = float(scipy.stats.t.ppf(1 - _OUTSIDE / 2, n - 1))
    half = max(t * statistics.stdev(values) * math.sqrt(1 + 1 / n), _LEAST * abs(mean), _TINY)
    return mean - half, mean + half


def compare_first_steps(reference: Reference, trace: Trace) -> list[Departure]:
    """The numbers of the first steps that differ by more than `TOLERANCE`, by step."""
    found = _unpaired(reference.first_steps, trace.first_steps)
    for name in reference.first_steps.keys() & trace.first_steps.keys():
        wanted, values = reference.first_steps[name], trace.first_steps[name]
        if len(values) < len(wanted):  # of a run that ends before
            found.append(Departure(len(values) + 1, name, None, None, None))
        for step, (want, got) in enumerate(zip(wanted, values, strict=False), start=1):
            margin = TOLERANCE * abs(want) + _TINY
            if not abs(got - want) <= margin:  # also where it is not a number
                found.append(Departure(step, name, got, want - margin, want + margin))
    return sorted(found, key=lambda departure: (departure.step, departure.name))


def compare_curve(reference: Reference, trace: Trace) -> list[Departure]:
    """The points of the curve outside the band over the seeds, by step."""
    found = _unpaired(reference.curve, trace.curve)
    for name in reference.curve.keys() & trace.curve.keys():
        for step, values in reference.curve[name].items():
            (low, high), got = band(values), trace.curve[name].get(step)
            if got is None or not low <= got <= high:
                found.append(Departure(step, name, got, low, high))
    return sorted(found, key=lambda departure: (departure.step, departure.name))


def _unpaired(want: Mapping[str, Any], got: Mapping[str, Any]) -> list[Departure]:
    """A departure at step 1 for each name that only one of the two has."""
    missing = [Departure(1, name, None, None, None) for name in want.keys() - got.keys()]
    return missing + [Departure(1, name, math.nan, None, None) for name in got.keys() - want.keys()]


def largest_difference(reference: Reference, trace: Trace) -> tuple[float, str, int]:
    """(relative difference, name, step) of the number of the first steps that differs most.

    Numbers that are 0 but for rounding are left out.
    """
    found = [(0.0, "loss", 1)]
    for name in reference.first_steps.keys() & trace.first_steps.keys():
        pairs = zip(reference.first_steps[name], trace.first_steps[name], strict=False)
        for step, (want, got) in enumerate(pairs, start=1):
            if abs(want) > _TINY:
                found.append((abs(got - want) / abs(want), name, step))
    return max(found)
