"""The loop of a run: a step, its record, and what is due after it."""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import psutil

from vit_jax.base import tree
from vit_jax.base.errors import RaisedByAll
from vit_jax.checkpoints import checkpoint
from vit_jax.checkpoints.history import read_history
from vit_jax.checkpoints.memory import Memory
from vit_jax.checkpoints.replicas import check_replicas
from vit_jax.devices import flops, sharding
from vit_jax.devices.chips import memory_limit
from vit_jax.devices.kept import Leaf, all_bytes, peak_bytes
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.job.lock import Lock, NoLock
from vit_jax.job.processes import PreemptionGuard
from vit_jax.run.build import Run, RunStep
from vit_jax.run.record import Record, check_rows, evaluate_missed, open_writer
from vit_jax.run.selection import Selection, share_selection
from vit_jax.run.setup.agreement import compare
from vit_jax.run.teachers import place_teachers
from vit_jax.run.terminal import Progress
from vit_jax.run.watch.blame import explain
from vit_jax.run.watch.guards import NonFiniteError
from vit_jax.run.watch.host_memory import open_memory
from vit_jax.run.watch.ledger import Past, read_past
from vit_jax.run.watch.speed import Profiler
from vit_jax.run.watch.spikes import Spikes
from vit_jax.run.watch.watchers import watched_step

logger = logging.getLogger("vit_jax")


class Preempted(RaisedByAll):
    """The run was asked to stop and has saved; the same command continues it."""


class Interrupted(Preempted):
    """A process got Ctrl-C, and the run has saved; nothing should restart it automatically."""


def loop(
    run: Run, state: TrainState, meta: dict[str, Any], lock: Lock | NoLock, began: float
) -> None:
    """Train from `state`, saved with `meta`, to the end of `run`.

    The record checks `lock` before each row of metrics and each save. `began`: as in
    `train_and_evaluate`.

    Raises:
      Preempted: on SIGTERM, after saving; an Interrupted on Ctrl-C.
    """
    since, start = time.perf_counter(), int(state.step)
    # `catch_up` drops the rows after `start`.
    check_rows(run, read_history(run.workdir), meta)
    restored_step = start if meta else None
    past = read_past(
        run.workdir, read_history(run.workdir), restored_step, since - began, run.choose_s,
        train_s=meta.get("train_s", 0.0),
    )  # fmt: skip
    selection = catch_up(run, state, meta, lock)
    if start == run.experiment.total_steps or selection.stops:
        return
    with open_loop(run, since, start, meta, past, lock, selection) as r:
        if not meta:
            r.record.evaluate_start(state)
        for step, batch in r.batches():
            state, step_metrics = r.step(step, state, batch)
            watchdog.send()
            r.record.add(step, step_metrics)
            if due := r.due(step):
                state = r.handle(due, state)


class Batches(Iterator[tuple[int, tree.Batch]], contextlib.AbstractContextManager):
    """(step, its batch) for the steps after `start`.

    On exit, stops the threads that read ahead, however long that takes.
    """

    def __init__(self, run: Run, start: int):
        self._run = run
        self._read_from(start)

    def _read_from(self, start: int) -> None:
        self._steps = itertools.count(start + 1)
        self._batches = self._run.batches(range(start, self._run.experiment.total_steps))

    def __next__(self) -> tuple[int, tree.Batch]:
        batch = next(self._batches)
        return next(self._steps), batch

    def rewind(self, step: int) -> None:
        """Go on with the batch after `step`."""
        self.__exit__()
        self._read_from(step)

    def __exit__(self, *_: object) -> None:
        with watchdog.phase("leave"):
            self._batches.close()


