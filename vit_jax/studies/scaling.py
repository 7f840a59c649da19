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
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from vit_jax.devices.chips import CHIPS, find_slice
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.experiment.durations import check_duration
from vit_jax.studies import grid
from vit_jax.studies.figures import ScalingCurve, ScalingPanel, draw_scaling
from vit_jax.studies.grid import Cell, parse_cells
from vit_jax.studies.law import LEAST_POINTS, Fit, fit_law, pareto_front
from vit_jax.studies.members import (
    Member,
    Report,
    Result,
    Study,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    name_member,
    value_of,
    write_csv,
)

ALL = "all families"


class Point(NamedTuple):
    """A size with a duration: its compute in exaFLOPs, accuracy of each seed, cost by plan."""

    family: str
    size: str
    duration: str
    exaflops: float
    values: tuple[float, ...]
    cost: float | None = None

    @property
    def error(self) -> float:
        return 1 - statistics.fmean(self.values)


class Prediction(NamedTuple):
    """A law fitted without the run that has the most compute, and what it predicts for it."""

    fit: Fit
    num_points: int
    held_out: Point
    predicted: float
    band: tuple[float, float]


def find_keys(config: ConfigDict) -> set[str]:
    """Keys that the study sets for its members."""
    return grid.find_keys(config) | ({"duration"} if config.study.durations else set())


def check(config: ConfigDict) -> None:
    """Raise InputError if the section `study` does not describe a scaling study."""
    faults = Faults()
    faults.check(grid.check, config)
    for text in config.study.durations:
        faults.check(check_duration, text, key="study.durations", positive=True)
    names = [member.name for member in find_members(config, {})] if not faults else []
    faults.need(len({*names}) == len(names), "study.durations: has a duration twice; remove one")
    if config.study.topology is not None:
        faults.check(find_slice, config.study.topology, "study.topology")
    collect_faults(faults)


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def _member(cell: Cell, duration: str, seed: int) -> Member:
    parts = [cell.row, cell.column, *[duration] * bool(duration), f"seed_{seed}"]
    set_duration = {"duration": duration} if duration else {}
    return Member(
        name_member("__".join(parts)), {**cell.overrides, **set_duration, "seed": str(seed)}
    )


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """All runs with the first seed, then with the second, and so on."""
    del results  # members do not depend on each other
    durations = config.study.durations or ("",)
    cells = parse_cells(config.study.cells)
    return [
        _member(cell, duration, seed)
        for seed in _seeds(config)
        for duration in durations
        for cell in cells
    ]


def find_points(config: ConfigDict, results: Mapping[str, Result]) -> list[Point]:
    """The sizes and durations for which at least one seed has finished."""
    points = []
    for cell in parse_cells(config.study.cells):
        for duration in config.study.durations or ("",):
            members = [_member(cell, duration, seed) for seed in _seeds(config)]
            ended = [results[m.name] for m in members if m.name in results]
            found = [(r, v) for r in ended if (v := value_of(config, r)) is not None]
            if found:
                points.append(Point(
                    cell.row, cell.column, duration or config.duration,
                    statistics.fmean(r.summary["exaflops"] for r, _ in found),
                    tuple(value for _, value in found),
                ))  # fmt: skip
    return points


def find_front(points: Sequence[Point], cost: str = "exaflops") -> list[Point]:
    """The points that no other beats at the same cost or less, by cost."""
    known = [point for point in points if getattr(point, cost) is not None]
    costs = [getattr(point, cost) for point in known]
    return [known[i] for i in pareto_front(costs, [point.error for point in known])]


def predict_largest(points: Sequence[Point]) -> Prediction | None:
    """Fit the law to the front of all points but the one with the most compute; predict that one.

    None if the front has fewer than LEAST_POINTS points.
    """
    if not points:
        return None
    held_out = max(points, key=lambda point: point.exaflops)
    front = find_front([p for p in points if p is not held_out and p.error > 0])
    if len(front) < LEAST_POINTS:
        return None
    fit = _cached_fit(tuple(p.exaflops for p in front), tuple(p.error for p in front))
    at = np.array([held_out.exaflops])
    low, high = fit.band(at, of_runs=True)
    return Prediction(
        fit, len(front), held_out, float(fit.law.predict(at)[0]), (float(low[0]), float(high[0]))
    )


_cached_fit = functools.lru_cache(fit_law)  # a report is written after every member


