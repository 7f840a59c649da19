"""Accuracy against compute: families x sizes x durations, Pareto front, and a law per family.

The cells of `study.cells` have a family as row and a size as column; each runs for every duration
in `study.durations`, with every seed. The error is 1 - study.metric, averaged over the seeds; the
compute is what a run reports as exaFLOPs. For each family, and for all together, the run with the
most compute is held out; a power law with saturation is fitted to the Pareto front of the others,
and predicts it. With `study.topology` accuracy is also drawn against the TPU-core-days that a plan
gives (on GPUs, chip-hours).

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.4, figure 5; Zhai et al. 2021
(arXiv:2106.04560), equation 1.
"""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.devices.chips import CHIPS, find_slice
from vit_jax.errors import Faults, InputError
from vit_jax.experiment.durations import check_duration
from vit_jax.studies.engine import (
    Found,
    Measured,
    Member,
    Report,
    Results,
    Study,
    join_name,
    seeded,
)
from vit_jax.studies.figures import ScalingCurve, ScalingPanel, draw_scaling
from vit_jax.studies.law import LEAST_POINTS, Fit, fit_law, pareto_front

ALL = "all families"


class Point(NamedTuple):
    """A size with a duration: its accuracy, its compute in exaFLOPs, its cost by plan."""

    family: str
    size: str
    duration: str
    measured: Measured
    exaflops: float
    cost: float | None

    @property
    def error(self) -> float:
        return 1 - statistics.fmean(self.measured.known)