class Due(NamedTuple):
    """The work that is due after a step.

    logs, saves: whether a row of metrics is written, and whether the state is saved.
    evaluators: names of those that run.
    signal: that has asked the run to stop; None: none has.
    keeps: whether the state is kept in the hosts' memory.
    """

    step: int
    logs: bool
    evaluators: list[str]
    saves: bool
    signal: str | None
    keeps: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """The open parts of a loop, and a handler for each thing that is due.

    step: (number, state, batch) -> (new state, metrics), watched; see `watched_step`.
    """

    run: Run
    selection: Selection
    step: RunStep
    guard: PreemptionGuard
    record: Record
    spikes: Spikes
    checkpoints: checkpoint.Checkpoints
    read_ahead: Batches
    memory: Memory | None

    def batches(self) -> Iterator[tuple[int, tree.Batch]]:
        """(step, its batch), up to the last step or the early end."""
        for step, batch in self.record.waits(self.read_ahead):
            watchdog.arrive(step)
            yield step, batch
            if self.selection.stops:
                return

    def due(self, step: int) -> Due | None:
        """The work that is due after `step`; None: nothing. All processes call it at every step."""
        signal = None
        if self.guard.should_stop(step) and step < self.run.experiment.total_steps:
            # Agreed on by all processes in should_stop, not later.
            signal = "Ctrl-C" if self.guard.interrupted else "SIGTERM"
        timetable = self.run.timetable
        evaluators, saves = timetable.evaluators(step), timetable.saves(step) or signal is not None
        due = Due(step, timetable.logs(step), evaluators, saves, signal, timetable.keeps(step))
        return due if due.logs or due.evaluators or due.saves or due.keeps else None

    def handle(self, due: Due, state: TrainState) -> TrainState:
        """Log, evaluate, save and stop, as far as it is `due`; return the state to go on from.

        After a signal the process may be killed soon, so the state is saved before evaluations.
        """
        try:
            is_good = self.record.check(due.step)
        except NonFiniteError as e:
            raise explain(self.run, e, state, self.spikes.frozen, self.checkpoints.wait) from None
        if not is_good:
            step, state = self.spikes.restore()
            self.read_ahead.rewind(step)
            return state
        if due.logs:
            self.record.log(due.step, state)
        if due.signal is None:
            self.evaluate(due, state)
            self.record.tell(state)
        if due.saves or self.selection.stops or self.selection.best_step == due.step:
            self.save(due, state)
        elif due.keeps:  # so a last step is never resumed without its checkpoint
            self.keep(due, state)
        if due.signal is not None:
            self.stop(due, state)
        self.spikes.keep(due.step, state)
        return state

    def evaluate(self, due: Due, state: TrainState) -> None:
        """Run the evaluators that are due, and all others if the run then ends early."""
        self.selection.add(due.step, self.record.evaluate(state, due.evaluators))
        if self.selection.stops:
            rest = [name for name in self.run.settings.evals if name not in due.evaluators]
            self.selection.add(due.step, self.record.evaluate(state, rest))
            logger.info("stopped early: %s", self.selection.describe_end())

    @contextlib.contextmanager
    def saving(self, due: Due, state: TrainState) -> Iterator[dict[str, Any]]:
        """Check what is saved, and yield the facts to save with it, in whatever place."""
        with self.record.saving(due.step) as facts:
            check_replicas(state, self.run.mesh)
            yield facts | self.selection.read()

    def save(self, due: Due, state: TrainState) -> None:
        with self.saving(due, state) as meta:
            self.checkpoints.save(due.step, state, meta)
        self.record.saved = due.step

    def keep(self, due: Due, state: TrainState) -> None:
        assert self.memory is not None  # as `keeps` says
        with self.saving(due, state) as meta:
            self.memory.save(due.step, state, meta | {"saved": self.record.saved})

    def stop(self, due: Due, state: TrainState) -> None:
        """Wait for the save, evaluate, and raise Preempted."""
        with watchdog.phase("save"):
            self.checkpoints.wait()
        self.record.evaluate(state, due.evaluators)
        self.record.tell(state)
        kind = Interrupted if due.signal == "Ctrl-C" else Preempted
        raise kind(
            f"stopped by {due.signal} at step {due.step}; saved. Run the same command to continue"
        )


@contextlib.contextmanager
def open_loop(
    run: Run,
    since: float,
    start: int,
    meta: dict[str, Any],
    past: Past,
    lock: Lock | NoLock,
    selection: Selection,
) -> Iterator[Loop]:
    """Compile the step, then open what writes, reads ahead and listens to signals.

    Until the step is compiled there is nothing to save, and SIGTERM ends a single process at once.
    """
    total_steps, log = run.experiment.total_steps, run.settings.log
    frozen = place_teachers(run.teachers, run.experiment.abstract_frozen)
    spikes = Spikes(run, frozen, meta)
    step = watched_step(run, run.by_stage(compile_step, start), frozen, start + 1)
    with (
        PreemptionGuard() as guard,
        open_writer(run, start if meta else None, lock) as writer,
        Progress(total_steps, start, flops=run.flops, metrics=log.metrics or ()) as progress,
        Profiler(log.profile, run.workdir / "profile") as profiler,
        open_memory(run) as memory,
        Record(run, start, meta, since, writer, progress, lock, past, spikes) as record,
        open_checkpoints(run, selection, lock) as checkpoints,
        Batches(run, start) as batches,
    ):
        step = spikes.watch(profiler.watch(step))
        yield Loop(run, selection, step, guard, record, spikes, checkpoints, batches, memory)