def predictions_of(points: Sequence[Point]) -> dict[str, Prediction]:
    """{family, or ALL: its prediction} where there are enough points."""
    families = list(dict.fromkeys(point.family for point in points))
    found = {f: predict_largest([p for p in points if p.family == f]) for f in families}
    if len(families) > 1:
        found[ALL] = predict_largest(points)
    return {name: prediction for name, prediction in found.items() if prediction is not None}


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each size and duration, then one for each law with its prediction."""
    points = _with_costs(config, find_points(config, results))
    front, laws = find_front(points), predictions_of(points)
    unit = _cost_unit(config)
    rows = []
    for point in points:
        rows.append([
            point.family, point.size, point.duration, f"{point.exaflops:.4g}",
            "-" if point.cost is None else f"{point.cost:.3g}",
            format_mean_std(mean_and_std(list(point.values)), ""),
            "front" if point in front else "",
        ])  # fmt: skip
    for name, found in laws.items():
        held, (low, high) = found.held_out, found.band
        rows.append([
            f"law of {name}", f"{found.num_points} runs", f"predicts {held.size}, {held.duration}",
            f"{held.exaflops:.4g}", "-",
            f"{100 * (1 - found.predicted):.2f} [{100 * (1 - high):.2f}, {100 * (1 - low):.2f}]",
            f"off by {100 * (held.error - found.predicted):+.2f}",
        ])  # fmt: skip
    files = {"study.csv": _write_csv(config, results, points).encode()}
    if points:
        files["study.png"] = draw_scaling(
            _panels(points, front, laws, unit), y_label=metric_in_percent(config)
        )
    members = find_members(config, {})
    return Report(
        columns=["family", "size", "duration", "exaFLOPs", unit, metric_in_percent(config), ""],
        rows=rows,
        values={
            "metric": config.study.metric,
            "points": [{**p._asdict(), "error": p.error, "front": p in front} for p in points],
            "laws": {name: _law_values(found) for name, found in laws.items()},
        },
        complete=len(members) == sum(len(point.values) for point in points),
        files=files,
    )


def _law_values(found: Prediction) -> dict[str, Any]:
    held = found.held_out
    return {
        **found.fit.law._asdict(),
        "num_points": found.num_points,
        "residual_std_of_log_error": found.fit.residual_std,
        "held_out": {"size": held.size, "duration": held.duration, "exaflops": held.exaflops},
        "error": held.error,
        "predicted_error": found.predicted,
        "band_90_percent": list(found.band),
        "band_by": "parametric bootstrap of 200 draws, of a new run",
        "inside": found.band[0] <= held.error <= found.band[1],
    }


def _panels(
    points: Sequence[Point], front: Sequence[Point], laws: Mapping[str, Prediction], unit: str
) -> list[ScalingPanel]:
    """Accuracy over exaFLOPs, and over the planned cost if there is one."""

    def place(point, cost):
        return getattr(point, cost), 100 * (1 - point.error)

    def panel(label, cost, front, curves):
        known = [point for point in points if getattr(point, cost) is not None]
        families = dict.fromkeys(point.family for point in known)
        placed = {f: [place(p, cost) for p in known if p.family == f] for f in families}
        return ScalingPanel(label, placed, [place(point, cost) for point in front], curves)

    curves = {name: _curve(points, found) for name, found in laws.items() if name != ALL}
    panels = [panel("exaFLOPs of training", "exaflops", front, curves)]
    if any(point.cost is not None for point in points):
        panels.append(panel(f"{unit}, by plan", "cost", find_front(points, "cost"), {}))
    return panels


def _curve(points: Sequence[Point], found: Prediction) -> ScalingCurve:
    own = [p.exaflops for p in points if p.family == found.held_out.family]

    def band(at):
        low, high = found.fit.band(at)
        return 100 * (1 - high), 100 * (1 - low)

    return ScalingCurve(
        law=lambda at: 100 * (1 - found.fit.law.predict(at)),
        band=band,
        first=min(own),
        last=1.5 * max(own),
        held_out=(found.held_out.exaflops, 100 * (1 - found.held_out.error)),
    )


def _cost_unit(config: ConfigDict) -> str:
    """What the cost of `_with_costs` counts."""
    topology = config.study.topology
    if topology is None:
        return "cost"
    is_gpu = CHIPS[find_slice(topology).chip].is_gpu
    kind = "chip-hours" if is_gpu else "TPU-core-days"
    return f"{kind} of {topology}"


def _with_costs(config: ConfigDict, points: Sequence[Point]) -> list[Point]:
    """`points` with their costs on `study.topology`; None where no plan can be calculated."""
    if config.study.topology is None:
        return list(points)
    planner = _planner(config.study.topology)
    from vit_jax.studies.running import member_config

    cells = {(cell.row, cell.column): cell for cell in parse_cells(config.study.cells)}
    found = []
    for point in points:
        member = _member(cells[point.family, point.size], point.duration, config.seed)
        try:
            plan = planner.plan(member_config(config, member))
        except InputError:
            found.append(point)
            continue
        cost = plan["tpu_core_days"]
        found.append(point._replace(cost=plan["chip_hours"] if cost is None else cost))
    return found


@functools.cache
def _planner(topology: str):
    from vit_jax.planning.targets import Target, start_planning
    from vit_jax.studies.planned import Planner  # imports planning, which few studies need

    target = Target(find_slice(topology))
    start_planning(target)
    return Planner(target)


def _write_csv(config: ConfigDict, results: Mapping[str, Result], points: Sequence[Point]) -> str:
    """One row per ended run, with its cost by plan."""
    costs = {(p.family, p.size, p.duration): p.cost for p in points}
    ended: list[tuple[Sequence[Any], Result]] = []
    for cell in parse_cells(config.study.cells):
        for duration in config.study.durations or ("",):
            place = (cell.row, cell.column, duration or config.duration)
            for seed in _seeds(config):
                name = _member(cell, duration, seed).name
                if name in results:
                    cost = costs.get(place)
                    ended.append(([*place, seed, "" if cost is None else cost], results[name]))
    return write_csv(["family", "size", "duration", "seed", _cost_unit(config)], ended)


STUDY = Study(find_keys, check, find_members, report)
