"""Which device a number that is not finite comes from.

The step is computed again from the newest save, by the programs of a replay: each device computes
the gradient of its own rows, then of the rows of the device before it. What comes from the rows
moves with them, and what comes from a device stays there.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from vit_jax.base import tree
from vit_jax.checkpoints import restore
from vit_jax.checkpoints.replicas import DivergedError
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.run.build import Run
from vit_jax.run.summary import write_diverged
from vit_jax.run.watch.guards import NonFiniteError
from vit_jax.run.watch.replay import inputs_program, name_places, replay_program

logger = logging.getLogger("vit_jax")

_REPLAY = "--config.job.replay_every='1 steps'"


def explain(
    run: Run,
    error: NonFiniteError,
    state: TrainState,
    frozen: tuple[tree.PyTree, ...],
    finish_saves: Callable[[], None],
) -> Exception:
    """The error to raise in place of `error`; all processes call it, and `state` is freed.

    `finish_saves` waits for the save in flight. A DivergedError if one device is at fault: the run
    can go on without it. Else diverged.json is written, and the error says what has been found.
    """
    with contextlib.suppress(Exception), watchdog.phase("save"):  # the first error counts
        finish_saves()
    step, places = error.step, name_places(run.mesh)
    saved = restore.steps_of_first(run.workdir / "checkpoints") if len(places) > 1 else []
    if step is None or not saved:
        write_diverged(run, error)
        return error
    logger.warning("%s; computing step %d again from step %d, to see whether one device is at "
                   "fault", error, step, saved[0])  # fmt: skip
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    try:
        said, is_device = judge(places, *compute_again(run, step, saved[0], frozen))
    except Exception as e:  # the first error counts
        said, is_device = f"The step cannot be computed again: {e}", False
    if is_device:
        return DivergedError(
            f"{str(error).partition(';')[0]}; {said}. The last save, of step {saved[0]}, is good: "
            f"run the same command again without this device, and with {_REPLAY} to be sure"
        )
    error = NonFiniteError(f"{error}. {said}")
    write_diverged(run, error)
    return error


def compute_again(
    run: Run, step: int, saved: int, frozen: tuple[tree.PyTree, ...]
) -> list[Mapping[str, np.ndarray]]:
    """{name of a gradient, or loss: norms (places,)} of the own and of the turned rows of `step`.

    By the parameters of the step `saved`; see `replay_program`.
    """
    e = run.experiment_of(step)
    with watchdog.phase("compile"):
        state, _ = restore.restore_step(run.workdir / f"checkpoints/{saved}", e.abstract_state)
        number = np.asarray(step - 1, state.step.dtype)
        state = state.replace(step=jax.device_put(number, state.step.sharding))
        with contextlib.closing(run.batches(range(step - 1, step))) as batches:
            inputs = inputs_program(e, run.mesh)(state, next(batches))
        replay = replay_program(e, run.mesh)
        return [
            jax.device_get(replay(state, *inputs, np.bool_(turned), *frozen))[1]
            for turned in (0, 1)
        ]


def judge(
    places: Sequence[str], own: Mapping[str, np.ndarray], turned: Mapping[str, np.ndarray]
) -> tuple[str, bool]:
    """What the norms of `compute_again` say, and whether one of the `places` is at fault."""
    first, then = (
        np.flatnonzero(~np.isfinite([*norms.values()]).all(axis=0)).tolist()
        for norms in (own, turned)
    )
    if not first and not then:
        return (f"All devices get finite numbers for it from the last save; if you suspect one of "
                f"them, run again with {_REPLAY}"), False  # fmt: skip
    if len(first) == 1 and then == [(first[0] + 1) % len(places)]:
        return f"The rows of {places[first[0]]} cause it on another device too", False
    if len(found := {*first, *then}) == 1:
        return f"{places[found.pop()]} is the only one that gets numbers that are not finite", True
    return "Several devices get such numbers for it from the last save too", False
