"""A training run, from a checked config to its summary.

config -> mesh -> data -> experiment (model, objective, optimizer, step) -> state -> loop.
"""

import collections
import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import (
    checkpoint,
    config_text,
    data,
    flops,
    metrics,
    processes,
    sharding,
    tree,
    watchdog,
)
from vit_jax import config as config_lib
from vit_jax.data.order import local_rows
from vit_jax.errors import InputError
from vit_jax.evaluators import evaluate, make_evaluators
from vit_jax.experiment import num_steps
from vit_jax.files import write_whole
from vit_jax.mesh import BATCH_AXES, batch_sharding
from vit_jax.processes import PreemptionGuard
from vit_jax.replicas import DivergedError, check_replicas
from vit_jax.run import Run, compare, data_fingerprint, prepare, training_order
from vit_jax.step import start_from

logger = logging.getLogger("vit_jax")

_EXAMPLES_TO_JUDGE_BY = 10_000  # or the data set, if it is smaller; before, few may be many
_BATCHES_COMPARED = 2
_STEPS_IN_FLIGHT = 2  # dispatched and not finished; each holds its batch on the devices


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or not a number: the run cannot go on."""


class CorruptDataError(RuntimeError):
    """Too many records cannot be read or decoded."""


class Preempted(Exception):
    """The run was asked to stop, and has saved; the same command goes on from there."""


# By every process at the same step, as they come from what all have in common.
_RAISED_BY_ALL = (Preempted, NonFiniteError, CorruptDataError, DivergedError)


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
    compare_runs(run)
    finished = read_summary(run)
    if finished is not None:
        logger.info("finished before, at step %d: nothing to do", finished["step"])
        return finished
    describe(run)
    with PreemptionGuard() as guard, jax.set_mesh(run.mesh):
        state, meta = start_state(run)
        write_workdir(run)
        compare_starts(run, int(state.step))
        if int(state.step) < run.experiment.total_steps:
            train(run, state, meta, guard)
    return write_summary(run)


def compare_runs(run: Run) -> None:
    """Checks that all processes run one thing in one workdir, before anything that they share.

    Raises:
      InputError: with the processes and their differences.
    """
    compare(run, {"finished before": read_summary(run) is not None})
    with watchdog.phase("comparison"):
        processes.check_one_workdir(run.workdir, run.config.job.compile_deadline_s)


def compare_starts(run: Run, start: int) -> None:
    """Checks that all processes begin at one step with the same examples in one order."""
    size, order = run.config.global_batch_size, training_order(run.config, run.train_source)
    first = np.arange(start * size, (start + _BATCHES_COMPARED) * size)
    facts = {
        "first step": start + 1,
        "ids of the first batches": np.asarray(order(first)).tobytes(),
    }
    with watchdog.phase("comparison"):
        processes.agree("where they start", facts, run.config.job.compile_deadline_s)


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
            params[name] = jax.device_put(array, params[name].sharding)
        logger.info("start: parameters from init_from=%s", run.config.init_from)
        params = tree.unflatten_names(params)
        if not state.ema:
            return state.replace(params=params)
        # The average lies otherwise over the devices than the parameters.
        return jax.jit(start_from, out_shardings=run.experiment.shardings)(state, params)

    return checkpoint.start(
        directory=run.workdir / "checkpoints",
        abstract_state=run.experiment.abstract_state,
        fingerprint=data_fingerprint(run),
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
        write_whole(run.workdir / "config.json", config_text.to_json(run.config))
        class_names = run.train_source.class_names
        if class_names is not None:
            text = json.dumps(list(class_names), indent=2, ensure_ascii=False) + "\n"
            write_whole(run.workdir / "classes.json", text)


def train(run: Run, state, meta: dict, guard: PreemptionGuard) -> None:
    """The loop: step, log, evaluate, make the rows durable, save."""
    c, e = run.config, run.experiment
    start, total = int(state.step), e.total_steps
    saved = start if meta else None
    evaluators = make_evaluators(c, e.model, run.mesh, run.sources)
    keys = ["log.every", "checkpoint.every", *(f"evals.{name}.every" for name in evaluators)]
    every = {key: num_steps(c, key) for key in keys}

    def due(step, key):
        return step == total or step % every[key] == 0

    clock = Clock(meta, run.mesh.size)
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
    if jax.process_index() == 0:
        writer = metrics.MetricWriter(
            run.workdir, restored_step=saved, wandb_project=c.log.wandb, config=c.to_dict()
        )
    else:
        writer = metrics.NullWriter()
    throughput = metrics.Throughput(
        start,
        global_batch_size=c.global_batch_size,
        flops_per_image=e.flops_per_image,
        device_kind=run.mesh.devices.flat[0].device_kind,
        num_devices=run.mesh.size,
    )
    pending: collections.deque = collections.deque()

    def evaluate_all(step, names):
        for name in names:
            with watchdog.phase("evaluation"), throughput.pause("evaluation"):
                row = evaluate(name, evaluators[name], state)
                writer.write(step, row)
                logger.info("step %d: %s", step, _readable(row))

    with contextlib.ExitStack() as stack:
        stack.enter_context(writer)
        progress = stack.enter_context(metrics.Progress(total))
        profiler = stack.enter_context(Profiler(c.log.profile, run.workdir / "profile"))
        checkpoints = checkpoint.Checkpoints(
            run.workdir / "checkpoints",
            keep_last=c.checkpoint.keep_last,
            keep_every=num_steps(c, "checkpoint.keep_every"),
        )
        stack.enter_context(closing(checkpoints))

        batches = train_batches(run, start)
        stack.callback(close_batches, batches)
        for step, batch in zip(range(start + 1, total + 1), batches, strict=False):
            watchdog.arrive(step)
            profiler.before(step)
            logging_now = due(step, "log.every")
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
            evaluations = [name for name in evaluators if due(step, f"evals.{name}.every")]
            saving = stopping or due(step, "checkpoint.every")
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
            if not stopping:
                evaluate_all(step, evaluations)
            if saving:
                with watchdog.phase("save"), throughput.pause("save"):
                    saved = step
                    writer.flush()
                    fingerprint = {"data_fingerprint": data_fingerprint(run)}
                    meta = fingerprint | corrupt.read() | clock.read(train_s)
                    check_replicas(state, run.mesh)
                    checkpoints.save(step, state, meta)
            if stopping:  # what was sent the signal may not have long: first it saves
                with watchdog.phase("save"):
                    checkpoints.wait()
                evaluate_all(step, evaluations)
                raise Preempted(f"stopped by SIGTERM at step {step}, which is saved")


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
    if jax.process_count() > 1:
        facts = {"lowered step": hashlib.sha256(lowered.as_text().encode()).hexdigest()}
        with watchdog.phase("comparison"):
            processes.agree("the program", facts, run.config.job.compile_deadline_s)
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
    host_ops, _ = data.parse_ops(run.config.data.ops, image_size)
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


def check_finite(pending: collections.deque, saved: int | None) -> dict[str, float]:
    """The metrics of the last pending step, once those of all have been seen to be finite.

    `saved` is the step of the newest checkpoint.
    """
    values: dict[str, float] = {}
    steps = [step for step, _ in pending]
    for step, values in zip(steps, jax.device_get([m for _, m in pending]), strict=True):
        bad = [f"{k} is {v}" for k, v in values.items() if "/" not in k and not math.isfinite(v)]
        if bad:
            grads = {k.partition("/")[2]: v for k, v in values.items() if k[:10] == "grad_norm/"}
            layers = [layer for layer, norm in grads.items() if not math.isfinite(norm)]
            if layers:
                bad.append(f"with gradients of that kind in {', '.join(layers)}")
            kept = "nothing was saved before it" if saved is None else f"step {saved} is saved"
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)}; {kept}. Lower optimizer.peak_lr, lengthen "
                "schedule.warmup or set optimizer.grad_clip_norm, and take a new --workdir"
            )
    pending.clear()
    return {name: float(value) for name, value in values.items()}


class CorruptRecords:
    """How many examples of a run could not be read or decoded, earlier parts of it included.

    Args:
      meta: saved with the state that the run goes on from; {} from scratch.
      global_batch_size: B.
      num_examples: of the data set.
      max_fraction: of the examples so far that may be corrupt.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        *,
        global_batch_size: int,
        num_examples: int,
        max_fraction: float,
    ):
        self.total = int(meta.get("corrupt", 0))
        self._global_batch_size, self._max_fraction = global_batch_size, max_fraction
        self._at_least = min(num_examples, _EXAMPLES_TO_JUDGE_BY)

    def count(self, by_step: Sequence[jax.Array]) -> None:
        """Adds those of some steps."""
        self.total += round(math.fsum(jax.device_get(by_step)))

    def check(self, step: int, saved: int | None) -> None:
        """Raises CorruptDataError if they are too many; `saved` is the newest checkpoint's step."""
        seen = step * self._global_batch_size
        if self.total > self._max_fraction * max(seen, self._at_least):
            kept = "nothing was saved" if saved is None else f"step {saved} is saved"
            raise CorruptDataError(
                f"step {step}: {self.total} of {seen} examples are corrupt and were masked, more "
                f"than data.max_corrupt_fraction={self._max_fraction}; {kept}. The warnings above "
                "name the records: repair them, or set data.max_corrupt_fraction higher and start "
                "the same command again"
            )

    def read(self) -> dict[str, int]:
        """To be saved."""
        return {"corrupt": self.total}


