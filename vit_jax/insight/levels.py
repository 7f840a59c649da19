"""Values to compare a metric of a run with: of random weights, of pixels, and its greatest."""

import math
import statistics
from collections.abc import Sequence

from vit_jax.config.metric_names import baselines, say_no_gain
from vit_jax.insight.runs import Run

ENTROPY = "train/teacher_entropy"


def levels(runs: Sequence[Run], metric: str) -> dict[str, float]:
    """{text: value} of the lines to draw beside a metric: means over the runs that have them.

    The values of the pixels and at step 0 (`baselines`), and the greatest entropy of a teacher.
    """
    found: dict[str, list[float]] = {}
    for run in runs:
        own = baselines(metric, _start_of(run))
        if metric == ENTROPY and (prototypes := run.config.get("objective.num_prototypes")):
            own = {"log K": math.log(prototypes)}
        for text, value in own.items():
            found.setdefault(text, []).append(value)
    return {text: statistics.fmean(values) for text, values in found.items()}


def say_no_gains(runs: Sequence[Run]) -> list[str]:
    """A warning for each metric of a finished run that ends no higher than its `baselines`."""
    said = ((run, say_no_gain(name, value, _start_of(run)))
            for run in runs for name, value in run.summary.items())  # fmt: skip
    return [f"{run.name}: {text}" for run, text in said if text]


def _start_of(run: Run) -> dict[str, float]:
    """{metric: value} at step 0."""
    return {name: rows[0][1].item() for name, rows in run.curves.items() if rows[0][0] == 0}
