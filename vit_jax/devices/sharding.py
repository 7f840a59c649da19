"""How every array of a run is laid out over the mesh.

Parameters by rules over their names; what follows a parameter (its moments in the optimizer, its
average) is named after it and so laid out alike, and split over `data` besides. Activations by
`constrain`.
"""

import logging
import math
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.devices.mesh import BATCH_AXES

logger = logging.getLogger("vit_jax")

# (regular expression over the end of a leaf's name, mesh axis of each of its last axes); the first
# that matches counts. Scanned layers have one more axis in front, which is never split.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value|up)/kernel", ("fsdp", "tensor")),
    (r"(out|down)/kernel", ("tensor", "fsdp")),
    (r"head_hidden/kernel", ("fsdp", "tensor")),
    (r"(head|head_distillation)/kernel", ("fsdp", None)),
    (r"embedding/kernel", (None, "fsdp")),
    # A convolution's, (h, w, in, out). Of a unit the first two give channels that are split over
    # tensor, and the third adds them up; of the standardisation only means and variances go round.
    (r"conv[12]/kernel", (None, None, "fsdp", "tensor")),
    (r"conv3/kernel", (None, None, "tensor", "fsdp")),
    (r"(conv_root|conv_proj)/kernel", (None, None, None, "fsdp")),
    # Small: biases, norms, tokens, probe, tables of positions, counts and steps.
    (r"(bias|scale|class_token|distillation_token|probe|pos_embedding(/\w+)?|count|step)", ()),
)

# What follows a parameter is read and written by the update alone, so that each of the devices that
# hold a copy of the parameter may keep and update a part of it (Rajbhandari et al. 2019,
# arXiv:1910.02054, stage 1). The gradients are scattered instead of reduced, and the new parameters
# gathered: as many bytes in float32; with bfloat16 half as many again, as parameters are float32.
_FOLLOWERS = re.compile(r"(opt_state|ema)/")

# Adafactor's moments of a parameter: its means over one axis, or all of it.
_FACTORED = re.compile(r"opt_state/(?:.*/)?(?P<moment>v_row|v_col|v)/(?P<param>.*)")


def state_shardings(state, mesh: Mesh):
    """The sharding of every leaf of `state`, a pytree of arrays or of their shapes.

    Factored moments keep of their parameter's layout what is left of its axes. What else follows a
    parameter that a rule splits is split over `data` too, on the last axis that it divides. What no
    rule matches, and what an axis of the mesh does not divide, is replicated and named in a
    warning.
    """
    replicated = []
    named = tree.flatten_names(state)

    def shard(name, leaf):
        factored = _FACTORED.fullmatch(name)
        axes = next((axes for rule, axes in RULES if re.search(rf"(^|/){rule}$", name)), None)
        if axes and factored:
            param = named[f"params/{factored['param']}"]
            axes = _axes_left(axes, param.shape, leaf.shape, factored["moment"])
        if axes is None:
            if leaf.ndim:
                replicated.append(f"{name} {leaf.shape}: no rule")
            return NamedSharding(mesh, P())
        spec = [None] * (leaf.ndim - len(axes)) + list(axes)
        for i, axis in enumerate(spec):
            if axis is not None and leaf.shape[i] % mesh.shape[axis]:
                replicated.append(
                    f"{name} {leaf.shape}: axis {i} does not divide by {axis}={mesh.shape[axis]}"
                )
                spec[i] = None
        if axes and not factored and _FOLLOWERS.match(name):
            spec = _split_over_data(spec, leaf.shape, mesh)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(mesh, P(*spec))

    shardings = jax.tree.map(shard, tree.leaf_names(state), state)
    if replicated and mesh.size > 1:
        logger.warning("replicated over the mesh:\n  %s", "\n  ".join(replicated))
    return shardings


def _split_over_data(spec: list, shape: tuple[int, ...], mesh: Mesh) -> list:
    """`spec` with `data` on an axis whose parts it divides; of the last axes first."""
    for i in reversed(range(len(spec))):
        parts = mesh.shape[spec[i]] if spec[i] else 1
        if mesh.shape["data"] > 1 and shape[i] % (parts * mesh.shape["data"]) == 0:
            return [*spec[:i], (spec[i], "data") if spec[i] else "data", *spec[i + 1 :]]
    return spec


def _axes_left(axes, shape, left: tuple[int, ...], moment: str) -> tuple[str | None, ...]:
    """`axes` of a parameter of `shape` that are there in its `moment`, of shape `left`."""
    if left == shape:
        return axes
    layers = shape[: len(shape) - len(axes)]
    sizes = shape[len(layers) :]
    # Of a square matrix optax takes the rows' moment over the last axis, the columns' over the
    # first; of others the shape tells.
    order = range(len(axes)) if moment == "v_col" else reversed(range(len(axes)))
    for i in order:
        if left == layers + sizes[:i] + sizes[i + 1 :]:
            return axes[:i] + axes[i + 1 :]
    return ()  # one number in the place of a moment that is kept in the other form


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, laid out over the devices; none is sent more than its share.

    `jax.device_put` would have all devices of several processes hold the whole of it, to compare.
    """
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Lays out an activation over the mesh of `jax.set_mesh`; for models' field `constrain`.

    Args:
      x: any activation.
      axes: for each of its axes "batch" (split as the batch is), "tensor", or None (whole).

    Raises:
      RuntimeError: outside `jax.set_mesh`, where a constraint would silently do nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        raise RuntimeError("a sharded model needs its mesh: call it under jax.set_mesh(mesh)")
    spec = P(*(BATCH_AXES if axis == "batch" else axis for axis in axes))
    return jax.lax.with_sharding_constraint(x, spec)


def bytes_per_device(state, shardings) -> int:
    """Bytes of the largest share of `state` that a device holds."""
    shares = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        state,
        shardings,
    )
    return sum(jax.tree.leaves(shares))