class Clock:
    """What a run has cost, its earlier parts, maybe on other meshes, included.

    Args:
      meta: saved with the state that the run goes on from; {} from scratch.
      num_chips: of this part.
    """

    def __init__(self, meta: Mapping[str, Any], num_chips: int):
        self._meta, self._num_chips = meta, num_chips
        self._since = time.perf_counter()

    def read(self, train_s: float) -> dict[str, float]:
        """To be saved; `train_s` is what the steps of this part have taken.

        `train_s`: seconds of training alone; `chip_s`: of everything, times chips.
        """
        chip_s = (time.perf_counter() - self._since) * self._num_chips
        return {
            "train_s": self._meta.get("train_s", 0.0) + train_s,
            "chip_s": self._meta.get("chip_s", 0.0) + chip_s,
        }


class Profiler:
    """Traces the steps that `log.profile` names into a directory, by `jax.profiler`."""

    def __init__(self, steps: str | None, directory: epath.Path):
        self._steps = config_lib.step_range(steps, "log.profile") if steps else range(0)
        self._directory = directory
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        """To be called before the step numbered `step` is dispatched."""
        if step - 1 in self._steps and not self._tracing:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, result: Any) -> None:
        """To be called with what that step gave, to be waited for before a trace ends."""
        if self._tracing and step not in self._steps:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            self._tracing = False
            logger.info("traced to %s; look at it with TensorBoard or XProf", self._directory)


