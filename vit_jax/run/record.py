"""The record of a run: rows of metrics, evaluations, and the facts saved with each checkpoint.

add ──> check ──> log, evaluate ──> saving
"""

import collections
import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from vit_jax.base.errors import RaisedByAll
from vit_jax.checkpoints.history import ROWS, warn_of_lost_rows
from vit_jax.devices.chips import count_chips
from vit_jax.evaluators import evaluate
from vit_jax.experiment.optimizers import LOWERED
from vit_jax.experiment.state import TrainState
from vit_jax.job import processes, watchdog
from vit_jax.job.lock import Lock, NoLock
from vit_jax.objectives.metrics import training_metrics
from vit_jax.run.build import Run
from vit_jax.run.terminal import Progress, readable
from vit_jax.run.watch.guards import (
    CorruptRecords,
    Health,
    Jumps,
    Stalls,
    check_finite,
)
from vit_jax.run.watch.ledger import Past
from vit_jax.run.watch.speed import Results, Throughput, chip_hours
from vit_jax.run.watch.spikes import Spikes
from vit_jax.run.writers import MetricWriter, values_at

logger = logging.getLogger("vit_jax")

BEFORE = "metrics_before.jsonl"  # rows of a run whose checkpoints are gone

T = TypeVar("T")

_STEPS_IN_FLIGHT = 2  # dispatched but not finished; each keeps its batch on the devices
_STEPS_TIMED = 20  # after the first, for an early estimate of the time left


