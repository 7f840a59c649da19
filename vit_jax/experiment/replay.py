"""The gradient of each device's rows, computed there or by the next device along the batch axes.

The rows move, the parameters do not: every device computes with its own copies. Nothing is summed
over rows of several devices, so both computations add in the same order, by the same program, and
agree bit by bit unless a device is faulty. The rows are arguments of that program: if it made them,
the compiler might round those that stay and those that move in different ways.
"""

import contextlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.faults import Fault, flip_activation, flip_bit
from vit_jax.base.tree import Batch, PyTree
from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.experiment.accumulation import accumulate
from vit_jax.experiment.optimizers.masks import stop_gradients
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import Objective

# {name: (places,)} of the loss and of each gradient: checksums (uint32), and norms (float32).
Found = tuple[dict[str, jax.Array], dict[str, jax.Array]]


def axes_of_places(mesh: Mesh) -> tuple[str, ...]:
    """The axes whose devices compute gradients of rows by themselves: a place is one, or a group.

    Where `fsdp` or `tensor` splits parameters, a group of devices along both is one place.
    """
    return BATCH_AXES if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1 else BATCH_AXES[:2]


def make_replay(
    objective: Objective,
    mesh: Mesh,
    *,
    digest: Callable[[jax.Array], jax.Array],
    freeze: str | None = None,
    accum_steps: int = 1,
    flip: Fault | None = None,
) -> Callable[..., Found]:
    """Make replay(state, inputs, key, turned, frozen=None) -> `Found` of a step; pure.

    The step starts from `state`, with `inputs` and `key` as `step.make_inputs` makes them. Place p
    computes the gradient of its own rows, or, if `turned`, of those of place p - 1. An objective
    that couples rows sees those of one place; so do its groups of rows, which shrink to fit.

    Args:
      objective, freeze, accum_steps: as for `make_train_step`.
      digest: array -> uint32, its checksum.
      flip: of an activation or a gradient, in the computation that is not turned.
    """
    axes = axes_of_places(mesh)
    places = math.prod(mesh.shape[axis] for axis in axes)
    flipped = -1 if flip is None else flip.place // (mesh.size // places)

    def of_place(state, inputs, key, turned, frozen):
        place = jax.lax.axis_index(axes)
        if places > 1:
            to_next = [(p, (p + 1) % places) for p in range(places)]
            moved = jax.tree.map(lambda x: jax.lax.ppermute(x, axes, to_next), inputs)
            inputs = jax.tree.map(lambda own, x: jnp.where(turned, x, own), inputs, moved)
        flips = ~turned & (place == flipped)

        def sums_of(params, state, inputs, key):
            is_flipped = flip is not None and flip.kind == "flip:activation"
            with flip_activation(flips) if is_flipped else contextlib.nullcontext():
                return objective.loss(stop_gradients(params, freeze), state, inputs, frozen, key)

        grads, sums = accumulate(sums_of, state, inputs, key, accum_steps)
        leaves = {"loss": sums.loss} | tree.flatten_names(grads)
        if flip is not None and flip.kind == "flip:gradient":
            largest = max(leaves, key=lambda name: leaves[name].size)
            leaves[largest] = flip_bit(leaves[largest], flips)
        norms = {name: jnp.sqrt(jnp.square(leaf).sum()) for name, leaf in leaves.items()}
        return jax.tree.map(lambda x: x[None], (jax.tree.map(digest, leaves), norms))

    def replay(
        state: TrainState, inputs: Batch, key: jax.Array, turned: jax.Array, frozen: PyTree = None
    ) -> Found:
        by_place = jax.shard_map(
            of_place, mesh=mesh, in_specs=(P(), P(axes), P(), P(), P()), out_specs=P(axes),
            axis_names={*(mesh.axis_names if axes == BATCH_AXES else axes)}, check_vma=False,
        )  # fmt: skip
        return by_place(state.replace(opt_state=()), inputs, key, turned, frozen)

    return replay
