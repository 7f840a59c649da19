"""Replays of a run: gradients that are computed twice and compared bit by bit (`job.replay_every`).

A replay comes before the step's update, so that nothing of a faulty step is saved.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.base.faults import Fault
from vit_jax.base.files import write_whole
from vit_jax.checkpoints.checksums import checksum
from vit_jax.checkpoints.replicas import DivergedError, name_devices
from vit_jax.experiment.replay import axes_of_places
from vit_jax.experiment.state import TrainState
from vit_jax.job import watchdog
from vit_jax.run.build import Run, Watcher

logger = logging.getLogger("vit_jax")

FOLDER = "replay"  # in the workdir: STEP.json of a step whose computations differ


def watch_replays(run: Run, frozen: tuple[tree.PyTree, ...], left: Sequence[Fault]) -> Watcher:
    """Before every `job.replay_every`-th step, compute its gradient twice.

    The watched step raises, on every process, DivergedError if the two differ: process 0 has then
    written both into WORKDIR/replay/STEP.json.
    """
    every, e = run.timetable.replay_every, run.experiment
    if every is None:
        return lambda step: step
    if math.prod(run.mesh.shape[axis] for axis in axes_of_places(run.mesh)) == 1:
        logger.warning("job.replay_every='%d steps': the same devices compute both gradients, so "
                       "replays find only passing faults", every)  # fmt: skip

    def compiled(program: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Compiled:
        with watchdog.phase("compile"):
            return program.lower(*arguments).compile()

    made, turned = jax.eval_shape(e.inputs, *e.arguments[:2]), jax.ShapeDtypeStruct((), bool)
    arguments = e.abstract_state, *made, turned, *e.abstract_frozen
    inputs_of = compiled(e.inputs, *e.arguments[:2])
    replay = compiled(e.replay(digest=checksum), *arguments)
    faulty = {
        flip.step: compiled(e.replay(digest=checksum, flip=flip), *arguments)
        for flip in left if flip.is_for_replay
    }  # fmt: skip

    def watch(step):
        def watched(number: int, state: TrainState, batch: tree.Batch):
            if number % every == 0:
                program, inputs = faulty.pop(number, replay), inputs_of(state, batch)
                check(run, number, *(
                    jax.device_get(program(state, *inputs, np.bool_(turned), *frozen))
                    for turned in (0, 1)  # one by one: on CPUs exchanges can block each other
                ))  # fmt: skip
            return step(number, state, batch)

        return watched

    return watch


def check(run: Run, step: int, own: Sequence[Any], turned: Sequence[Any]) -> None:
    """Compare the two computations of a step, each as `make_replay` gives it.

    Raises:
      DivergedError: they differ; names the devices.
    """
    differences = find_differences(run.mesh, own, turned)
    if not differences:
        return
    pairs = [difference["devices"] for difference in differences]
    path = run.workdir / FOLDER / f"{step}.json"
    if jax.process_index() == 0:
        path.parent.mkdir(exist_ok=True)
        text = json.dumps({"step": step, "differences": differences}, indent=2) + "\n"
        write_whole(path, text)
    in_all = [group for group in pairs[0] if all(group in pair for pair in pairs)]
    suspects = (
        f"{in_all[0]} takes part in all of them, and should be taken out of service"
        if len(pairs) > 1 and in_all
        else "one of them has computed or stored wrong bits; a second replay may tell which"
    )
    said = "; ".join(
        f"{' and '.join(dict.fromkeys(d['devices']))} ({len(d['leaves'])} of {len(own[0])} arrays)"
        for d in differences
    )
    raise DivergedError(
        f"step {step}: a gradient computed twice differs between {said}; {suspects}. Both values "
        f"are in {path}; nothing of this step is saved"
    )


def find_differences(
    mesh: Mesh, own: Sequence[Mapping[str, np.ndarray]], turned: Sequence[Mapping[str, np.ndarray]]
) -> list[dict[str, Any]]:
    """The places whose rows have got two gradients; see `make_replay`.

    Returns:
      A dict for each: "devices": the names of its own and of the next place's, which computed its
      rows too; "leaves": {name: {"checksums": [own, next], "norms": [own, next]}}.
    """
    (sums, norms), (turned_sums, turned_norms) = own, turned
    places = len(sums["loss"])
    groups = [name_devices(group.tolist()) for group in mesh.devices.reshape(places, -1)]
    found = []
    for place in range(places):
        then = (place + 1) % places
        leaves = {
            name: {
                "checksums": [int(sums[name][place]), int(turned_sums[name][then])],
                "norms": [float(norms[name][place]), float(turned_norms[name][then])],
            }
            for name in sums
            if sums[name][place] != turned_sums[name][then]
        }
        if leaves:
            found.append({"devices": [groups[place], groups[then]], "leaves": leaves})
    return found
