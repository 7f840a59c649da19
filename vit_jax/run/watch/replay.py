"""Replays of a run: gradients that are computed twice and compared bit by bit (`job.replay_every`).

The gradient of each device's rows is computed there, then by the next device along the batch axes.
The rows move, the parameters do not: every device computes with its own copies. Nothing is summed
over rows of several devices, so both computations add in the same order, by the same program, and
agree bit by bit unless a device is faulty. The rows are arguments of that program: if it made them,
the compiler might round those that stay and those that move in different ways.

A replay comes before the step's update, so that nothing of a faulty step is saved.
"""

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.files import write_whole
from vit_jax.base.tree import Batch, PyTree
from vit_jax.checkpoints.checksums import checksum
from vit_jax.checkpoints.replicas import DivergedError, name_devices
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.experiment.accumulation import accumulate
from vit_jax.experiment.experiment import Experiment
from vit_jax.experiment.optimizers.masks import stop_gradients
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics, make_inputs
from vit_jax.job import watchdog
from vit_jax.objectives.contract import ObjectiveOutput
from vit_jax.run.build import Run, RunStep, Watcher
from vit_jax.run.watch.faults import Fault, flip_activation, flip_bit

logger = logging.getLogger("vit_jax")

# Norms from kernels that add in no fixed order may differ by the first share of themselves, or the
# second of the norm of all gradients. No GPU has measured this; a flipped sign passes.
_ROUNDING = 1e-2, 1e-4

FOLDER = "replay"  # in the workdir: STEP.json of a step whose computations differ

# {name: (places,)} of the loss and of each gradient: checksums (uint32), and norms (float32).
Found = tuple[dict[str, jax.Array], dict[str, jax.Array]]


def axes_of_places(mesh: Mesh) -> tuple[str, ...]:
    """The axes whose devices compute gradients of rows by themselves: a place is one, or a group.

    Where `fsdp` or `tensor` splits parameters, a group of devices along both is one place.
    """
    return BATCH_AXES if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1 else BATCH_AXES[:2]


def name_places(mesh: Mesh) -> list[str]:
    """The devices of each place."""
    places = math.prod(mesh.shape[axis] for axis in axes_of_places(mesh))
    return [name_devices(group.tolist()) for group in mesh.devices.reshape(places, -1)]


def inputs_program(e: Experiment, mesh: Mesh) -> jax.stages.Wrapped:
    """The function of `make_inputs`, jitted; it keeps the state."""
    function = make_inputs(e.parts.transform, e.parts.seed)
    of_inputs = batch_sharding(mesh), NamedSharding(mesh, P())
    return e.jit(function, in_shardings=e.in_shardings[:2], out_shardings=of_inputs)


def replay_program(e: Experiment, mesh: Mesh, flip: Fault | None = None) -> jax.stages.Wrapped:
    """Make replay(state, inputs, key, turned, frozen=None) -> `Found` of a step, jitted; it keeps
    the state.

    The step starts from `state`, with `inputs` and `key` as `step.make_inputs` makes them. Place p
    computes the gradient of its own rows, or, if `turned`, of place p - 1's. An objective that
    couples rows sees the rows of one place; so do its groups of rows, which shrink to fit.

    `flip`: of an activation or a gradient, in the computation that is not turned.
    """
    axes, parts = axes_of_places(mesh), e.parts
    places = math.prod(mesh.shape[axis] for axis in axes)
    flipped = -1 if flip is None else flip.place // (mesh.size // places)

    def of_place(
        state: TrainState, inputs: Batch, key: jax.Array, turned: jax.Array, frozen: PyTree
    ) -> Found:
        place = jax.lax.axis_index(axes)
        if places > 1:
            to_next = [(p, (p + 1) % places) for p in range(places)]
            moved = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), inputs)
            inputs = jax.tree.map(lambda own, x: jnp.where(turned, x, own), inputs, moved)
        flips = ~turned & (place == flipped)

        def sums_of(
            params: tree.Params, state: TrainState, inputs: Batch, key: jax.Array
        ) -> ObjectiveOutput:
            params = stop_gradients(params, parts.freeze)
            is_flipped = flip is not None and flip.kind == "flip:activation"
            with flip_activation(flips) if is_flipped else contextlib.nullcontext():
                return e.objective.loss(params, state, inputs, frozen, key)

        grads, sums = accumulate(sums_of, state, inputs, key, parts.accum_steps)
        leaves = {"loss": sums.loss} | tree.flatten_names(grads)
        if flip is not None and flip.kind == "flip:gradient":
            largest = max(leaves, key=lambda name: leaves[name].size)
            leaves[largest] = flip_bit(leaves[largest], flips)
        norms = {name: jnp.sqrt(jnp.square(leaf).sum()) for name, leaf in leaves.items()}
        return jax.tree.map(lambda x: x[None], (jax.tree.map(checksum, leaves), norms))

    def replay(
        state: TrainState, inputs: Batch, key: jax.Array, turned: jax.Array, frozen: PyTree = None
    ) -> Found:
        by_place = jax.shard_map(
            of_place, mesh=mesh, in_specs=(P(), P(axes), P(), P(), P()), out_specs=P(axes),
            axis_names={*(mesh.axis_names if axes == BATCH_AXES else axes)}, check_vma=False,
        )  # fmt: skip
        return by_place(state.replace(opt_state=()), inputs, key, turned, frozen)

    state, _, *frozen = e.in_shardings
    whole = NamedSharding(mesh, P())
    shardings = state, batch_sharding(mesh), whole, None, *frozen
    return e.jit(replay, in_shardings=shardings, out_shardings=whole)


