"""The metrics that evaluators declare: their names, and which values are better.

An evaluator has `metrics`, {name: "higher", "lower" or "neither"}, with every name that its `run`
may report; "neither" marks counts, settings and other values without a better direction. A run
compares `checkpoint.keep_best` and `stop.metric` with them before it trains. An evaluator of a
plug-in may leave `metrics` out: its names are then known only after its first evaluation, and
`guess_direction` reads the direction from the name.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from vit_jax.config.evals import find_evaluator
from vit_jax.errors import Faults, InputError, collect_faults, nearest

logger = logging.getLogger("vit_jax")

Better = Literal["higher", "lower", "neither"]

KEYS_OF_METRICS = ("checkpoint.keep_best", "stop.metric")
_DIRECTIONS = ("higher", "lower", "neither")
_LOWER_IS_BETTER = re.compile(r"(loss|ece|error)(_raw)?$")


def chosen_metrics(config: ConfigDict) -> dict[str, str]:
    """{key: metric} for those of KEYS_OF_METRICS that the config sets."""
    values = config.checkpoint.keep_best, config.stop.metric
    return {k: v for k, v in zip(KEYS_OF_METRICS, values, strict=True) if v is not None}


def declared_metrics(config: ConfigDict, name: str, evaluator: Any) -> dict[str, Better] | None:
    """{"name/metric": which is better} that `evaluate` may report; None: it declares none.

    Raises:
      InputError: a direction is none of higher, lower and neither.
    """
    metrics = getattr(evaluator, "metrics", None)
    return _with_names(config, name, metrics) if isinstance(metrics, Mapping) else None


def expected_metrics(config: ConfigDict, name: str) -> dict[str, Better] | None:
    """`declared_metrics` of the entry `name` before there are data and an evaluator.

    None: the kind of the entry does not know them yet. Metrics that the data rule out are named.
    """
    find = find_evaluator(config.evals[name].type).metrics
    return None if find is None else _with_names(config, name, find(config.evals[name]))


def _with_names(config: ConfigDict, name: str, metrics: Mapping[str, Any]) -> dict[str, Better]:
    """{"name/metric": which is better}, also of the raw weights if the config averages weights."""
    wrong = [f"{metric}={better!r}" for metric, better in metrics.items()
             if better not in _DIRECTIONS]  # fmt: skip
    if wrong:
        raise InputError(
            f"evals.{name}.type={config.evals[name].type!r}: declares the metrics "
            f"{', '.join(wrong)}; needs {', '.join(_DIRECTIONS)}"
        )
    found: dict[str, Better] = {f"{name}/{metric}": better for metric, better in metrics.items()}
    if config.optimizer.ema_decay is None:
        return found
    return found | {f"{metric}_raw": better for metric, better in found.items()}


def guess_direction(metric: str) -> Better:
    """Which values of a metric are better, if its evaluator declares none: judged by its name."""
    return "lower" if _LOWER_IS_BETTER.search(metric) else "higher"


def find_direction(config: ConfigDict, metric: str, evaluators: Mapping[str, Any]) -> Better:
    """Which values of the metric "name/metric" are better: as declared, else by its name."""
    name = metric.partition("/")[0]
    found = declared_metrics(config, name, evaluators.get(name)) or {}
    return found.get(metric) or guess_direction(metric)


def check_metrics(config: ConfigDict, evaluators: Mapping[str, Any], resumes: bool = False) -> None:
    """Check that the metrics by which a run decides are ones that its evaluators report.

    Warns if the evaluator of such a metric declares none; also if a run `resumes` and a plug-in's
    evaluator, which may be a subclass of one of ours, does not declare the metric.

    Raises:
      InputError: names the key, and the nearest metric or those that can be chosen.
    """
    faults = Faults()
    for key, metric in chosen_metrics(config).items():
        name = metric.partition("/")[0]
        try:
            found = declared_metrics(config, name, evaluators[name])
        except InputError as e:
            faults.append(str(e))
            continue
        if found is None:
            logger.warning(
                "%s=%s: evals.%s does not declare its metrics; assuming that the %s value is the "
                "better one", key, metric, name, guess_direction(metric),
            )  # fmt: skip
            continue
        known = [m for m, better in found.items() if better != "neither"]
        if found.get(metric) == "neither":
            faults.append(
                f"{key}={metric!r}: no value of it is better than another; known: "
                f"{', '.join(known)}"
            )
        elif resumes and metric not in found and _is_plugged_in(evaluators[name]):
            logger.warning(
                "%s=%s: evals.%s declares other metrics (%s); assuming that it reports this one, "
                "and that the %s value is the better one; add it to the evaluator's `metrics`",
                key, metric, name, ", ".join(known), guess_direction(metric),
            )  # fmt: skip
        elif metric not in known:
            faults.append(
                f"{key}={metric!r}: evals.{name} does not report it; {nearest(metric, known)}"
            )
    collect_faults(faults)


def _is_plugged_in(evaluator: Any) -> bool:
    return type(evaluator).__module__.partition(".")[0] != "vit_jax"
