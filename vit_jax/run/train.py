"""A training run, from what is asked for to its summary."""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.base import files, tree
from vit_jax.checkpoints import restore
from vit_jax.config import Settings
from vit_jax.data.captions import keep_tokenizer
from vit_jax.devices import sharding
from vit_jax.experiment.state import TrainState, start_from
from vit_jax.job.lock import Lock, NoLock
from vit_jax.models.contract import with_known
from vit_jax.objectives.contract import TokenPass
from vit_jax.run.build import Callback, Run, describe, prepare
from vit_jax.run.kept_features import with_kept_features
from vit_jax.run.loop import loop, warn_of_memory
from vit_jax.run.setup.agreement import compare, compare_findings
from vit_jax.run.setup.opener import ChooseLayout
from vit_jax.run.setup.workdir import agree_on_run, locked, record_start, write_workdir
from vit_jax.run.summary import read_summary, write_summary
from vit_jax.run.teachers import write_teachers
from vit_jax.run.watch.host_memory import restore_from_memory
from vit_jax.run.watch.kernel_check import check_kernels

logger = logging.getLogger("vit_jax")

_BATCHES_COMPARED = 2


def train_and_evaluate(
    asked: Settings,
    workdir: epath.PathLike,
    command: Mapping[str, Any] | None = None,
    choose_layout: ChooseLayout | None = None,
    callbacks: Sequence[Callback] = (),
    began: float | None = None,
) -> dict[str, Any]:
    """Train as `asked`, continuing the run in `workdir` if there is one.

    Args:
      asked: of a config that has passed `validation.validate`.
      workdir: folder for everything that the run writes.
      command: what made the config, {"config": NAME[:words], "overrides": {key: text}}, for the
        record of starts.
      choose_layout: chooses the layout under `auto`; see `prepare`.
      callbacks: see `api.train`.
      began: `time.perf_counter` when the work for this start began; None: now.

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
    began = time.perf_counter() if began is None else began
    workdir, command = files.absolute(workdir), command or {}
    before = agree_on_run(workdir, asked.job.compile_deadline_s)
    run = prepare(asked, workdir, choose_layout, before, command.get("overrides", ()))
    run = dataclasses.replace(run, callbacks=callbacks)
    finished = read_summary(run)
    compare_runs(run, {"already finished": finished is not None})
    if finished is not None and is_intact(run, finished["step"]):
        how = (
            "stopped early at step %d; to go on, raise stop.patience"
            if finished.get("stopped_early")
            else "already finished at step %d; nothing to do"
        )
        logger.info(how, finished["step"])
        if not restore.saved_steps(workdir / "checkpoints"):
            logger.warning("%s: has no checkpoint any more: its weights are lost, unless you have "
                           "a copy", workdir)  # fmt: skip
        return finished
    describe(run)
    # The forward pass of evaluators.
    whole = TokenPass(with_known(run.experiment.model, keep_tokens=1.0, pack=None))
    passes = [each for e in run.experiments for each in e.passes]
    check_kernels([*passes, *[whole] * bool(run.evaluators)], run.mesh)
    with locked(workdir, before, run.settings.job) as lock, jax.set_mesh(run.mesh):
        state, meta = start_state(run)
        begin(run, int(state.step) if meta else None, command, lock, began)
        loop(with_kept_features(run, state), state, meta, lock, began)
        lock.check(fresh=True)
        return write_summary(run)


def compare_runs(run: Run, facts: Mapping[str, Any]) -> None:
    """Check that all processes have prepared the same run, and agree on `facts`."""
    weights = {**(run.initial_params or {}), **run.initial_model_state}
    facts = {**facts, "teachers": run.described_teachers}
    compare_findings(run.settings.job, run.sources, weights, facts)


def begin(
    run: Run,
    resumed_at: int | None,
    command: Mapping[str, Any],
    lock: Lock | NoLock,
    began: float,
) -> None:
    """Write, on process 0, what the run is and how it was started.

    Then check that all processes continue after the same step, with examples in the same order.
    """
    lock.check(fresh=True)
    if jax.process_index() == 0:
        if run.tokenizer:
            keep_tokenizer(run.workdir, run.tokenizer)  # before config.json, which has its digest
        write_workdir(run.workdir, run.resolved, run.train_source, run.division)
        write_teachers(run.workdir, run.described_teachers)
        (run.workdir / "summary.json").unlink(missing_ok=True)  # of an earlier end
        devices = run.mesh.devices.flatten().tolist()
        record_start(run.workdir, devices, resumed_at, command, time.perf_counter() - began)

    def find() -> dict[str, Any]:
        start, images = resumed_at or 0, run.settings.stages.images
        first = np.arange(images(start), images(start + _BATCHES_COMPARED))
        ids = np.asarray(run.order(first)).tobytes()
        return {"first step": start + 1, "ids of the first batches": ids}

    compare(run.settings.job, "starting point", find)


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
    """The state to start from: resumed, else with the weights of `init_from`, else from scratch.

    Returns:
      The state and, if resumed, the meta saved with it, else {}.

    Raises:
      InputError: if the checkpoint was made with other data or another order.
    """
    e, directory = run.experiment, run.workdir / "checkpoints"
    warn_of_memory(run, sharding.bytes_per_device(e.abstract_state))
    if kept := restore_from_memory(run):
        state, meta, memory = kept
        logger.info("start: resumed at step %d from %s", meta["step"], memory)
        return state, meta
    restored = restore.restore_newest(
        directory, e.abstract_state, fingerprint=run.fingerprint, move_aside=True
    )
    if restored is not None:
        logger.info("start: resumed at step %d from %s", restored[1]["step"], directory)
        return restored
    if run.initial_params is None:
        logger.info("start: from scratch")
        return e.init(), {}
    asked = {key: getattr(run.settings.run, key) for key in ("init_from", "init_texts_from")}
    given = [f"{key}={source}" for key, source in asked.items() if source is not None]
    logger.info("start: parameters from %s", ", ".join(given))
    state = e.init()
    state = state.replace(
        params=_replace_leaves(state.params, run.initial_params),
        model_state=_replace_leaves(state.model_state, run.initial_model_state),
    )
    if not state.ema:
        return state, {}
    # The average is sharded differently from the parameters.
    start = jax.jit(start_from, out_shardings=e.shardings)
    return start(state, state.params, state.model_state), {}


def _replace_leaves(old: tree.PyTree, arrays: Mapping[str, np.ndarray]) -> tree.PyTree:
    """`old`, nested dicts of arrays, with some replaced by `arrays`, sharded as before."""
    leaves = tree.flatten_names(old)
    for name, array in arrays.items():
        place = leaves[name].sharding
        leaves[name].delete()  # the devices hold each leaf once
        leaves[name] = sharding.place(array, place)
    return tree.unflatten_names(leaves)
