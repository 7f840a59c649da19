"""A training run, from a checked config to its summary.

config -> mesh -> data -> experiment (model, objective, optimizer, step) -> state -> loop.
"""

import collections
import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import data, metrics, tree
from vit_jax.checkpoints import checkpoint
from vit_jax.checkpoints.replicas import DivergedError, check_replicas
from vit_jax.config import stored as stored_config
from vit_jax.config.plugins import store_plugins
from vit_jax.data.order import local_rows
from vit_jax.data.sources import FINGERPRINT_VERSION
from vit_jax.devices import flops, sharding
from vit_jax.devices.chips import count_chips
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.errors import InputError
from vit_jax.evaluators import evaluate
from vit_jax.evaluators.features import NothingToMeasureError
from vit_jax.experiment.state import start_from
from vit_jax.files import write_whole
from vit_jax.job import watchdog
from vit_jax.job.processes import PreemptionGuard
from vit_jax.training.agreement import (
    compare_findings,
    compare_programs,
    compare_starts,
    compare_weights,
    compare_workdirs,
)
from vit_jax.training.guards import CorruptDataError, CorruptRecords, NonFiniteError, check_finite
from vit_jax.training.prepare import Run, data_fingerprint, prepare, training_order
from vit_jax.training.summary import Clock, read_summary, write_diverged, write_summary
from vit_jax.training.timetable import Timetable

logger = logging.getLogger("vit_jax")

_STEPS_IN_FLIGHT = 2  # dispatched and not finished; each holds its batch on the devices


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
        write_workdir(run)
        compare_starts(run.config, training_order(run.config, run.train_source), int(state.step))
        try:
            train(run, state, meta)
        except NonFiniteError as e:
            write_diverged(run, e)
            raise
    return write_summary(run)


def describe(run: Run) -> None:
    """Says what runs where: devices, batch, data, model."""
    devices = run.mesh.devices.flatten()
    axes = ", ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    logger.info(
        "devices: %d x %s on %d host(s); mesh: %s",
        devices.size, devices[0].device_kind, jax.process_count(), axes,
    )  # fmt: skip
    size = run.config.global_batch_size
    rows = len(local_rows(batch_sharding(run.mesh), size))
    ways = math.prod(run.mesh.shape[axis] for axis in BATCH_AXES)
    logger.info("batch: %d globally, %d per host, %d per device", size, rows, size // ways)
    e, data_config = run.experiment, run.config.data
    own = config_lib.train_split(run.config).data_name
    splits = ", ".join(
        f"{key.split if key.data_name == own else f'{key.data_name} {key.split}'} "
        f"{source.num_examples:,}"
        for key, source in run.sources.items()
    )
    logger.info(
        "data: %s, %d classes, examples: %s; %s steps",
        data_config.name, data_config.num_classes, splits, f"{e.total_steps:,}",
    )  # fmt: skip
    if size > data_config.num_examples:
        logger.warning(
            "global_batch_size=%d is more than the %d examples: a batch repeats them",
            size, data_config.num_examples,
        )  # fmt: skip
    logger.info(
        "model: %s, %s parameters, %.3g GFLOP an image forward and backward; state %s per device",
        run.config.model.name, f"{e.num_params:,}", e.flops_per_image / 1e9,
        flops.format_bytes(sharding.bytes_per_device(e.abstract_state, e.shardings)),
    )  # fmt: skip


def start_state(run: Run) -> tuple[Any, dict]:
    """The state to go on from and what was saved with it: resume > init_from > scratch."""

    def from_init():
        state = run.experiment.init()
        params = tree.flatten_names(state.params)
        for name, array in run.initial_params.items():
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
        fingerprint=functools.partial(data_fingerprint, run),
        from_init=from_init if run.initial_params is not None else None,
        from_scratch=run.experiment.init,
    )


def write_workdir(run: Run) -> None:
    """Makes the workdir, with the resolved config and the names of the classes."""
    if jax.process_index() == 0:
        try:
            run.workdir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"--workdir={run.workdir}: {e.strerror}; choose another") from None
        store_plugins(run.config.plugins, run.workdir)
        write_whole(run.workdir / "config.json", stored_config.to_json(run.config))
        class_names = run.train_source.class_names
        if class_names is not None:
            text = json.dumps(list(class_names), indent=2, ensure_ascii=False) + "\n"
            write_whole(run.workdir / "classes.json", text)


