"""The sharding of every array of a run over the mesh.

Rules over names determine the sharding of parameters. A parameter's moments in the optimizer and
its average carry its name, so they are sharded like it, and large ones are also split over `data`.
`constrain` determines the sharding of activations.
"""

import gc
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.lazy import Lazy
from vit_jax.config import FAMILIES, OBJECTIVES
from vit_jax.devices.mesh import BATCH_AXES

logger = logging.getLogger("vit_jax")

# (regular expression for the end of a leaf's name, mesh axis of each of its last axes); the first
# match counts. Scanned layers have one more axis in front, which is never split. The rules here are
# of names that several parts use; a part's own rules, its `split_params`, count before these.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(query|key|value|up|gate)/kernel", ("fsdp", "tensor")),
    (r"(out|down)/kernel", ("tensor", "fsdp")),
    (r"lora_a", ("fsdp", None)),
    (r"lora_b", (None, "tensor")),
    (r"head_hidden/kernel", ("fsdp", "tensor")),
    (r"(head|head_distillation|adapter_\d+_\d+)/kernel", ("fsdp", None)),
    (r"embedding/kernel", (None, "fsdp")),
    # Kernels of convolutions, (h, w, in, out). In a unit the first two split their output channels
    # over tensor and the third sums over them; standardisation exchanges only means and variances.
    (r"conv[12]/kernel", (None, None, "fsdp", "tensor")),
    (r"conv3/kernel", (None, None, "tensor", "fsdp")),
    (r"(conv_root|conv_proj|conv_last)/kernel", (None, None, None, "fsdp")),
    # Small arrays: biases, norms and their statistics, tokens, probe, position tables, counts.
    (r"(bias|scale|mean|var|probe|pos_embedding(/\w+)?)", ()),
    (r"(class_token|distillation_token|register_tokens|mask_token)", ()),
    (r"(random_features|count|step)", ()),
    (r"hidden_\d/kernel", ("fsdp", None)),  # of the heads of objectives
)

# Only the update reads and writes moments and averages, so each device that holds a copy of a
# parameter needs to keep and update only a part of them (Rajbhandari et al. 2019, arXiv:1910.02054,
# stage 1). On GPUs gradients are then reduce-scattered instead of all-reduced, and new parameters
# all-gathered: the same number of bytes in float32. With bfloat16 gradients it is 1.5 times as many
# bytes, because parameters are float32. An average that is a teacher is all-gathered in every step
# too, for its forward pass.
_FOLLOWERS = re.compile(r"(opt_state|ema)/")

# Moments and averages of fewer elements (256 KiB in float32) are not split over `data`: exchanges
# of so few bytes cost mostly latency, while the gradients of all such arrays are reduced in one.
SPLIT_FROM = 1 << 16

_ROWS_OF_TILE = 8  # in a TPU's memory

# Adafactor's moments of a parameter: means over one axis, or the full moment.
_FACTORED = re.compile(r"opt_state/(?:.*/)?(?P<moment>v_row|v_col|v)/(?P<param>.*)")


def state_shardings(state: tree.PyTree, mesh: Mesh, shares: str | None = None) -> tree.PyTree:
    """The sharding of every leaf of `state`, a pytree of arrays or of their shapes.

    Factored moments are sharded like their parameter on the axes that remain. Other moments and
    averages of a parameter that a rule splits are also split over `data` if a layer of them has at
    least SPLIT_FROM elements: on the axis that `fsdp` splits, else on the last one whose size
    allows it. If devices keep shares of the parameters along the mesh axis `shares`, it
    splits such layers by rows, and their moments and averages (not factored ones) too. Arrays
    without a matching rule, and axes whose size the mesh axis does not divide, are replicated and
    listed in a warning.
    """
    replicated = []
    named = tree.flatten_names(state)

    def shard(name: str, leaf: Any) -> NamedSharding:
        factored = _FACTORED.fullmatch(name)
        axes = rule_of(name)
        if axes and factored:
            param = named[f"params/{factored['param']}"]
            axes = _axes_left(axes, param.shape, leaf.shape, factored["moment"])
        if axes is None:
            if math.prod(leaf.shape) > 1:
                replicated.append(f"{name} {leaf.shape}: no rule")
            return NamedSharding(mesh, P())
        spec = [None] * (leaf.ndim - len(axes)) + list(axes)
        for i, axis in enumerate(spec):
            if axis is not None and leaf.shape[i] % mesh.shape[axis]:
                replicated.append(
                    f"{name} {leaf.shape}: axis {i} does not divide by {axis}={mesh.shape[axis]}"
                )
                spec[i] = None
        in_layer = leaf.shape[leaf.ndim - len(axes) :]
        is_large = math.prod(in_layer) >= SPLIT_FROM
        if axes and is_large and not factored and shares:
            spec = _split_rows(spec, leaf.shape, len(axes), shares, mesh.shape[shares])
        elif axes and is_large and not factored and _FOLLOWERS.match(name):
            spec = _split_over_data(spec, leaf.shape, mesh)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(mesh, P(*spec))

    shardings = jax.tree.map(shard, tree.leaf_names(state), state)
    if replicated and mesh.size > 1:
        logger.warning("replicated over the mesh:\n  %s", "\n  ".join(replicated))
    return shardings


