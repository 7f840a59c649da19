"""A training run, from a checked config to its summary.

config -> mesh -> data -> experiment (model, objective, optimizer, step) -> state -> loop.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import data, files, metrics, tree
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.checkpoints.replicas import check_replicas
from vit_jax.devices import flops, sharding
from vit_jax.devices.mesh import batch_sharding
from vit_jax.errors import RaisedByAll
from vit_jax.experiment.state import TrainState, start_from
from vit_jax.job import watchdog
from vit_jax.job.lock import Lock
from vit_jax.job.processes import PreemptionGuard
from vit_jax.training.agreement import (
    compare_findings,
    compare_programs,
    compare_starts,
    compare_weights,
    compare_workdirs,
)
from vit_jax.training.description import describe
from vit_jax.training.guards import NonFiniteError
from vit_jax.training.kernel_check import check_kernels
from vit_jax.training.layout import ChooseLayout
from vit_jax.training.prepare import Run, prepare
from vit_jax.training.record import Record, evaluate_missed, open_record
from vit_jax.training.selection import Selection, share_selection
from vit_jax.training.starts import record_start
from vit_jax.training.summary import (
    Clock,
    read_summary,
    remove_summary,
    write_diverged,
    write_summary,
)
from vit_jax.training.teachers import place_teachers, write_teachers
from vit_jax.training.workdir import lock_workdir, wait_until_free, write_workdir

logger = logging.getLogger("vit_jax")


class Preempted(RaisedByAll):
    """The run was asked to stop and has saved; the same command continues it."""


class Interrupted(Preempted):
    """A process got Ctrl-C, and the run has saved; nothing should restart it automatically."""


def train_and_evaluate(
    config: ConfigDict,
    workdir: epath.PathLike,
    asked: Mapping[str, Any] | None = None,
    choose_layout: ChooseLayout | None = None,
) -> dict[str, Any]:
    """Train as `config` describes, continuing the run in `workdir` if there is one.

    Args:
      config: has passed `validation.validate`.
      workdir: folder for everything that the run writes.
      asked: what made the config, {"config": NAME[:words], "overrides": {key: text}}, for the
        record of starts.
      choose_layout: chooses the layout under `auto`; see `prepare`.

    Returns:
      The summary, as in `workdir/summary.json`; {} on processes other than 0.

    Raises:
      InputError: the user's input is wrong; nothing has been written.
      Preempted: on SIGTERM, after saving; an Interrupted on Ctrl-C.
      LostLockError: another process has begun to train in `workdir`.
      NonFiniteError: names the step; the last good checkpoint is kept.
      CorruptDataError: too many records are corrupt; the last good checkpoint is kept.
      DivergedError: devices hold different copies of one value; the last good checkpoint is kept.
      ProcessError: another process of the job is missing.
    """
    timeout_s = config.job.compile_deadline_s
    begun = wait_until_free(files.absolute(workdir), timeout_s)
    run = prepare(config, workdir, choose_layout)
    finished = read_summary(run)
    _compare(run, {"already finished": finished is not None})
    if finished is not None and is_intact(run, finished["step"]):
        how = (
            "stopped early at step %d; to go on, raise stop.patience"
            if finished.get("stopped_early")
            else "already finished at step %d; nothing to do"
        )
        logger.info(how, finished["step"])
        return finished
    describe(run)
    with watchdog.phase("compile"):
        check_kernels(run.experiment.model, run.mesh)
    with lock_workdir(run.workdir, begun, timeout_s) as lock:
        with jax.set_mesh(run.mesh):
            state, meta = start_state(run)
            assert run.train_source is not None and run.order is not None
            if jax.process_index() == 0:
                if lock is not None:
                    lock.check(fresh=True)
                write_workdir(run.workdir, run.config, run.train_source, run.pictures)
                write_teachers(run.workdir, run.described_teachers)
                remove_summary(run)
                devices = run.mesh.devices.flatten().tolist()
                record_start(run.workdir, devices, int(state.step) if meta else None, asked or {})
            compare_starts(run.config, run.order, int(state.step))
            try:
                train(run, state, meta, lock)
            except NonFiniteError as e:
                write_diverged(run, e)
                raise
        if lock is not None:
            lock.check(fresh=True)
        return write_summary(run)


def _compare(run: Run, facts: Mapping[str, Any]) -> None:
    """Check that all processes have prepared the same run and agree on `facts`."""
    facts = {**facts, "teachers": run.described_teachers}
    compare_findings(run.config, run.sources, facts)
    compare_weights(run.config, run.initial_params, run.initial_model_state)
    compare_workdirs(run.config, run.workdir)


def is_intact(run: Run, step: int) -> bool:
    """Whether the newest checkpoint of a finished run is its last `step` and verifies.

    If all checkpoints were removed, there is nothing to mend. All processes call it.

    Raises:
      InputError: there are checkpoints, and none verifies.
    """
    with jax.set_mesh(run.mesh):
        found = restore.restore_newest(run.workdir / "checkpoints", run.experiment.abstract_state)
    return found is None or found[1]["step"] == step


def start_state(run: Run) -> tuple[TrainState, dict]:
    """The state to continue from and its metadata: resume, else `init_from`, else from scratch."""
    initial_params = run.initial_params

    def from_init() -> TrainState:
        assert initial_params is not None
        state = run.experiment.init()
        params = _replace_leaves(state.params, initial_params)
        model_state = _replace_leaves(state.model_state, run.initial_model_state)
        logger.info("start: parameters from init_from=%s", run.config.init_from)
        if not state.ema:
            return state.replace(params=params, model_state=model_state)
        # The average is sharded differently from the parameters.
        start = jax.jit(start_from, out_shardings=run.experiment.shardings)
        return start(state, params, model_state)

    return checkpoint.start(
        directory=run.workdir / "checkpoints",
        abstract_state=run.experiment.abstract_state,
        fingerprint=run.fingerprint,
        from_init=from_init if initial_params is not None else None,
        from_scratch=run.experiment.init,
    )


def _replace_leaves(old: tree.PyTree, arrays: Mapping[str, np.ndarray]) -> tree.PyTree:
    """`old`, nested dicts of arrays, with some replaced by `arrays`, sharded as before."""
    leaves = tree.flatten_names(old)
    for name, array in arrays.items():
        leaves[name] = sharding.place(array, leaves[name].sharding)
    return tree.unflatten_names(leaves)


def train(run: Run, state: TrainState, meta: dict[str, Any], lock: Lock | None = None) -> None:
    """Run missed evaluations, then the loop: step, log, evaluate, flush, save.

    Until the step is compiled there is nothing to save, and SIGTERM ends a single process at once.
    The record checks `lock` before each row of metrics and each save.
    """
    clock = Clock(meta, run.mesh.devices.flatten().tolist())
    start, total, timetable = int(state.step), run.experiment.total_steps, run.timetable
    selection = catch_up(run, state, lock, is_new=not meta)
    if start == total or selection.stops:
        return
    train_step, layer_norms = compile_step(run), compile_layer_norms(run)
    frozen = place_teachers(run.teachers, run.experiment.abstract_frozen)
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(PreemptionGuard())
        record = stack.enter_context(open_record(run, start, meta, clock, lock))
        profile = run.config.log.profile
        profiler = stack.enter_context(metrics.Profiler(profile, run.workdir / "profile"))
        checkpoints = stack.enter_context(open_checkpoints(run, selection, lock))
        record.begin()
        batches = train_batches(run, start)
        stack.callback(close_batches, batches)
        for step, batch in zip(range(start + 1, total + 1), batches, strict=False):
            watchdog.arrive(step)
            profiler.before(step)
            logging_now = timetable.logs(step)
            norms = layer_norms(state, batch, *frozen) if layer_norms and logging_now else {}
            first = step == start + 1  # also loads the program and connects the devices
            with watchdog.phase("compile") if first else contextlib.nullcontext():
                state, step_metrics = train_step(state, batch, *frozen)
                if first:
                    jax.block_until_ready(step_metrics)
            record.add(step, step_metrics | norms)
            profiler.after(step, step_metrics)
            stopping = guard.should_stop(step) and step < total
            by_ctrl_c = guard.interrupted  # agreed on by all processes in should_stop, not later
            evaluations = timetable.evaluators(step)
            saving = stopping or timetable.saves(step)
            if not (logging_now or evaluations or saving):
                continue
            record.check(step)
            if logging_now:
                record.log(step)
            if not stopping:
                evaluate_and_select(run, record, state, step, evaluations, selection)
                saving = saving or selection.stops or selection.best_step == step
            if saving:
                with record.saving(step) as meta:
                    check_replicas(state, run.mesh)
                    checkpoints.save(step, state, meta)
            if stopping:  # the process may be killed soon, so save before evaluating
                with watchdog.phase("save"):
                    checkpoints.wait()
                record.evaluate(state, evaluations)
                kind, by = (Interrupted, "Ctrl-C") if by_ctrl_c else (Preempted, "SIGTERM")
                raise kind(
                    f"stopped by {by} at step {step}; saved. Run the same command to continue"
                )
            if selection.stops:
                return


def catch_up(run: Run, state: TrainState, lock: Lock | None, *, is_new: bool) -> Selection:
    """Run evaluations missed at the restored step; return the decisions so far."""
    step = int(state.step)
    due = [] if is_new else run.timetable.evaluators(step)
    if due:
        evaluate_missed(run, state, due, lock)
    selection = share_selection(run, 0 if is_new else step)
    if selection.stops:
        evaluate_missed(run, state, list(run.config.evals), lock)
        logger.info("stopped early: %s", selection.describe_end())
    return selection


def evaluate_and_select(
    run: Run,
    record: Record,
    state: TrainState,
    step: int,
    names: Sequence[str],
    selection: Selection,
) -> None:
    """Run the evaluators `names`, and all others if the run then stops early."""
    selection.add(step, record.evaluate(state, names))
    if selection.stops:
        rest = [name for name in run.config.evals if name not in names]
        selection.add(step, record.evaluate(state, rest))
        logger.info("stopped early: %s", selection.describe_end())


@contextlib.contextmanager
def open_checkpoints(
    run: Run, selection: Selection, lock: Lock | None
) -> Iterator[checkpoint.Checkpoints]:
    """Open the run's checkpoints; on exit, wait until everything saved is on disk.

    `selection` gives the best step so far.

    Does not wait if only this process of several has failed: a commit needs all processes, and the
    others may be gone. Files may then still be written, here and by the others, so `lock` is kept
    until this process ends.
    """
    checkpoints = checkpoint.Checkpoints(
        run.workdir / "checkpoints",
        keep_last=run.config.checkpoint.keep_last,
        keep_every=run.timetable.keep_every,
        best_step=lambda: selection.best_step,
    )
    alone = False
    try:
        yield checkpoints
    except BaseException as e:
        alone = jax.process_count() > 1 and not isinstance(e, RaisedByAll)
        if alone and lock is not None:
            lock.keep()
        raise
    finally:
        if not alone:
            with watchdog.phase("save"):
                checkpoints.close()


def compile_step(run: Run) -> jax.stages.Compiled:
    """The compiled train step; logs the memory that it needs."""
    e, since = run.experiment, time.perf_counter()
    lowered = e.lower()
    compare_programs(run.config, lowered)
    with watchdog.phase("compile"):
        compiled = lowered.compile()
    memory = flops.expected_memory(compiled.memory_analysis())
    logger.info(
        "compiled in %.0f s; expected memory per device: %s, including %s of temporaries",
        time.perf_counter() - since,
        flops.format_bytes(memory.total),
        flops.format_bytes(memory.temporaries),
    )
    return compiled


def compile_layer_norms(run: Run) -> jax.stages.Compiled | None:
    """The compiled norms by layer; None if `log.by_layer` is off."""
    if not run.config.log.by_layer:
        return None
    e = run.experiment
    with watchdog.phase("compile"):
        return e.layer_norms.lower(*e.arguments).compile()


def train_batches(run: Run, start: int) -> Generator[tree.Batch, None, None]:
    """Batches for the steps after `start`."""
    assert run.train_source is not None
    return data.train_batches(
        run.train_source,
        run.experiment.batch,
        steps=range(start, run.experiment.total_steps),
        seed=run.config.seed,
        sharding=batch_sharding(run.mesh),
        data_order=run.order,
    )


def close_batches(batches: Generator[tree.Batch, None, None]) -> None:
    """Stop the threads that read ahead, however long that takes."""
    with watchdog.phase("leave"):
        batches.close()