def watch_replays(
    run: Run, frozen: tuple[tree.PyTree, ...], left: Sequence[Fault], first: int
) -> Watcher:
    """Before every `job.replay_every`-th step, compute its gradient twice.

    The watched step raises, on every process, DivergedError if the two differ: process 0 has then
    written both into WORKDIR/replay/STEP.json. `first`: number of the first step.
    """
    every = run.timetable.replay_every
    if every is None:
        return lambda step: step
    if len(name_places(run.mesh)) == 1:
        logger.warning("job.replay_every='%d steps': the same devices compute both gradients, so "
                       "replays find only passing faults", every)  # fmt: skip

    by_bits = has_fixed_order(run)
    if not by_bits:
        logger.warning("job.replay_every='%d steps': kernels of GPUs may add in another order each "
                       "time, so only norms are compared, to rounding; to compare bits, set "
                       "--config.mesh.deterministic=true", every)  # fmt: skip

    def compiled(program: jax.stages.Wrapped, *arguments: Any) -> jax.stages.Compiled:
        with watchdog.phase("compile"):
            return program.lower(*arguments).compile()

    def programs(run: Run) -> tuple[jax.stages.Compiled, dict[int | None, jax.stages.Compiled]]:
        e = run.experiment
        inputs, turned = inputs_program(e, run.mesh), jax.ShapeDtypeStruct((), bool)
        made = jax.eval_shape(inputs, *e.arguments[:2])
        arguments = e.abstract_state, *made, turned, *e.abstract_frozen
        flips = [None, *(flip for flip in left if flip.is_for_replay)]
        return compiled(inputs, *e.arguments[:2]), {
            flip and flip.step: compiled(replay_program(e, run.mesh, flip), *arguments)
            for flip in flips
        }

    by_stage = run.by_stage(programs, first - 1)

    def watch(step: RunStep) -> RunStep:
        def watched(
            number: int, state: TrainState, batch: tree.Batch
        ) -> tuple[TrainState, Metrics]:
            if number % every == 0:
                inputs_of, replays = by_stage(number)
                program, inputs = replays.pop(number, replays[None]), inputs_of(state, batch)
                check(run, number, by_bits, *(
                    jax.device_get(program(state, *inputs, np.bool_(turned), *frozen))
                    for turned in (0, 1)  # one by one: on CPUs exchanges can block each other
                ))  # fmt: skip
            return step(number, state, batch)

        return watched

    return watch


def has_fixed_order(run: Run) -> bool:
    """Whether the programs of the run give the same bits every time."""
    return run.settings.mesh.deterministic or run.mesh.devices.flat[0].platform != "gpu"


def check(run: Run, step: int, by_bits: bool, own: Sequence[Any], turned: Sequence[Any]) -> None:
    """Compare the two computations of a step, each as `replay_program` gives it.

    Raises:
      DivergedError: they differ; names the devices.
    """
    differences = find_differences(run.mesh, own, turned, by_bits)
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
    mesh: Mesh,
    own: Sequence[Mapping[str, np.ndarray]],
    turned: Sequence[Mapping[str, np.ndarray]],
    by_bits: bool = True,
) -> list[dict[str, Any]]:
    """The places whose rows have got two gradients; see `replay_program`.

    Without `by_bits` they differ only if norms differ by more than rounding.

    Returns:
      A dict for each: "devices": the names of its own and of the next place's, which computed its
      rows too; "leaves": {name: {"checksums": [own, next], "norms": [own, next]}}.
    """
    (sums, norms), (turned_sums, turned_norms) = own, turned
    groups, found = name_places(mesh), []

    def differ(name: str, place: int, then: int) -> bool:
        is_other = sums[name][place] != turned_sums[name][then]
        if by_bits or not is_other:
            return is_other
        whole = np.linalg.norm([norm[place] for leaf, norm in norms.items() if leaf != "loss"])
        most = max(_ROUNDING[0] * norms[name][place], _ROUNDING[1] * whole)
        return not abs(norms[name][place] - turned_norms[name][then]) <= most  # or it is NaN

    for place in range(len(groups)):
        then = (place + 1) % len(groups)
        leaves = {
            name: {
                "checksums": [int(sums[name][place]), int(turned_sums[name][then])],
                "norms": [float(norms[name][place]), float(turned_norms[name][then])],
            }
            for name in sums
            if differ(name, place, then)
        }
        if leaves:
            found.append({"devices": [groups[place], groups[then]], "leaves": leaves})
    return found
