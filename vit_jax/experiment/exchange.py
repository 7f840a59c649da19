"""Exchanges of gradients between devices that each compute the gradients of their own rows.

On CPUs of several processes one all-reduce adds them all. XLA exchanges every gradient of a step by
itself. Its partitioner for CPUs does not join them, and between processes each exchange takes a
millisecond or more, whatever its size.

On TPUs each device sends every other its share of a large gradient and adds what it gets. Only such
an exchange goes on behind computation: the compiler (libtpu 0.0.52) lets computation wait for every
all-reduce and reduce-scatter. A device keeps only its shares of large parameters, and all devices
gather them in the forward pass, in the dtype that computes with them. The shares lie along `fsdp`,
or `data` where `fsdp` is 1; the other axes of the batch then add the gradients of the shares. Where
devices keep whole parameters, they add the gradients of all microbatches once, in float32.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.tree import PyTree
from vit_jax.devices import sharding
from vit_jax.devices.kernels import has_row_kernels
from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.experiment.accumulation import Sums
from vit_jax.experiment.state import TrainState
from vit_jax.models.contract import AttentionShape, Model, about
from vit_jax.objectives.contract import Objective, ObjectiveOutput


class Exchange(NamedTuple):
    """How devices get the sums of the whole batch; by default XLA's partitioner decides.

    join: join(sums of rows, shardings=the parameters') -> sums of the whole batch, for devices
      that each compute their own rows; None: they do not.
    shares: the mesh axis along which each device keeps its shares of large parameters, and gathers
      all to compute with; None: it keeps whole ones, or XLA's partitioner gathers them.
    options: of the compiler, {name: value}.
    """

    join: Callable[..., Sums] | None = None
    shares: str | None = None
    options: Mapping[str, bool] = MappingProxyType({})


# A TPU's memory has tiles of 8 rows. With more shares, one of a matrix of 768 rows fills no tile.
_MOST_SHARES = 64

# By default computation waits for every all-to-all. With it all 20 of a ViT of 3 layers (B/16, data
# 16 on v5e:4x4) go on behind it.
_ASYNCHRONOUS = MappingProxyType({"xla_tpu_enable_async_all_to_all": True})


def choose_exchange(
    model: nn.Module,
    objective: Objective,
    mesh: Mesh,
    freeze: str | None = None,
    accum_steps: int = 1,
    shares: bool = True,
) -> Exchange:
    """The fastest exchange; it is XLA's own unless the objective `is_single_pass`.

    For another one the model is one of this package without batch statistics, and the mesh has no
    `tensor`.

    On CPUs of several processes it is `join_devices`, for a model without random draws; it changes
    no more than the rounding. On TPUs it is `share_gradients`, for unrolled ViTs without frozen
    parameters (`freeze`), which it would split; each chip draws its own dropout. Over `fsdp` the
    config may forbid it (`mesh.shares`), as each chip then holds all weights. With it, layers that
    are recomputed without kernels of rows save no memory: B/16 with full remat in 4 layers needs
    1.36 GB (libtpu 0.0.52), 0.47 without it. In several microbatches, whose sums are whole anyway,
    other models on TPUs without `fsdp` use it too, with whole parameters, and one exchange a step
    instead of one a microbatch.
    """
    devices, shape, has_rows = list(mesh.devices.flat), mesh.shape, has_row_kernels(model, mesh)
    model = about(model)
    if shape["tensor"] > 1 or (shape["fsdp"] > 1 and devices[0].platform == "cpu"):
        return Exchange()
    if not (objective.is_single_pass and model.draws_rows_apart):
        return Exchange()
    if devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1:
        # On CPUs a run draws the same values on every number of devices.
        return Exchange() if model.is_random else Exchange(partial(join_devices, mesh=mesh))
    if devices[0].platform != "tpu" or len(devices) == 1:
        return Exchange()
    join, axis = partial(share_gradients, model=model, freeze=freeze), share_axis(shape)
    is_faster = not _waits_for_all_to_all(devices[0].device_kind, shape)
    is_faster &= shares or axis == "data"
    saves_memory = model.remat == "none" or (model.remat == "full" and has_rows)
    is_shared = (
        (is_faster and saves_memory)
        and not (freeze or model.scan or model.stochastic_depth)
        and (model.embeds_patches and isinstance(model.attention_shape, AttentionShape))
        and model.width * model.mlp_dim >= sharding.SPLIT_FROM
        and shape[axis] <= _MOST_SHARES
    )
    if is_shared:
        return Exchange(join, axis, _ASYNCHRONOUS)
    return Exchange(join) if accum_steps > 1 and shape["fsdp"] == 1 else Exchange()


def share_axis(shape: Mapping[str, int]) -> str:
    """The axis of a mesh of `shape` along which devices keep shares of parameters, if they do."""
    return "fsdp" if shape["fsdp"] > 1 else "data"


def _waits_for_all_to_all(device_kind: str, shape: Mapping[str, int]) -> bool:
    """Whether computation waits for an all-to-all along `share_axis` of a mesh of `shape`.

    The compiler (libtpu 0.0.52) computes behind those of a whole slice, and of parts of up to 16
    chips of v5e; it refuses those of more chips of v5e ("limited ICI"). Reduce-scatters in their
    place gain up to 3 % over XLA's partitioner, or lose 1 %, in more memory
    (docs/explanation/performance.md).
    """
    number = math.prod(shape.values())
    if shape["replica"] > 1:
        return True
    if device_kind in ("TPU v5 lite", "TPU v5e"):
        return number > 16
    return shape[share_axis(shape)] < number


def join_devices(sums: Sums, shardings: PyTree, mesh: Mesh) -> Sums:
    """`sums` of the whole batch: each device computes its rows' sums, and one exchange adds all.

    Args:
      sums: of floating-point arrays. The state and the key are whole on each device; the states of
        the model and of the objective stay as they are.
      shardings: not read: every device has all parameters.
      mesh: only its batch axes are larger than 1.
    """
    return _on_rows(lambda *args: _add_up(sums(*args)), P(), mesh)


def share_gradients(sums: Sums, shardings: PyTree, model: Model, freeze: str | None = None) -> Sums:
    """`sums` of the whole batch: each device computes its rows' sums, and keeps its shares.

    The shares lie along `share_axis`.

    Shares of a kernel's gradient are sent in the dtype that computes with it, as XLA would, and
    added in float32. Gradients of small parameters are added with the objective's sums.

    Args:
      sums: as for `join_devices`.
      shardings: of the parameters. A parameter is whole on each device, or `share_axis` splits one
        axis of it.
      model: says in which dtype it computes with a kernel.
      freeze: matches parameters whose gradients are 0 on every device; they are not sent.
    """
    specs = {name: split.spec for name, split in tree.flatten_names(shardings).items()}
    mesh = jax.tree.leaves(shardings)[0].mesh
    over = share_axis(mesh.shape)
    axes = {name: spec.index(over) if over in spec else None for name, spec in specs.items()}
    sent_as = {name: model.dtypes_in_use(name)[1] for name in axes}

    def add(
        state: TrainState, batch: tree.Batch, key: jax.Array
    ) -> tuple[tree.Params, ObjectiveOutput]:
        shares = tree.flatten_names(state.params)
        params = {name: _gather(shares[name], axes[name], sent_as[name], over) for name in axes}
        own_key = jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXES))
        state = state.replace(params=tree.unflatten_names(params))
        tree_of_grads, out = sums(state, batch, own_key)
        grads = tree.flatten_names(tree_of_grads)
        is_large = {name: grad.size >= sharding.SPLIT_FROM for name, grad in grads.items()}
        frozen = tree.flatten_names(tree.mask(tree_of_grads, freeze or ""))
        still = {name: grads[name] for name, found in frozen.items() if np.all(found)}
        whole = {n: grads[n] for n, axis in axes.items() if axis is None and n not in still}
        small, out = _add_up(({name: g for name, g in whole.items() if not is_large[name]}, out))
        large = {name: g for name, g in whole.items() if is_large[name]}
        split = {
            name: _scatter(grads[name], axis, sent_as[name], over)
            for name, axis in axes.items()
            if axis is not None
        }
        added = small | jax.lax.psum(large, BATCH_AXES)
        return tree.unflatten_names(still | added | split), out

    return _on_rows(add, jax.tree.map(lambda split: split.spec, shardings), mesh)


def _gather(
    share: jax.Array, axis: int | None, dtype: jax.typing.DTypeLike, over: str
) -> jax.Array:
    """The whole float32 parameter, rounded to `dtype`, from the shares along the mesh axis."""
    if axis is None:
        return share
    whole = jax.lax.all_gather(share.astype(dtype), over, axis=axis, tiled=True)
    return whole.astype(share.dtype)


def _scatter(grad: jax.Array, axis: int, dtype: jax.typing.DTypeLike, over: str) -> jax.Array:
    """This device's share of the float32 sum of all devices' `grad`.

    Along the mesh axis `over` shares are sent in `dtype`, along the others added in float32.
    """
    ways = jax.lax.axis_size(over)
    shares = grad.reshape(*grad.shape[:axis], ways, -1, *grad.shape[axis + 1 :]).astype(dtype)
    shares = jax.lax.all_to_all(shares, over, axis, 0)
    # One by one: XLA's reduction over the first axis takes twice the cycles, and a conversion of
    # all shares would be an operation of its own.
    added = functools.reduce(operator.add, [share.astype(grad.dtype) for share in shares])
    others = tuple(name for name in BATCH_AXES if name != over and jax.lax.axis_size(name) > 1)
    return jax.lax.psum(added, others) if others else added


def _add_up(grads_and_out: tuple[PyTree, ObjectiveOutput]) -> tuple[PyTree, ObjectiveOutput]:
    """The sums of all devices' gradients and objective's sums, in one exchange."""
    grads, out = grads_and_out
    out = out._replace(model_state={}, objective_state={})
    flat, restore = ravel_pytree((grads, out))
    return restore(jax.lax.psum(flat, BATCH_AXES))


def _on_rows(add: Sums, params: PyTree, mesh: Mesh) -> Sums:
    """`add` on each device's rows of the batch; `params`: how parameters and gradients are split.

    The states of the model and of the objective stay as they are.
    """

    def joined(
        state: TrainState, batch: tree.Batch, key: jax.Array
    ) -> tuple[tree.Params, ObjectiveOutput]:
        of_state = jax.tree.map(lambda _: P(), state.replace(params=(), opt_state=(), ema={}))
        specs = (of_state.replace(params=params), P(BATCH_AXES), P())
        added = jax.shard_map(
            add, mesh=mesh, in_specs=specs, out_specs=(params, P()), check_vma=False
        )
        grads, out = added(state.replace(opt_state=(), ema={}), batch, key)
        kept: dict[str, Any] = {
            "model_state": state.model_state,
            "objective_state": state.objective_state,
        }
        return grads, out._replace(**kept)

    return joined