def rule_of(name: str) -> tuple[str | None, ...] | None:
    """The mesh axis of each of a leaf's last axes, by the first rule that matches; None: none."""
    parts = [registry.find(part) for registry in (FAMILIES, OBJECTIVES) for part in registry]
    rules = [rule for part in parts for rule in getattr(part, "split_params", ())] + [*RULES]
    return next((axes for rule, axes in rules if re.search(rf"(^|/){rule}$", name)), None)


def _split_over_data(spec: list, shape: tuple[int, ...], mesh: Mesh) -> list:
    """`spec` with `data` added, on the last axis whose size allows it.

    The axis that `fsdp` splits comes first: on GPUs one exchange then scatters a gradient over
    both. If they split different axes, XLA reduces the whole gradient, over each of them in turn.
    See `gradient_shardings` for TPUs.
    """
    last = list(reversed(range(len(spec))))
    if mesh.shape["fsdp"] > 1:
        last.sort(key=lambda i: spec[i] != "fsdp")
    for i in last:
        parts = mesh.shape[spec[i]] if spec[i] else 1
        if mesh.shape["data"] > 1 and shape[i] % (parts * mesh.shape["data"]) == 0:
            return [*spec[:i], (spec[i], "data") if spec[i] else "data", *spec[i + 1 :]]
    return spec


def _split_rows(spec: list, shape: tuple[int, ...], num_axes: int, over: str, ways: int) -> list:
    """`spec` with `over` on the first of the last `num_axes` axes that `ways` divides.

    Into whole tiles, if it divides one so.

    The shares of a matrix that is split by rows lie in one piece, and no TPU has to copy them.
    """
    others = [None if axis == over else axis for axis in spec]
    for rows in (_ROWS_OF_TILE, 1):
        for i in range(len(spec) - num_axes, len(spec)):
            if shape[i] % (rows * ways) == 0:
                return [*others[:i], over, *others[i + 1 :]]
    return spec


def gradient_shardings(params: tree.PyTree, mesh: Mesh) -> tree.PyTree:
    """A tree like `params` with the sharding of each gradient in the training step.

    Where it is None, or a leaf is, the compiler decides.

    Moments that are split over `fsdp` and `data` ask for gradients that are scattered over both.
    The TPU compiler (libtpu 0.0.52) then all-reduces the whole gradient, and each chip keeps its
    slice. If gradients are sharded like their parameters, it reduce-scatters them over `fsdp` and
    all-reduces only the rest over `data`: in a step of ViT-22B/14 (data 4, fsdp 64, v5p:4x8x8) a
    chip sends 44 instead of 88 GB. The CUDA compiler scatters over both axes.

    Args:
      params: the shardings of the parameters.
    """
    if mesh.devices.flat[0].platform != "tpu" or min(mesh.shape["data"], mesh.shape["fsdp"]) == 1:
        return None
    return jax.tree.map(lambda sharding: sharding if "fsdp" in sharding.spec else None, params)


def constrain_params(params: tree.PyTree, shardings: tree.PyTree) -> tree.PyTree:
    """`params` with the given shardings, which their gradients get too; None leaves them open."""

    def constrain(sharding: NamedSharding | None, leaf: jax.Array) -> jax.Array:
        return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)

    if shardings is None:
        return params
    return jax.tree.map(constrain, shardings, params, is_leaf=lambda x: x is None)


def _axes_left(
    axes: tuple[str | None, ...], shape: tuple[int, ...], left: tuple[int, ...], moment: str
) -> tuple[str | None, ...]:
    """The `axes` of a parameter of `shape` that remain in its `moment`, of shape `left`."""
    if left == shape:
        return axes
    layers = shape[: len(shape) - len(axes)]
    sizes = shape[len(layers) :]
    # For a square matrix optax averages v_row over the last axis and v_col over the first; for
    # others the shape determines the axis.
    order = range(len(axes)) if moment == "v_col" else reversed(range(len(axes)))
    for i in order:
        if left == layers + sizes[:i] + sizes[i + 1 :]:
            return axes[:i] + axes[i + 1 :]
    return ()  # a placeholder for the form of the moment that is not used