class Prediction(NamedTuple):
    """A law fitted without the run that has the most compute, and what it predicts for it.

    error, low, high: the predicted error, and the band with 90 % of new runs.
    """

    fit: Fit
    num_points: int
    held_out: Point
    error: float
    low: float
    high: float

    def numbers(self) -> dict[str, Any]:
        """Content for study.json."""
        held_out = self.held_out
        return {
            **self.fit.law._asdict(),
            "num_points": self.num_points,
            "residual_std_of_log_error": self.fit.residual_std,
            "held_out": [held_out.size, held_out.duration, held_out.exaflops],
            "error": held_out.error,
            "predicted_error": self.error,
            "band_90_percent": [self.low, self.high],
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling(Study):
    """See the module."""

    cells: Sequence[str]
    durations: Sequence[str]
    topology: str | None

    @property
    def own_keys(self) -> Sequence[str]:
        return ["duration"] if self.durations else []

    def check_own(self, faults: Faults) -> None:
        for text in self.durations:
            faults.check(check_duration, text, key="study.durations", positive=True)
        if self.topology is not None:
            faults.check(find_slice, self.topology, "study.topology")

    @property
    def _places(self) -> list[dict[str, str]]:
        """The sizes and durations."""
        return [{"family": family, "size": size, "duration": duration}
                for duration in self.durations or (self.config.duration,)
                for family, size in self.entries["cells"]]  # fmt: skip

    def members(self, results: Results) -> list[Member]:
        """All runs with the first seed, then with the second, and so on."""
        found = []
        for seed in self.all_seeds:
            for place in self._places:
                family, size, duration = place.values()
                changes = self.entries["cells"][family, size]
                if self.durations:
                    changes = {**changes, "duration": duration}
                name = join_name(family, size, duration if self.durations else "", f"seed_{seed}")
                found.append(seeded(name, changes, place, seed))
        return found

    def find_points(self, found: Found) -> list[Point]:
        """The sizes and durations for which at least one seed has finished."""
        points = []
        for place in self._places:
            measured, members = found.measure(**place), found.at(**place)
            summaries = [found.results[m.name].summary for m in members if m.name in found.results]
            exaflops = [summary["exaflops"] for summary in summaries if summary]
            if exaflops:
                mean, cost = statistics.fmean(exaflops), self._cost(members[0])
                points.append(Point(*place.values(), measured, mean, cost))
        return points

    def _cost(self, member: Member) -> float | None:
        """The cost of a member on `study.topology`, by plan; None if none can be calculated."""
        if self.topology is None:
            return None
        try:
            plan = _planner(self.topology).plan(self.config_of(member.overrides))
        except InputError:
            return None
        return plan["chip_hours"] if plan["tpu_core_days"] is None else plan["tpu_core_days"]

    @property
    def _cost_unit(self) -> str:
        if self.topology is None:
            return "cost"
        is_gpu = CHIPS[find_slice(self.topology).chip].is_gpu
        return f"{'chip-hours' if is_gpu else 'TPU-core-days'} of {self.topology}"

    def report(self, found: Found) -> Report:
        """A row for each size and duration, then one for each law with its prediction."""
        points = self.find_points(found)
        front, laws = find_front(points), predictions_of(points)
        rows: list[dict[str, Any]] = [
            {
                "family": p.family, "size": p.size, "duration": p.duration,
                "exaFLOPs": f"{p.exaflops:.4g}",
                self._cost_unit: "-" if p.cost is None else f"{p.cost:.3g}",
                self.label: p.measured, "": "front" if p in front else "",
            }
            for p in points
        ]  # fmt: skip
        for name, law in laws.items():
            held_out = law.held_out
            accuracy, low, high = (_percent(error) for error in (law.error, law.high, law.low))
            rows.append({
                "family": f"law of {name}", "size": f"{law.num_points} runs",
                "duration": f"predicts {held_out.size}, {held_out.duration}",
                "exaFLOPs": f"{held_out.exaflops:.4g}",
                self.label: f"{accuracy:.2f} [{low:.2f}, {high:.2f}]",
                "": f"off by {100 * (held_out.error - law.error):+.2f}",
            })  # fmt: skip
        return Report(
            rows,
            {
                "points": [p._asdict() for p in points],
                "laws": {name: law.numbers() for name, law in laws.items()},
            },
            complete=len(found.members) == sum(len(p.measured.known) for p in points),
            files={"study.png": self._draw(points, laws)} if points else {},
        )

    def _draw(self, points: Sequence[Point], laws: Mapping[str, Prediction]) -> bytes:
        """Accuracy over exaFLOPs, and over the planned cost if there is one."""
        curves = {name: _curve(points, law) for name, law in laws.items() if name != ALL}
        panels = []
        for label, cost, of_panel in (
            ("exaFLOPs of training", "exaflops", curves),
            (f"{self._cost_unit}, by plan", "cost", {}),
        ):
            by_family: dict[str, list[tuple[float, float]]] = {}
            for p in points:
                if getattr(p, cost) is not None:
                    place = getattr(p, cost), _percent(p.error)
                    by_family.setdefault(p.family, []).append(place)
            front = [(getattr(p, cost), _percent(p.error)) for p in find_front(points, cost)]
            panels += [ScalingPanel(label, by_family, front, of_panel)] if front else []
        return draw_scaling(panels, y_label=self.label)


def find_front(points: Sequence[Point], cost: str = "exaflops") -> list[Point]:
    """The points that no other beats at the same cost or less, by cost."""
    known = [point for point in points if getattr(point, cost) is not None]
    costs = [getattr(point, cost) for point in known]
    return [known[i] for i in pareto_front(costs, [point.error for point in known])]


def predict_largest(points: Sequence[Point]) -> Prediction | None:
    """Fit the law to the front of all points but the one with the most compute; predict that one.

    None if the front has fewer than LEAST_POINTS points.
    """
    held_out = max(points, key=lambda point: point.exaflops)
    front = find_front([p for p in points if p is not held_out and p.error > 0])
    if len(front) < LEAST_POINTS:
        return None
    fit = _cached_fit(tuple(p.exaflops for p in front), tuple(p.error for p in front))
    at = np.array([held_out.exaflops])
    low, high = fit.band(at, of_runs=True)
    numbers = (float(found[0]) for found in (fit.law.predict(at), low, high))
    return Prediction(fit, len(front), held_out, *numbers)


_cached_fit = functools.lru_cache(fit_law)  # a report is written after every member


def predictions_of(points: Sequence[Point]) -> dict[str, Prediction]:
    """{family, or ALL: its prediction} where there are enough points."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.family, []).append(point)
    if len(groups) > 1:
        groups[ALL] = list(points)
    found = {name: predict_largest(group) for name, group in groups.items()}
    return {name: prediction for name, prediction in found.items() if prediction is not None}


def _percent(error: Any) -> Any:
    """The accuracy of an error, in percent."""
    return 100 * (1 - error)


def _curve(points: Sequence[Point], law: Prediction) -> ScalingCurve:
    own = [p.exaflops for p in points if p.family == law.held_out.family]
    at = np.geomspace(min(own), 1.5 * max(own), 100)
    low, high = law.fit.band(at)
    held_out = law.held_out.exaflops, _percent(law.held_out.error)
    accuracy = _percent(law.fit.law.predict(at))
    return ScalingCurve(at, accuracy, _percent(high), _percent(low), held_out)


@functools.cache
def _planner(topology: str):
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.studies.planned import Planner  # imports planning, which few studies need

    target = Target(find_slice(topology))
    start_planning(target)
    return Planner(target)