def read_summary(run: Run) -> dict[str, Any] | None:
    """The summary of a run that is finished; None if it is not."""
    path = run.workdir / "summary.json"
    if not path.exists():
        return None
    summary = json.loads(path.read_text())
    return summary if summary["step"] == run.experiment.total_steps else None


def write_summary(run: Run) -> dict[str, Any]:
    """Writes summary.json from what the run has made durable; {} on processes other than 0.

    A shared disk may show these an older listing.
    """
    if jax.process_index() > 0:
        return {}
    c, e = run.config, run.experiment
    step = checkpoint.saved_steps(run.workdir / "checkpoints")[0]
    meta = checkpoint.read_meta(run.workdir / "checkpoints" / str(step))
    images = step * c.global_batch_size
    last = metrics.last_values(run.workdir)
    summary = {
        "step": step,
        **{k: v for k, v in last.items() if k.split("/")[0] in c.evals},
        "num_params": e.num_params,
        "images_seen": images,
        "exaflops": e.flops_per_image * images / 1e18,
        "images_per_s": images / meta["train_s"],
        "chip_hours": meta["chip_s"] / 3600,
    }
    write_whole(run.workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    shown = {k: v for k, v in summary.items() if "/" in k or k in ("images_per_s", "chip_hours")}
    logger.info("finished at step %s: %s", f"{step:,}", _readable(shown))
    logger.info("summary: %s", run.workdir / "summary.json")
    return summary


def _readable(values: Mapping[str, float]) -> str:
    def show(name, value):
        if name.removesuffix("_raw").endswith(("top1", "top5", "top1_std")):
            return f"{name} {value:.2%}"
        return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"

    return ", ".join(show(name, value) for name, value in values.items())
