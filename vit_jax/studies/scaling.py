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

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.base.errors import Faults, InputError
from vit_jax.config import key
from vit_jax.config.durations import check_duration
from vit_jax.devices.chips import CHIPS, find_slice
from vit_jax.studies.engine import Found, Member, Results, Study, join_name, seeded
from vit_jax.studies.figures import draw_scaling
from vit_jax.studies.law import Prediction, pareto_front, predict_largest
from vit_jax.studies.tables import Measured, Report, best_first

if TYPE_CHECKING:
    from vit_jax.studies.planned import Planner

ALL = "all families"


class Point(NamedTuple):
    """A size with a duration: its accuracy, its compute in exaFLOPs, its cost by plan."""

    place: dict[str, str]
    measured: Measured
    exaflops: float
    cost: float | None

    @property
    def error(self) -> float:
        return 1 - statistics.fmean(self.measured.known)


class Scaling(Study):
    """See the module."""

    cells: tuple[str, ...] = key((), '"row | column: key=value; key=value"', form="entries")
    durations: tuple[str, ...] = key((), "values of `duration`; (): the config's own")
    topology: str | None = key(None, "chips on which TPU-core-days are planned")

    @property
    def own_keys(self) -> Sequence[str]:
        return ["duration"] if self.durations else []

    def check_own(self, faults: Faults) -> None:
        for text in self.durations:
            faults.check(check_duration, text, key="study.durations", form="length")
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
            members = [m for m in found.at(**place) if m.name in found.results]
            summaries = [found.results[member.name].summary for member in members]
            if exaflops := [summary["exaflops"] for summary in summaries if summary]:
                own = place, found.measure(**place), statistics.fmean(exaflops)
                points.append(Point(*own, self._cost(members[0])))
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
        front = pareto_front([p.exaflops for p in points], [p.error for p in points])
        rows: list[Mapping[str, Any]] = best_first(
            {
                **p.place, "exaFLOPs": f"{p.exaflops:.4g}",
                self._cost_unit: "-" if p.cost is None else f"{p.cost:.3g}",
                self.label: p.measured, "": "front" if i in front else "",
            }
            for i, p in enumerate(points)
        )  # fmt: skip
        laws = predictions_of(points)
        for name, (law, held_out) in laws.items():
            accuracy, low, high = (100 * (1 - error) for error in (law.error, law.high, law.low))
            rows.append({
                "family": f"law of {name}", "size": f"{law.num_points} runs",
                "duration": f"predicts {held_out.place['size']}, {held_out.place['duration']}",
                "exaFLOPs": f"{law.compute:.4g}",
                self.label: f"{accuracy:.2f} [{low:.2f}, {high:.2f}]",
                "": f"off by {100 * (law.measured - law.error):+.2f}",
            })  # fmt: skip
        panels = {
            "exaFLOPs of training": [(p.place["family"], p.exaflops, p.error) for p in points],
            f"{self._cost_unit}, by plan": [(p.place["family"], p.cost, p.error)
                                            for p in points if p.cost is not None],
        }  # fmt: skip
        curves = {name: law for name, (law, _) in laws.items() if name != ALL}
        numbers = {
            name: {**law._asdict(), "fit": law.fit.law._asdict(), "held_out": held_out.place}
            for name, (law, held_out) in laws.items()
        }
        return Report(
            rows,
            {"laws": numbers},
            complete=len(found.members) == sum(len(p.measured.known) for p in points),
            files=draw_scaling(panels, curves, self.label) if points else {},
            best=found.best_of(found.members),
        )


def predictions_of(points: Sequence[Point]) -> dict[str, tuple[Prediction, Point]]:
    """{family, or ALL: its prediction, for which point} where there are enough points."""
    families = dict.fromkeys(point.place["family"] for point in points)
    found = {}
    for name in [*families, *[ALL] * (len(families) > 1)]:
        group = [point for point in points if name in (ALL, point.place["family"])]
        law = predict_largest([p.exaflops for p in group], [p.error for p in group])
        if law is not None:
            found[name] = law, max(group, key=lambda point: point.exaflops)
    return found


@functools.cache
def _planner(topology: str) -> "Planner":
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.studies.planned import Planner  # imports planning, which few studies need

    target = Target(find_slice(topology))
    start_planning(target)
    return Planner(target)
