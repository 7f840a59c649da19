"""The metrics by which a run decides, and those that evaluators declare: see `Evaluator.reports`.

A run compares `checkpoint.keep_best` and `stop.metric` with them before it trains. The evaluator
of a plug-in may declare none: its names are then known only after its first evaluation, and
`guess_direction` reads the direction from the name.
"""

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from typing import get_args

from vit_jax.config.evals import Better, Evaluator
from vit_jax.config.sections import Checkpoint, Stop

PIXELS = "pixels_"  # begins the metrics of the pixels themselves; see `Knn.baselines`
FLIPS = "_flips"  # ends the metrics of an image and its mirror image; "_raw" may follow
KEYS_OF_METRICS = ("checkpoint.keep_best", "stop.metric")
_LOWER_IS_BETTER = re.compile(rf"(loss|ece|error)({FLIPS})?(_raw)?$")


def chosen_metrics(checkpoint: Checkpoint, stop: Stop) -> dict[str, str]:
    """{key: metric} for each of KEYS_OF_METRICS that is set."""
    values = checkpoint.keep_best, stop.metric
    return {k: v for k, v in zip(KEYS_OF_METRICS, values, strict=True) if v is not None}


def declared_metrics(
    name: str, evaluator: Evaluator, has_average: bool
) -> dict[str, Better] | None:
    """{"name/metric": which is better} that the evaluator `name` may report; None: unknown.

    "name/accuracy/*" stands for a metric of each class. Metrics of the raw weights follow if the
    run `has_average`.
    """
    metrics = evaluator.reports()
    if metrics is None:
        return None
    assert {*metrics.values()} <= {*get_args(Better)}, f"evals.{name} declares {metrics}"
    found: dict[str, Better] = {f"{name}/{metric}": better for metric, better in metrics.items()}
    if not has_average:
        return found
    return found | {f"{metric}_raw": better for metric, better in found.items()}


def guess_direction(metric: str) -> Better:
    """Which values of a metric are better, if its evaluator declares none: judged by its name."""
    return "lower" if _LOWER_IS_BETTER.search(metric) else "higher"


def find_direction(evals: Mapping[str, Evaluator], metric: str) -> Better:
    """Which values of the metric "name/metric" are better: as declared, else by its name."""
    name = metric.partition("/")[0]
    found = declared_metrics(name, evals[name], has_average=True) or {}
    declared = (better for pattern, better in found.items() if is_named(metric, [pattern]))
    return next(declared, None) or guess_direction(metric)


def baselines(metric: str, start: Mapping[str, float | None]) -> dict[str, float]:
    """{"pixels": value, "step 0": value} of a metric that was measured of both, else {}.

    `start`: {metric: value} of a run's row 0; see `Knn.baselines`.
    """
    names = {"pixels": metric.replace("/", f"/{PIXELS}", 1), "step 0": metric}
    found = {text: value for text, of in names.items() if (value := start.get(of)) is not None}
    return found if len(found) == len(names) else {}


def say_no_gain(metric: str, last: float | None, start: Mapping[str, float | None]) -> str:
    """A warning if `metric` ends at `last`, no higher than its `baselines`; else ""."""
    found, (evaluator, _, leaf) = baselines(metric, start), metric.partition("/")
    if not found or last is None or last > max(found.values()):
        return ""
    values = (last, found["step 0"], found["pixels"])
    end, first, pixels = (f"{100 * value:.2f} %" for value in values)
    return (
        f"evals.{evaluator}: {leaf} ends at {end}; the weights at step 0 had {first}, the pixels "
        f"have {pixels}: the features have not become useful. Train longer, or take another "
        "method: docs/explanation/does_it_learn.md"
    )


def is_named(metric: str, declared: Iterable[str]) -> bool:
    """Whether a metric is among those that `declared_metrics` gives."""
    return any(fnmatch.fnmatchcase(metric, pattern) for pattern in declared)


def find_best(values: Mapping[int, float | None], better: Better) -> tuple[int | None, int]:
    """The first step with the best finite value, and the number of evaluations after it.

    (None, number of all evaluations) before there is a finite one.

    Args:
      values: {step: value}, in the order of steps.
      better: "higher" or "lower".
    """
    sign = -1.0 if better == "lower" else 1.0
    finite = {step: sign * v for step, v in values.items() if v is not None and math.isfinite(v)}
    best = max(finite, key=finite.__getitem__, default=None)
    return best, sum(best is None or step > best for step in values)
