"""The best step of a run (`checkpoint.keep_best`) and its early end, decided by its evaluations.

Both follow from the config and from the evaluations up to a step, which are saved with each state,
and from nothing else: a run that was killed decides as one that was not. Evaluators declare whether
the higher or the lower value of a metric is better. A value that is not finite is never better.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import SharedInputError, nearest
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.history import read_values
from vit_jax.config import Settings
from vit_jax.config.metric_names import chosen_metrics, find_best, find_direction
from vit_jax.job import processes
from vit_jax.run.build import Run
from vit_jax.run.writers import finite_or_none


class Selection:
    """The decisions of a run; each is off unless the config asks for it.

    Args:
      settings: of the run.
      values: {key of `chosen_metrics`: {step: value}} of what was evaluated so far.
    """

    def __init__(self, settings: Settings, values: Mapping[str, Mapping[int, float | None]]):
        self._settings = settings
        self._metrics = chosen_metrics(settings.checkpoint, settings.stop)
        self._values = {key: dict(values.get(key, {})) for key in self._metrics}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Takes what evaluators have found at `step`.

        Raises:
          SharedInputError: the evaluator, which declares no metrics, does not give the metric.
        """
        for key, metric in self._metrics.items():
            evaluator = metric.partition("/")[0]
            found = [name for name in row if name.partition("/")[0] == evaluator]
            if metric in found:
                self._values[key][step] = float(row[metric])
            elif found:
                raise SharedInputError(f"{key}={metric!r}: {nearest(metric, found)}")

    def _best(self, key: str) -> tuple[int | None, int]:
        """`find_best` of the metric that `key` chooses; (None, 0): it chooses none."""
        if key not in self._metrics:
            return None, 0
        return find_best(
            self._values[key], find_direction(self._settings.evals, self._metrics[key])
        )

    @property
    def best_step(self) -> int | None:
        """The step that `checkpoint.keep_best` keeps; None: there is none."""
        return self._best("checkpoint.keep_best")[0]

    @property
    def stops(self) -> bool:
        """Whether the run ends early, now that the last values are known."""
        return self._best("stop.metric")[1] >= self._settings.stop.patience

    def describe_end(self) -> str:
        """Why the run ends early."""
        step, since = self._best("stop.metric")
        return (
            f"{self._metrics['stop.metric']} was best at step {step}, {since} evaluations ago "
            f"(stop.patience={self._settings.stop.patience})"
        )

    def read(self) -> dict[str, Any]:
        """The facts that are saved with a state, for `read_values`."""
        values = {m: finite_or_none(self._values[key]) for key, m in self._metrics.items()}
        return {"evaluated": values}

    def summary(self) -> dict[str, Any]:
        """Its part of summary.json."""
        found: dict[str, Any] = {"stopped_early": True} if self.stops else {}
        if (best := self.best_step) is not None:
            metric = self._metrics["checkpoint.keep_best"]
            found["best"] = {"step": best, metric: self._values["checkpoint.keep_best"][best]}
        return found


def read_selection(run: Run, step: int) -> Selection:
    """The decisions of a run up to and with `step`, from the files that this process sees."""
    return Selection(run.settings, _read_values(run, step))


def share_selection(run: Run, step: int, meta: Mapping[str, Any]) -> Selection:
    """`read_selection` from the files that process 0 sees; all processes call it.

    `meta`: saved with the state of `step`; {} from scratch.
    """
    deadline_s = run.settings.job.compile_deadline_s
    found = processes.say_to_all(
        "the evaluations so far", lambda: _read_values(run, step, meta), deadline_s
    )
    # The keys of JSON are texts.
    values = {key: {int(at): v for at, v in by_step.items()} for key, by_step in found.items()}
    return Selection(run.settings, values)


def _read_values(
    run: Run, step: int, meta: Mapping[str, Any] | None = None
) -> dict[str, dict[int, float | None]]:
    """{key of `chosen_metrics`: {step: value}}; for `checkpoint.keep_best` of the steps saved.

    A run that began with this key has saved its best step; another may have lost it.
    """
    chosen = chosen_metrics(run.settings.checkpoint, run.settings.stop)
    values = read_values(run.workdir, step, meta, {*chosen.values()}.__contains__)
    found = {
        key: {at: v for at, v in values.get(metric, {}).items() if at > 0}  # 0: the start's
        for key, metric in chosen.items()
    }
    if of_best := found.get("checkpoint.keep_best"):
        saved = restore.saved_steps(run.workdir / "checkpoints")
        found["checkpoint.keep_best"] = {at: of_best[at] for at in of_best if at in saved}
    return found
