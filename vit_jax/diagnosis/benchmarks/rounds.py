"""Measures several calls alternately, in rounds, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of one call in seconds: wall time, and user + system time of all threads."""

    wall_s: float
    cpu_s: float


def measure(calls: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[Cost]]:
    """Run all `calls` in turn, `num_rounds` times; returns the costs of each call by round."""
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            costs[name].append(Cost(time.perf_counter() - wall, time.process_time() - cpu))
    return costs


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, minimum and maximum of the rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread_of_ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The spread of the quotients of two calls' costs, each within one round."""
    return spread([value / other for value, other in zip(values, others, strict=True)])
