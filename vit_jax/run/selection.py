"""The best step of a run (`checkpoint.keep_best`) and its early end, decided by its evaluations.

Both follow from the config and from the rows of metrics.jsonl up to a step, and from nothing else:
a run that was killed decides as one that was not. Evaluators declare whether the higher or the
lower value of a metric is better. A value that is not finite is never better.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.base.errors import SharedInputError, nearest
from vit_jax.checkpoints import restore
from vit_jax.evaluators.metric_names import Better, chosen_metrics, find_direction
from vit_jax.job import processes
from vit_jax.run.build import Run
from vit_jax.run.writers import values_of


class Series:
    """The values of one metric, in the order of steps.

    better: "higher" or "lower".
    best_step: the first step with the best value; None before there is a finite one.
    best: that value.
    since_best: number of evaluations after it; of all evaluations if there is no best one yet.
    """

    def __init__(
        self, metric: str, better: Better, values: Mapping[int, float | None] | None = None
    ):
        self.metric = metric
        self._sign = -1.0 if better == "lower" else 1.0
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
      values: {key of `chosen_metrics`: {step: value}} of what was evaluated so far.
    """

    def __init__(
        self,
        config: ConfigDict,
        values: Mapping[str, Mapping[int, float | None]],
    ):
        self._series = {
            key: Series(metric, find_direction(config, metric), values.get(key))
            for key, metric in chosen_metrics(config).items()
        }
        self._keep = self._series.get("checkpoint.keep_best")
        self._stop = self._series.get("stop.metric")
        self._patience = config.stop.patience

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Takes what evaluators have found at `step`.

        Raises:
          SharedInputError: the evaluator, which declares no metrics, does not give the metric.
        """
        for key, series in self._series.items():
            evaluator = series.metric.partition("/")[0]
            found = [name for name in row if name.partition("/")[0] == evaluator]
            if series.metric in found:
                series.add(step, float(row[series.metric]))
            elif found:
                raise SharedInputError(f"{key}={series.metric!r}: {nearest(series.metric, found)}")

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
        return (
            f"{self._stop.metric} was best at step {self._stop.best_step}, "
            f"{self._stop.since_best} evaluations ago (stop.patience={self._patience})"
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
    text = processes.say_to_all(
        "the evaluations so far",
        lambda: json.dumps(_read_values(run, step)),
        run.config.job.compile_deadline_s,
    )
    by_text = json.loads(text)  # whose keys are strings
    values = {key: {int(at): v for at, v in found.items()} for key, found in by_text.items()}
    return Selection(run.config, values)


def _read_values(run: Run, step: int) -> dict[str, dict[int, float | None]]:
    """{key of `chosen_metrics`: {step: value}}; for `checkpoint.keep_best` of the steps saved.

    A run that began with this key has saved its best step; another may have lost it.
    """
    found = {
        key: values_of(metric, run.workdir, step)
        for key, metric in chosen_metrics(run.config).items()
    }
    if of_best := found.get("checkpoint.keep_best"):
        saved = restore.saved_steps(run.workdir / "checkpoints")
        found["checkpoint.keep_best"] = {at: of_best[at] for at in of_best if at in saved}
    return found
