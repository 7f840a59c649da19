"""A training run, from a checked config to its summary.

config -> mesh -> data -> experiment (model, objective, optimizer, step) -> state -> loop.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import data, metrics, tree
from vit_jax.checkpoints import checkpoint
from vit_jax.checkpoints.replicas import DivergedError, check_replicas
from vit_jax.devices import flops, sharding
from vit_jax.devices.mesh import batch_sharding
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.experiment.state import TrainState, start_from
from vit_jax.job import watchdog
from vit_jax.job.processes import PreemptionGuard
from vit_jax.training.agreement import (
    compare_findings,
    compare_programs,
    compare_starts,
    compare_weights,
    compare_workdirs,
)
from vit_jax.training.description import describe
from vit_jax.training.guards import CorruptDataError, NonFiniteError
from vit_jax.training.prepare import Run, prepare
from vit_jax.training.record import evaluate_missed, open_record
from vit_jax.training.summary import read_summary, write_diverged, write_summary
from vit_jax.training.workdir import write_workdir

logger = logging.getLogger("vit_jax")


class Preempted(Exception):
    """The run was asked to stop, and has saved; the same command goes on from there."""


# By every process at the same step, as they come from what all have in common.
_RAISED_BY_ALL = (
    Preempted,
    NonFiniteError,
    CorruptDataError,
    DivergedError,
    NothingToMeasureError,
)


def train_and_evaluate(config: ConfigDict, workdir: epath.PathLike) -> dict[str, Any]:
    """Trains as `config` says in `workdir`, from where an earlier run of it stopped.

    Returns:
      The summary, as in `workdir/summary.json`; {} on processes other than 0.

    Raises:
      InputError: what the user gave is wrong; the workdir is untouched then.
      Preempted: on SIGTERM, after saving.
      NonFiniteError: naming the step; the last good checkpoint is kept.
      CorruptDataError: likewise; too many records are corrupt.
      DivergedError: likewise; devices do not agree on what they should all have.
      ProcessError: another process of the job is missing.
    """
    run = prepare(config, workdir)
    finished = read_summary(run)
    compare_findings(run.config, run.sources, {"finished before": finished is not None})
    compare_weights(run.config, run.initial_params)
    compare_workdirs(run.config, run.workdir)
    if finished is not None:
        logger.info("finished before, at step %d: nothing to do", finished["step"])
        return finished
    describe(run)
    with jax.set_mesh(run.mesh):
        state, meta = start_state(run)
        assert run.train_source is not None and run.order is not None
        if jax.process_index() == 0:
            write_workdir(run.workdir, run.config, run.train_source)
        compare_starts(run.config, run.order, int(state.step))
        try:
            train(run, state, meta)
        except NonFiniteError as e:
            write_diverged(run, e)
            raise
    return write_summary(run)


def start_state(run: Run) -> tuple[TrainState, dict]:
    """The state to go on from and what was saved with it: resume > init_from > scratch."""
    initial_params = run.initial_params

    def from_init() -> TrainState:
        assert initial_params is not None
        state = run.experiment.init()
        params = tree.flatten_names(state.params)
        for name, array in initial_params.items():
            params[name] = sharding.place(array, params[name].sharding)
        logger.info("start: parameters from init_from=%s", run.config.init_from)
        params = tree.unflatten_names(params)
        if not state.ema:
            return state.replace(params=params)
        # The average lies otherwise over the devices than the parameters.
        return jax.jit(start_from, out_shardings=run.experiment.shardings)(state, params)

    return checkpoint.start(
        directory=run.workdir / "checkpoints",
        abstract_state=run.experiment.abstract_state,
        fingerprint=run.fingerprint_by,
        from_init=from_init if initial_params is not None else None,
        from_scratch=run.experiment.init,
    )


def train(run: Run, state: TrainState, meta: dict[str, Any]) -> None:
    """Evaluates what an earlier try has missed; then step, log, evaluate, flush, save, in a loop.

    Until the step is compiled there is nothing to save, and SIGTERM ends a process alone at once.
    """
    start, total, timetable = int(state.step), run.experiment.total_steps, run.timetable
    due = timetable.evaluators(start)
    if meta and due:
        evaluate_missed(run, state, due)
    if start == total:
        return
    train_step, layer_norms = compile_step(run), compile_layer_norms(run)
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(PreemptionGuard())
        profile = run.config.log.profile
        profiler = stack.enter_context(metrics.Profiler(profile, run.workdir / "profile"))
        checkpoints = stack.enter_context(open_checkpoints(run))
        record = stack.enter_context(open_record(run, start, meta))
        batches = train_batches(run, start)
        stack.callback(close_batches, batches)
        for step, batch in zip(range(start + 1, total + 1), batches, strict=False):
            watchdog.arrive(step)
            profiler.before(step)
            logging_now = timetable.logs(step)
            norms = layer_norms(state, batch) if layer_norms and logging_now else {}
            first = step == start + 1  # it also loads the program and connects the devices
            with watchdog.phase("compile") if first else contextlib.nullcontext():
                state, step_metrics = train_step(state, batch)
                if first:
                    jax.block_until_ready(step_metrics)
            record.add(step, step_metrics | norms)
            profiler.after(step, step_metrics)
            stopping = guard.should_stop(step) and step < total
            evaluations = timetable.evaluators(step)
            saving = stopping or timetable.saves(step)
            if not (logging_now or evaluations or saving):
                continue
            record.check(step)
            if logging_now:
                record.log(step)
            if not stopping:
                record.evaluate(state, evaluations)
            if saving:
                with record.saving(step) as meta:
                    check_replicas(state, run.mesh)
                    checkpoints.save(step, state, meta)
            if stopping:  # the signal may leave little time: the run saves first
                with watchdog.phase("save"):
                    checkpoints.wait()
                record.evaluate(state, evaluations)
                raise Preempted(f"stopped by SIGTERM at step {step}, which is saved")


@contextlib.contextmanager
def open_checkpoints(run: Run) -> Iterator[checkpoint.Checkpoints]:
    """The run's checkpoints; waits at the end until everything saved is on disk.

    It does not wait if this process of several fails by itself: a commit takes all processes, and
    the others may be gone.
    """
    checkpoints = checkpoint.Checkpoints(
        run.workdir / "checkpoints",
        keep_last=run.config.checkpoint.keep_last,
        keep_every=run.timetable.keep_every,
    )
    alone = False
    try:
        yield checkpoints
    except BaseException as e:
        alone = jax.process_count() > 1 and not isinstance(e, _RAISED_BY_ALL)
        raise
    finally:
        if not alone:
            with watchdog.phase("save"):
                checkpoints.close()


def compile_step(run: Run) -> jax.stages.Compiled:
    """The compiled train step; says how much memory it needs."""
    e, since = run.experiment, time.perf_counter()
    lowered = e.lower()
    compare_programs(run.config, lowered)
    with watchdog.phase("compile"):
        compiled = lowered.compile()
    memory = flops.expected_memory(compiled.memory_analysis())
    logger.info(
        "compiled in %.0f s; expected memory per device: %s, of it %s temporary",
        time.perf_counter() - since,
        flops.format_bytes(memory.total),
        flops.format_bytes(memory.temporaries),
    )
    return compiled


def compile_layer_norms(run: Run) -> jax.stages.Compiled | None:
    """The compiled norms by layer; None where `log.by_layer` is off."""
    if not run.config.log.by_layer:
        return None
    e = run.experiment
    with watchdog.phase("compile"):
        return e.layer_norms.lower(e.abstract_state, e.abstract_batch).compile()


def train_batches(run: Run, start: int) -> Generator[tree.Batch, None, None]:
    """The batches of the steps after `start`."""
    assert run.train_source is not None
    return data.train_batches(
        run.train_source,
        run.preprocessing.host_ops,
        global_batch_size=run.config.global_batch_size,
        seed=run.config.seed,
        image_size=run.preprocessing.image_size,
        sharding=batch_sharding(run.mesh),
        start_step=start,
        num_steps=run.experiment.total_steps - start,
        data_order=run.order,
    )


def close_batches(batches: Generator[tree.Batch, None, None]) -> None:
    """Ends the threads that read ahead, however long that takes."""
    with watchdog.phase("leave"):
        batches.close()