def train(run: Run, state, meta: dict) -> None:
    """Evaluates what an earlier try has missed; then step, log, evaluate, flush, save, in a loop.

    Until the step is compiled there is nothing to save, and SIGTERM ends a process alone at once.
    """
    c, e = run.config, run.experiment
    start, total = int(state.step), e.total_steps
    saved = start if meta else None
    timetable = Timetable(c, total)
    clock = Clock(meta, run.mesh.devices.flatten())
    due = timetable.evaluators(start)
    if meta and due:
        evaluate_missed(run, state, due)
    if start == total:
        return
    corrupt = CorruptRecords(
        meta,
        global_batch_size=c.global_batch_size,
        num_examples=c.data.num_examples,
        max_fraction=c.data.max_corrupt_fraction,
    )
    train_step = compile_step(run)
    layer_norms = None
    if c.log.by_layer:
        with watchdog.phase("compile"):
            layer_norms = e.layer_norms.lower(e.abstract_state, e.abstract_batch).compile()
    pending: collections.deque = collections.deque()

    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(PreemptionGuard())
        writer = stack.enter_context(open_writer(run, saved))
        progress = stack.enter_context(metrics.Progress(total))
        profiler = stack.enter_context(metrics.Profiler(c.log.profile, run.workdir / "profile"))
        checkpoints = checkpoint.Checkpoints(
            run.workdir / "checkpoints",
            keep_last=c.checkpoint.keep_last,
            keep_every=timetable.keep_every,
        )
        stack.enter_context(closing(checkpoints))

        throughput = metrics.Throughput(
            start,
            global_batch_size=c.global_batch_size,
            flops_per_image=e.flops_per_image,
            device_kind=run.mesh.devices.flat[0].device_kind,
            num_chips=count_chips(run.mesh.devices.flat),
        )
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
            step_metrics |= norms
            pending.append((step, step_metrics))
            if len(pending) > _STEPS_IN_FLIGHT:
                jax.block_until_ready(pending[-1 - _STEPS_IN_FLIGHT][1])
            profiler.after(step, step_metrics)
            stopping = guard.should_stop(step) and step < total
            evaluations = timetable.evaluators(step)
            saving = stopping or timetable.saves(step)
            if not (logging_now or evaluations or saving):
                continue

            new = [step_metrics.pop("masked") for _, step_metrics in pending]
            last = check_finite(pending, saved)
            corrupt.count(new)
            corrupt.check(step, saved)
            if logging_now:
                last["corrupt"] = corrupt.total
                row = {f"train/{name}": value for name, value in last.items()}
                row["train/lr"] = float(e.schedule(step - 1))
                row |= throughput.read(step)
                writer.write(step, row)
                progress.update(step, row)
            train_s = throughput.seconds()
            if evaluations and not stopping:
                with throughput.pause("evaluation"):
                    evaluate_all(run, state, evaluations, writer)
            if saving:
                with watchdog.phase("save"), throughput.pause("save"):
                    saved = step
                    writer.flush()
                    fingerprint = {
                        "data_fingerprint": data_fingerprint(run),
                        "fingerprint_version": FINGERPRINT_VERSION,
                    }
                    meta = fingerprint | corrupt.read() | clock.read(train_s)
                    check_replicas(state, run.mesh)
                    checkpoints.save(step, state, meta)
            if stopping:  # what was sent the signal may not have long: first it saves
                with watchdog.phase("save"):
                    checkpoints.wait()
                evaluate_all(run, state, evaluations, writer)
                raise Preempted(f"stopped by SIGTERM at step {step}, which is saved")


def open_writer(run: Run, restored_step: int | None) -> metrics.MetricWriter | metrics.NullWriter:
    """The writer of the run's rows, on process 0; those past the restored step are dropped."""
    if jax.process_index() > 0:
        return metrics.NullWriter()
    c = run.config
    return metrics.MetricWriter(
        run.workdir, restored_step=restored_step, wandb_project=c.log.wandb, config=c.to_dict()
    )


def evaluate_all(run: Run, state, names: Sequence[str], writer) -> None:
    """Runs the evaluators called `names` on `state`; writes the row of each as soon as it is there.

    All processes call it together.
    """
    step = int(state.step)
    for name in names:
        with watchdog.phase("evaluation"):
            row = evaluate(name, run.evaluators[name], state)
            writer.write(step, row)
            logger.info("step %d: %s", step, metrics.readable(row))


def evaluate_missed(run: Run, state, due: Sequence[str]) -> None:
    """Runs those evaluators of `due`, at the restored step, that have no row at it.

    A run that is told to stop saves before it evaluates, and may be killed in between. Process 0
    decides for all: a shared disk may show the others an older metrics.jsonl.
    """
    step = int(state.step)
    rows = metrics.values_at(step, run.workdir) if jax.process_index() == 0 else {}
    evaluated = {name.partition("/")[0] for name in rows}
    is_missed = np.array([name not in evaluated for name in due], np.int32)
    is_missed = multihost_utils.broadcast_one_to_all(is_missed)
    missed = [name for name, miss in zip(due, is_missed, strict=True) if miss]
    if missed:
        logger.info("step %d: evaluating %s, whose row is missing", step, ", ".join(missed))
        with open_writer(run, step) as writer:
            evaluate_all(run, state, missed, writer)


@contextlib.contextmanager
def closing(checkpoints: checkpoint.Checkpoints) -> Iterator[None]:
    """Waits in the end until what was saved is on disk.

    Not where this process of several fails alone: to commit takes all, and the others may be gone.
    """
    alone = False
    try:
        yield
    except BaseException as e:
        alone = jax.process_count() > 1 and not isinstance(e, _RAISED_BY_ALL)
        raise
    finally:
        if not alone:
            with watchdog.phase("save"):
                checkpoints.close()


def compile_step(run: Run):
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


def train_batches(run: Run, start: int) -> Iterator[dict[str, jax.Array]]:
    """The batches of the steps after `start`."""
    image_size = config_lib.image_hw(run.config.data.image_size)
    host_ops, _ = data.parse_ops(
        run.config.data.ops, image_size, pad_crops=run.config.data.pad_crops
    )
    return data.train_batches(
        run.train_source,
        host_ops,
        global_batch_size=run.config.global_batch_size,
        seed=run.config.seed,
        image_size=image_size,
        sharding=batch_sharding(run.mesh),
        start_step=start,
        num_steps=run.experiment.total_steps - start,
        data_order=training_order(run.config, run.train_source),
    )


def close_batches(batches: Iterator[dict[str, jax.Array]]) -> None:
    """Ends the threads that read ahead, however long that takes."""
    with watchdog.phase("leave"):
        batches.close()