def compile_step(run: Run) -> jax.stages.Compiled:
    """The compiled train step; logs the memory that it needs."""
    since, traced = time.perf_counter(), run.experiment.trace()
    counted = count_memory(run, traced)
    warn_of_memory(run, counted, sharding.bytes_per_device(run.experiment.abstract_state))
    lowered = traced.lower()

    def digest() -> dict[str, str]:
        return {"lowered step": hashlib.sha256(lowered.as_text().encode()).hexdigest()}

    compare(run.settings.job, "lowered program", digest)
    with watchdog.phase("compile"):
        compiled = lowered.compile()
    memory = flops.expected_memory(compiled.memory_analysis())
    logger.info(
        "compiled in %.0f s; expected memory per device: %s, including %s of temporaries",
        time.perf_counter() - since,
        flops.format_bytes(memory.total),
        flops.format_bytes(memory.temporaries),
    )
    warn_of_memory(run, memory.total, counted)
    return compiled


def count_memory(run: Run, traced: jax.stages.Traced) -> int:
    """The least bytes of a device in a step, counted before it is compiled: see `peak_bytes`.

    As if the mesh split all values between its devices. Counting takes seconds: only the arguments
    count where all values fit at once.
    """
    jaxpr, there = traced.jaxpr.jaxpr, _memory_there(run)
    arguments = sharding.bytes_per_device(run.experiment.arguments)
    most = arguments + all_bytes(jaxpr) // run.mesh.size
    if there.size is None or most * there.sharing <= there.size:
        return arguments
    platform = run.mesh.devices.flat[0].platform
    peak = peak_bytes(jaxpr, [Leaf()] * len(jaxpr.invars), platform=platform)
    return arguments + peak // run.mesh.size


class _MemoryThere(NamedTuple):
    """A memory that devices of the mesh use.

    size: in bytes; None: unknown.
    where: its owner, in messages.
    sharing: number of devices that share it.
    """

    size: int | None
    where: str
    sharing: int


def _memory_there(run: Run) -> _MemoryThere:
    """The memory of this process's first device."""
    devices = run.mesh.local_devices
    if devices[0].platform == "cpu":
        return _MemoryThere(psutil.virtual_memory().total, "this host", len(devices))
    return _MemoryThere(memory_limit(devices[0]), "a device", 1)


def warn_of_memory(run: Run, expected: int, before: int = 0) -> None:
    """Warn if each device has less than the `expected` bytes of the step; names what saves some.

    `before`: what was expected earlier; if that was too much, it has been warned of.
    """
    there, where, sharing = _memory_there(run)
    if there is None or not before * sharing <= there < expected * sharing:
        return
    remedies = ["a smaller --config.global_batch_size"]
    if not run.experiment.objective.couples_rows:
        remedies.append("a larger --config.optimizer.accum_steps")
    if getattr(run.experiment.model, "remat", "full") == "none":
        remedies.append("--config.model.remat=full")
    if run.mesh.size > run.mesh.shape["fsdp"]:
        remedies.append("a larger --config.mesh.fsdp")
    logger.warning("the step is expected to take at least %s of memory on %s, which has %s; set %s",
                   flops.format_bytes(expected * sharing), where, flops.format_bytes(there),
                   ", or ".join(remedies))  # fmt: skip


def catch_up(run: Run, state: TrainState, meta: dict[str, Any], lock: Lock | NoLock) -> Selection:
    """Run evaluations missed at the restored step; return the decisions so far."""
    step = int(state.step)
    if meta:
        evaluate_missed(run, state, run.timetable.evaluators(step), lock)
    selection = share_selection(run, step if meta else 0, meta)
    if selection.stops:
        evaluate_missed(run, state, list(run.settings.evals), lock)
        logger.info("stopped early: %s", selection.describe_end())
    return selection


@contextlib.contextmanager
def open_checkpoints(
    run: Run, selection: Selection, lock: Lock | NoLock
) -> Iterator[checkpoint.Checkpoints]:
    """Open the run's checkpoints; on exit, wait until everything saved is on disk.

    `selection` gives the best step so far.

    Does not wait if only this process of several has failed: a commit needs all processes, and the
    others may be gone. Files may then still be written, here and by the others, so `lock` is kept
    until this process ends.
    """
    checkpoints = checkpoint.Checkpoints(
        run.workdir / "checkpoints",
        keep_last=run.settings.checkpoint.keep_last,
        keep_every=run.timetable.keep_every,
        best_step=lambda: selection.best_step,
    )
    alone = False
    try:
        yield checkpoints
    except BaseException as e:
        alone = jax.process_count() > 1 and not isinstance(e, RaisedByAll)
        if alone:
            lock.keep()
        raise
    finally:
        if not alone:
            with watchdog.phase("save"):
                checkpoints.close()