class Record(contextlib.AbstractContextManager):
    """The metrics of a run since the step that it continues from.

    Args:
      run: the run and its parts.
      start: the step that the run continues from; its speed is measured from now on.
      meta: saved with the state of that step; {} from scratch.
      since: `time.perf_counter` at the very beginning of this part of the run.
      writer, progress: outputs for the rows.
      lock: the lock on the workdir; checked before rows and saves.
      past: what came before `since`.
      spikes: finds spikes in the metrics.

    saved: step of the newest checkpoint in the store; None before the first.
    """

    def __init__(
        self,
        run: Run,
        start: int,
        meta: Mapping[str, Any],
        since: float,
        writer: MetricWriter,
        progress: Progress,
        lock: Lock | NoLock,
        past: Past,
        spikes: Spikes,
    ):
        settings, e, devices = run.settings, run.experiment, run.mesh.devices.flatten().tolist()
        self.saved = meta.get("saved", start) if meta else None
        self._start, self._logged = start, meta.get("logged", 0)
        self._last_step, self._saved_s = start, meta.get("train_s", 0.0)
        self._run, self._writer, self._progress, self._lock = run, writer, progress, lock
        self._spikes, self._stalls, self._results = spikes, Stalls(settings.checkpoint), Results()
        self._chip_hours = functools.partial(chip_hours, meta, devices, since)
        self._schedule = jax.jit(e.schedule)  # as one program
        self._pending: collections.deque = collections.deque()
        self._last, self._untold = dict[str, float](), dict[str, float]()
        ranks = [name for name, entry in settings.evals.items() if entry.measures_rank]
        self._health, self._jumps = Health(e.objective.collapse, ranks, meta), Jumps()
        self._finish = training_metrics(settings.log, settings.loss, settings.data).finish
        self._corrupt = CorruptRecords(meta, settings.data, settings.stages.images)
        self._throughput = Throughput(
            start,
            images=settings.stages.images,
            flops=run.flops,
            device_kind=devices[0].device_kind,
            num_chips=count_chips(devices),
            total_s=meta.get("train_s", 0.0),
            past=past.after_compiling(time.perf_counter() - since),
        )
        self._good_s = self._throughput.steps_s()

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Write the seconds since the last row, unless this process alone has failed."""
        self._results.__exit__()
        if kind is None or issubclass(kind, RaisedByAll):
            of_steps = {"time/seconds": self._saved_s} if self.saved == self._last_step else {}
            self._writer.write(self._last_step, of_steps | self._throughput.read_pauses())

    def waits(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and note how long the devices wait for each."""
        return self._throughput.waits(batches, self._results)

    def add(self, step: int, step_metrics: dict[str, jax.Array]) -> None:
        """Add the metrics of a dispatched step; wait while too many steps are in flight."""
        self._last_step = step
        self._results.add(step_metrics)
        self._pending.append((step, step_metrics))
        if len(self._pending) > _STEPS_IN_FLIGHT:
            jax.block_until_ready(self._pending[-1 - _STEPS_IN_FLIGHT][1])
        ended = step - self._start - _STEPS_IN_FLIGHT
        if ended == 1:
            self._since = self._throughput.clock()
        elif ended == 1 + _STEPS_TIMED:
            self._estimate(step)

    def _estimate(self, step: int) -> None:
        """Log how long the run will take, unless that is about a minute or less."""
        step_s = (self._throughput.clock() - self._since) / _STEPS_TIMED
        flops, ended = self._run.flops, step - _STEPS_IN_FLIGHT
        timed = (flops(ended) - flops(ended - _STEPS_TIMED)) / _STEPS_TIMED
        left = flops(self._run.experiment.total_steps) - flops(step)
        minutes = step_s * left / timed / 60
        if minutes >= 1.5:
            said = f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:.1f} hours"
            logger.info("about %s left: %.3g s a step, with evaluations and saves as far as "
                        "measured", said, step_s)  # fmt: skip

    def check(self, step: int) -> bool:
        """Wait for all steps so far; False: `spikes` has found one, and has their last good state.

        Raises:
          NonFiniteError, CorruptDataError: they failed.
          LostLockError: the last heartbeat has found another job in the workdir.
        """
        numbers, values = zip(*self._pending, strict=True) if self._pending else ((), ())
        steps = list(zip(numbers, jax.device_get(values), strict=True))
        self._pending.clear()
        self._lock.check(fresh=False)
        if (spiked := self._spikes.find(steps)) is not None:
            self._writer.write(spiked, self._spikes.row(spiked))
            self._throughput.lose(self._good_s)
            return False
        corrupt = [metrics.pop("masked") for _, metrics in steps]
        check_finite(steps, self.saved)
        last = self._finish(steps[-1][1]) if steps else {}
        self._last = {name: float(value) for name, value in last.items()}
        self._corrupt.count(corrupt, step, self.saved)
        self._good_s = self._throughput.steps_s()
        return True

    def log(self, step: int, state: TrainState) -> None:
        """Write the training row of `step`, which must have been checked, and led to `state`."""
        last = self._last | {"corrupt": self._corrupt.total}
        row = {f"train/{name}": value for name, value in last.items()}
        of_parts: Any = state.opt_state
        row["train/lr"] = float(self._schedule(step - 1)) * float(of_parts.get(LOWERED, 1.0))
        row |= self._throughput.read(step)
        self._writer.write(step, row)
        self._progress.update(step, row)
        self._note(step, row)

    def evaluate(self, state: TrainState, names: Sequence[str]) -> dict[str, float]:
        """Run the evaluators `names` on `state`, write their rows, and return all values."""
        if not names:
            return {}
        with self._throughput.pause("evaluation"):
            found = evaluate_all(self._run, state, names, self._writer)
        self._note(int(state.step), found)
        return found

    def evaluate_start(self, state: TrainState) -> None:
        """Run the evaluators that measure the weights before the first step, which decide nothing.

        The averages equal these weights still, and are left out.
        """
        evals = self._run.settings.evals
        state = state.replace(ema={}, ema_model_state={})
        self.evaluate(state, [name for name, entry in evals.items() if entry.measures_start])
        self.tell(state)

    def tell(self, state: TrainState) -> None:
        """Call the user's functions with what was written since the last call, if there is any."""
        metrics, self._untold = self._untold, {}
        if metrics and self._run.callbacks:
            with self._throughput.pause("callbacks"):
                tell(self._run, state, metrics)

    def _note(self, step: int, row: Mapping[str, float]) -> None:
        self._logged = step
        self._untold |= row
        for watch in self._health, self._stalls, self._jumps:
            for warning in watch.add(row):
                logger.warning("step %d: %s", step, warning)

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[dict[str, Any]]:
        """Wrap the saving of `step`: flush the rows, yield the facts to save with the state.

        Raises LostLockError if another job trains in the workdir now.
        """
        self._lock.check(fresh=True)
        self._saved_s = self._throughput.seconds()
        facts = {"corrupt": self._corrupt.total, "train_s": self._saved_s, "logged": self._logged}
        with watchdog.phase("save"), self._throughput.pause("save"):
            self._writer.flush()
            own = {"data_fingerprint": self._run.fingerprint, "chip_hours": self._chip_hours()}
            yield facts | self._health.read() | self._spikes.read() | own


