"""What a run makes of its own evaluations: its best step (`checkpoint.keep_best`) and an early end.

Both follow from the config and from the rows of metrics.jsonl up to a step, and from nothing else:
a run that was killed decides as one that was not. The higher value is the better, but for metrics
whose name ends in loss, ece or error. A value that is not finite is never better.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import metrics
from vit_jax.errors import Faults, InputError, nearest
from vit_jax.job import processes
from vit_jax.training.prepare import Run

_LOWER_IS_BETTER = re.compile(r"(loss|ece|error)(_raw)?$")
_KEYS = ("checkpoint.keep_best", "stop.metric")


class Series:
    """The values of one metric, in the order of steps.

    best_step: the first step with the best value; None before there is a finite one.
    best: that value.
    since_best: number of evaluations after it; of all evaluations if there is no best one yet.
    """

    def __init__(self, metric: str, values: Mapping[int, float | None] | None = None):
        self.metric = metric
        self._sign = -1.0 if _LOWER_IS_BETTER.search(metric) else 1.0
        self.best_step: int | None = None
        self.best: float | None = None
        self.since_best = 0
        for step, value in (values or {}).items():
            self.add(step, value)

    def add(self, step: int, value: float | None) -> None:
        """Takes the value of an evaluation at `step`."""
        self.since_best += 1
        if value is None or not math.isfinite(value):
            return
        if self.best is None or self._sign * (value - self.best) > 0:
            self.best_step, self.best, self.since_best = step, value, 0


class Selection:
    """The decisions of a run; each is off unless the config asks for it.

    Args:
      config: of the run.
      values: {metric: {step: value}} of what was evaluated so far.
    """

    def __init__(self, config: ConfigDict, values: Mapping[str, Mapping[int, float | None]]):
        keep, stop = config.checkpoint.keep_best, config.stop.metric
        self._keep = None if keep is None else Series(keep, values.get(keep))
        self._stop = None if stop is None else Series(stop, values.get(stop))
        self._patience = config.stop.patience

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Takes what evaluators have found at `step`.

        Raises:
          InputError: the evaluator does not give the metric.
        """
        for key, series in zip(_KEYS, (self._keep, self._stop), strict=True):
            if series is None:
                continue
            if series.metric in row:
                series.add(step, float(row[series.metric]))
                continue
            evaluator = series.metric.partition("/")[0]
            found = [name for name in row if name.partition("/")[0] == evaluator]
            if found:
                raise InputError(f"{key}={series.metric!r}: {nearest(series.metric, found)}")

    @property
    def best_step(self) -> int | None:
        """The step that `checkpoint.keep_best` keeps; None: there is none."""
        return None if self._keep is None else self._keep.best_step

    @property
    def stops(self) -> bool:
        """Whether the run ends early, now that the last values are known."""
        return self._stop is not None and self._stop.since_best >= self._patience

    def describe_end(self) -> str:
        """Why the run ends early."""
        assert self._stop is not None
        best = "" if self._stop.best_step is None else f" than at step {self._stop.best_step:,}"
        return (
            f"{self._stop.metric} was not better{best} in {self._stop.since_best} evaluations "
            f"(stop.patience={self._patience})"
        )

    def summary(self) -> dict[str, Any]:
        """What summary.json says of it."""
        found: dict[str, Any] = {"stopped_early": True} if self.stops else {}
        if self._keep is not None and self._keep.best_step is not None:
            found["best"] = {"step": self._keep.best_step, self._keep.metric: self._keep.best}
        return found


def read_selection(run: Run, step: int) -> Selection:
    """The decisions of a run up to and with `step`, from the rows that this process sees."""
    return Selection(run.config, _read_values(run, step))


def share_selection(run: Run, step: int) -> Selection:
    """`read_selection` from the rows that process 0 sees; all processes call it."""
    if not _metrics_of(run.config):
        return Selection(run.config, {})
    text = processes.say_to_all(
        "the evaluations so far",
        lambda: json.dumps(_read_values(run, step)),
        run.config.job.compile_deadline_s,
    )
    by_text = json.loads(text)  # whose keys are strings
    values = {m: {int(at): v for at, v in found.items()} for m, found in by_text.items()}
    return Selection(run.config, values)


def _read_values(run: Run, step: int) -> dict[str, dict[int, float | None]]:
    return {
        metric: metrics.values_of(metric, run.workdir, step) for metric in _metrics_of(run.config)
    }


def _metrics_of(config: ConfigDict) -> set[str]:
    return {config.checkpoint.keep_best, config.stop.metric} - {None}


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks the keys by which a run decides."""
    values = dict(zip(_KEYS, (config.checkpoint.keep_best, config.stop.metric), strict=True))
    for key, metric in values.items():
        if metric is None:
            continue
        name, slash, kind = metric.partition("/")
        known = [f"{evaluator}/..." for evaluator in config.evals]
        faults.need(
            slash and kind and name in config.evals,
            f"{key}={metric!r}: needs a metric of an evaluator, such as val/top1; the config has "
            f"{', '.join(known) or 'no evals'}",
        )
    faults.need_positive("stop.patience", config.stop.patience)