def place(array: np.ndarray | Lazy, sharding: NamedSharding) -> jax.Array:
    """Shard an array that every process has over the devices; each device gets only its part.

    With several processes, `jax.device_put` would copy the whole array to all devices to compare.
    """
    parts: dict[str, np.ndarray] = {}  # several devices may have the same one

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        if (key := str(index)) not in parts:
            parts[key] = array[index]
        return parts[key]

    placed = jax.make_array_from_callback(array.shape, sharding, part)
    if isinstance(array, Lazy):
        jax.block_until_ready(placed)
        gc.collect(0)  # JAX holds the parts that it has copied in reference cycles
    return placed


class HostCopy:
    """A copy of this process's shards of an array in host memory, each once."""

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}
        self._shards = {index: np.array(data) for index, data in shards.items()}

    def restore(self) -> jax.Array:
        """The array on the devices again, in new memory."""
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._shards[str(index)].copy()
        )


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Constrain an activation's sharding over the mesh of `jax.set_mesh`; a model's `constrain`.

    Args:
      x: any activation.
      axes: for each of its axes "batch" (split like the batch), "tensor", or None (not split).

    Raises:
      RuntimeError: outside `jax.set_mesh`, where the constraint would silently do nothing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise RuntimeError("no mesh is set; call a sharded model under jax.set_mesh(mesh)")
    if mesh.manual_axes:  # each device computes its own rows
        return x
    spec = P(*(BATCH_AXES if axis == "batch" else axis for axis in axes))
    return jax.lax.with_sharding_constraint(x, spec)


def free_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """The axes of `mesh` over which no `jax.shard_map` around this code has split the arrays.

    It has in `experiment.exchange`, over all axes, and in a replay, over those of its places.
    """
    return {*mesh.axis_names} - {*jax.sharding.get_abstract_mesh().manual_axes}


def on_shares(compute: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`compute` on each device's share of its arguments, over the `free_axes` of `mesh`.

    The specs may name all axes; those that are not free are left out. If none is free, the result
    is `compute` itself; if some are not, call it under `jax.jit`.

    Args:
      compute: takes and gives arrays of one device.
      in_specs, out_specs: a tree of `PartitionSpec`s for each argument, and for the result, as
        `jax.shard_map` takes them.
    """
    free = free_axes(mesh)
    if not free:
        return compute

    def of_free(spec: P) -> P:
        axes = ((part,) if isinstance(part, str) else part or () for part in spec)
        return P(*(tuple(axis for axis in each if axis in free) for each in axes))

    in_specs, out_specs = jax.tree.map(
        of_free, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, P)
    )
    around = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        compute, mesh=around if around.manual_axes else mesh, in_specs=in_specs,
        out_specs=out_specs, axis_names=free, check_vma=False,
    )  # fmt: skip


def share_out(function: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
    """`function` of each matrix of a stack (M, rows, columns), whose shape it keeps.

    The devices of the mesh of `jax.set_mesh` share the matrices evenly, filled up with zeros, and
    each computes its own one after the other. Before and after that every device has its part of
    the rows and columns of all, as of parameters: a single matrix of a stack that is split between
    devices would cost an all-reduce of the whole stack. Without a mesh, all are computed here.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ways, rows = mesh.size or 1, ("fsdp", "data", "replica")  # as `_split_over_data`
    # One exchange each over tensor and over the others; the compiler finds none over all at once.
    stages = [P(None, None, rows, "tensor"), P("tensor", None, rows), P(("tensor", *rows))]

    def move(x: jax.Array, specs: Iterable[P]) -> jax.Array:
        for spec in specs if ways > 1 else ():
            x = jax.lax.with_sharding_constraint(x, spec)
        return x

    filled = jnp.pad(stack, ((0, -len(stack) % ways), (0, 0), (0, 0)))
    shares = move(filled.reshape(ways, -1, *stack.shape[1:]), stages)
    found = jax.vmap(lambda share: jax.lax.map(function, share))(shares)
    return move(found, reversed(stages)).reshape(filled.shape)[: len(stack)]


def bytes_per_device(state: tree.PyTree) -> int:
    """The bytes of `state`, a pytree of sharded arrays or their shapes, that one device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