def check_rows(run: Run, rows: Iterable[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    """Warn, on process 0, if metrics.jsonl ends before the last row that `meta` tells of.

    And if there are rows, but no checkpoint. `rows`: of the file. That row was on disk before the
    state of `meta`, {} of a run that starts from scratch, was saved.
    """
    last = max((row["step"] for row in rows), default=0)
    if jax.process_index() == 0 and last and not meta:
        remedy = "to go on instead, stop it and restore both from a copy"
        if (run.workdir / "diverged.json").exists():
            remedy = "it diverged then, as diverged.json says, and will again with equal settings"
        logger.warning(
            "%s: has rows up to step %d, but %s has no checkpoint: the run starts from scratch, "
            "and %s keeps these rows; %s",
            run.workdir / ROWS, last, run.workdir / "checkpoints", BEFORE, remedy,
        )  # fmt: skip
        (run.workdir / ROWS).copy(run.workdir / BEFORE, overwrite=True)
    if jax.process_index() == 0:
        warn_of_lost_rows(run.workdir, last, meta)


def open_writer(run: Run, restored_step: int | None, lock: Lock | NoLock) -> MetricWriter:
    """The writer of the run's rows; rows after the restored step are dropped.

    It adds nothing to metrics.jsonl once `lock` is lost.
    """
    lock.check(fresh=True)  # opening the files replaces them
    return MetricWriter(
        run.workdir,
        restored_step=restored_step,
        wandb_project=run.settings.log.wandb,
        config=run.settings.to_config().to_dict(),
        may_write=lock.is_ours,
        writes=jax.process_index() == 0,
    )


def evaluate_all(
    run: Run, state: TrainState, names: Sequence[str], writer: MetricWriter
) -> dict[str, float]:
    """Run the evaluators `names` on `state`, writing each row as soon as it is computed.

    Must be called by all processes together; returns the values of all rows.
    """
    step = int(state.step)
    found: dict[str, float] = {}
    for name in names:
        with watchdog.phase("evaluation"):
            row = evaluate(name, run.evaluators[name], state)
            writer.write(step, row)
            logger.info("step %d: %s", step, readable(row))
        found |= row
    return found


def evaluate_missed(run: Run, state: TrainState, due: Sequence[str], lock: Lock | NoLock) -> None:
    """Run those evaluators of `due` that have no row at the restored step.

    A run that is told to stop saves before it evaluates, and may be killed in between. Process 0
    decides for all, since a shared disk may show the others an older metrics.jsonl.
    """
    step = int(state.step)

    def find() -> list[str]:
        evaluated = {name.partition("/")[0] for name in values_at(step, run.workdir)}
        return [name for name in due if name not in evaluated]

    timeout_s = run.settings.job.compile_deadline_s
    if missed := processes.say_to_all("the missed evaluators", find, timeout_s):
        logger.info("step %d: row missing; evaluating %s", step, ", ".join(missed))
        with open_writer(run, step, lock) as writer:
            tell(run, state, evaluate_all(run, state, missed, writer))


def tell(run: Run, state: TrainState, metrics: Mapping[str, float]) -> None:
    """Call the user's functions with `metrics` and the state that evaluators see."""
    for callback in run.callbacks:
        with watchdog.phase("evaluation"):
            callback(int(state.step), state.averaged() if state.ema else state, metrics)
