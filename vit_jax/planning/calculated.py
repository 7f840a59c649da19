"""Calculated plans, for chips whose compiler is not installed or not wanted."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval
from jax.sharding import Mesh, PartitionSpec

from vit_jax.base import tree
from vit_jax.config import Settings
from vit_jax.config.base import in_steps
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.flops import jaxpr_flops
from vit_jax.devices.gpus import GPUS
from vit_jax.devices.kept import Leaf, peak_bytes
from vit_jax.devices.mesh import AXES, make_mesh
from vit_jax.experiment.exchange import Exchange, choose_exchange
from vit_jax.experiment.experiment import Experiment, with_shardings
from vit_jax.models import fields_of
from vit_jax.models.contract import about
from vit_jax.planning.estimates import exchange_s
from vit_jax.planning.exchanges import axes_of, collective_table, parameter_table, update_specs
from vit_jax.planning.kernel_cycles import has_kernel
from vit_jax.planning.plan_figures import accessed_bytes, describe, judge, state_bytes
from vit_jax.planning.targets import Target, batch_ways, describe_devices, plan_mesh
from vit_jax.run.teachers import planned_experiment
from vit_jax.run.watch.layer_norms import watched

# In forward passes of all layers; a step has 3, and a fourth one with full remat.
_DOTS = 0.1  # recomputes norms and activations, no products
_SCAN = 0.2  # a scan with full remat takes 5 % longer than full remat of unrolled layers: L/16
_UNEVEN = 0.6  # H/14 and g/14 with 20 and 22 rows a v5p chip take 1.2 times the cycles
_ROWS = 8  # of a tile
# Fraction of the time of the products at the chip's peak. With 64 images a chip B/16 loses 0.27 and
# L/16 0.23; fewer images lose less. Each of the two kernels gains about half: S/16.
_LOST_WITHOUT_KERNELS = 0.15
# How often a TPU reads or writes what it holds of the float32 parameters for update and conversion:
# g/14, 16 images a chip, takes 302 Mcycles on data 256 of v5e, and 252 by the same kernels if fsdp
# 16 splits them.
_PASSES_OF_PARAMS = 6
_KERNELS = "projections_forward", "mlp_forward"
UNCERTAINTY = 0.15  # of a calculated peak; docs/explanation/plans.md compares it with compiled ones
# The same of unrolled layers on GPUs: XLA kept up to 1.19 times as much; with remat "dots" 1.5
# times, with "full" 3.2 times.
_UNROLLED = {"none": 0.35, "dots": 0.7, "full": 2.5}
_CUBLAS = 0.5  # on GPUs whose products cuBLAS computes: 1.47 times on a T4, scanned 1.31 times


def calculate_plan(settings: Settings, target: Target) -> dict[str, Any]:
    """`plan` without a compiler.

    Temporaries are counted on the jaxpr of the gradients (`kept`).
    """
    mesh = plan_mesh(settings, target, describe_devices(target))
    experiment = planned_experiment(settings, mesh)
    counted = scanned(settings, mesh)
    step_flops = None if counted is None else _flops_of_some_layers(settings, mesh, counted)
    figures = describe(settings, target, mesh, experiment, counted, step_flops)
    images, accum_steps = figures["images_per_way"], settings.optimizer.accum_steps
    memory = calculate_memory(settings, target)
    return figures | {
        "by": "calculation",
        "compile_s": 0.0,
        "memory_bytes": memory,
        "collectives": collective_table(experiment, mesh.shape, target, images, accum_steps),
        "hbm_bytes_accessed": accessed_bytes(memory, accum_steps * experiment.num_gradients),
        "compiler_cycles": None,
        "kernels": [],
    }


def uncertainty_of(settings: Settings, target: Target) -> float:
    """How much more the compiler's peak may be than the calculated one, as a share of this."""
    own = settings.model.own
    if not target.chip.is_gpu:
        return UNCERTAINTY
    above = UNCERTAINTY if own.get("scan") else _UNROLLED[own.get("remat") or "none"]
    return above if GPUS[target.slice.chip].capability >= (8, 0) else max(above, _CUBLAS)


def scanned(settings: Settings, mesh: Mesh) -> Experiment | None:
    """The experiment with its layers in a scan, whose FLOPs are counted in a fraction of the time.

    None where a scan would not compute the same: layers that are frozen or compared one by one.
    """
    own, by_layer = settings.model.own, settings.objective.watches_layers
    by_layer |= settings.optimizer.freeze is not None
    if by_layer or own.get("scan") or "scan" not in fields_of(settings.model.name):
        return None
    values = {"model.scan": True, "model.remat_layers": None}
    return planned_experiment(settings.with_values(values), mesh)


def _flops_of_some_layers(settings: Settings, mesh: Mesh, counted: Experiment) -> int | None:
    """FLOPs of a step if only some layers are recomputed, else None; `counted`: from `scanned`."""
    if (layers := settings.model.own.get("remat_layers")) is None:
        return None
    values = {"model.scan": True, "model.remat_layers": None, "model.remat": "none"}
    without = planned_experiment(settings.with_values(values), mesh)
    with jax.set_mesh(mesh):
        least, depth = without.flops_per_step, about(counted.model).depth
        return least + (counted.flops_per_step - least) * layers // depth


def calculate_memory(settings: Settings, target: Target) -> dict[str, Any]:
    """The key `memory_bytes` of `calculate_plan`, in less time.

    It takes one trace, and two where some layers are recomputed. Configs that differ only in the
    mesh or in the number of such layers share them, with as many images on a device.

    Raises:
      InputError: as `calculate_plan`.
    """
    return _lay_out(settings, target)[1]


def calculate_layout(settings: Settings, target: Target) -> dict[str, Any]:
    """Figures that rank the layout of `settings`, in the time of `calculate_memory`, which it has.

    added_s: seconds by which a step is longer than the products of its forward and backward pass:
      for layers that are computed again, and a scan; on TPUs for layers without kernels of rows
      (`devices.kernels`), which need whole weights on each device, for shares of matrices that end
      within a tile, and for the update of the parameters that a device holds; and for exchanges of
      weights, gradients and updates, on TPUs only for those that wait. Those of activations depend
      on no open key of the mesh.
    hidden_s: seconds of the exchanges behind computation; on GPUs 0.

    Raises:
      InputError: the settings do not suit the target.
    """
    mesh = plan_mesh(settings, target, describe_devices(target))
    experiment, memory, jaxpr = _lay_out(settings, target)
    products_s = jaxpr_flops(jaxpr) / mesh.shape["tensor"] / target.chip.peak_flops
    table = parameter_table(experiment, mesh.shape, target, settings.optimizer.accum_steps)
    hidden, added = exchange_s(table, target.chip)
    if target.chip.is_gpu:  # XLA's schedule hides a part that depends on the model
        hidden, added = 0.0, hidden + added
    model, leaves = about(experiment.model), jax.tree.leaves(experiment.abstract_state.params)
    passes = {"none": 0.0, "dots": _DOTS, "full": 1.0}[model.remat]
    forward_s = products_s / (3 + int(passes))
    if passes and (layers := settings.model.own.get("remat_layers")) is not None:
        passes *= layers / model.depth
    if not target.chip.is_gpu:
        passes += _UNEVEN * any(_is_uneven(leaf) for leaf in leaves)
        missing = sum(not has_kernel(jaxpr, name) for name in _KERNELS) / len(_KERNELS)
        added += _LOST_WITHOUT_KERNELS * missing * 3 * forward_s
        added += _PASSES_OF_PARAMS * memory["params"] / target.chip.hbm_bytes_per_s
    added += (passes + _SCAN * model.scan) * forward_s
    return {"memory_bytes": memory, "added_s": added, "hidden_s": hidden}


def _is_uneven(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether fsdp splits an axis of matrices into parts that are no multiple of a tile's rows."""
    parts = zip(leaf.sharding.shard_shape(leaf.shape), leaf.sharding.spec, strict=False)
    return leaf.ndim <= 3 and any(size % _ROWS for size, axes in parts if "fsdp" in axes_of(axes))


def _lay_out(settings: Settings, target: Target) -> tuple[Experiment, dict[str, Any], Jaxpr]:
    """An experiment whose state is on the config's mesh, the memory of its step, and the jaxpr of
    its gradients on one device.
    """
    mesh = plan_mesh(settings, target, describe_devices(target))
    share = settings.run.global_batch_size // batch_ways(mesh.shape)
    whole_pairs = share + share % 2 * parse_preprocessing(settings).mixes
    layers = settings.model.own.get("remat_layers")
    alone = settings.with_values(
        # Durations in steps, as the epochs of a smaller batch have more of them. The order of the
        # data is of the whole batch; it takes no memory on a device.
        in_steps(settings.to_config())
        | {"global_batch_size": whole_pairs, "model.remat_layers": None}
        | {"data.order": "record", "data.streams": None, "data.repeats": 1}
        | {f"mesh.{axis}": 1 for axis in AXES}
    )
    experiment, temporaries, jaxpr = _count_temporaries(alone, target, mesh)
    if layers is not None:  # between none and all of them, in proportion
        alone = alone.with_values({"model.remat": "none"})
        _, without, _ = _count_temporaries(alone, target, mesh)
        temporaries = without + (temporaries - without) * layers // experiment.model.depth
    memory = state_bytes(experiment) | {"temporaries": temporaries}
    memory["peak"] = sum(memory.values())
    above = uncertainty_of(settings, target)
    memory |= judge(memory["peak"], target, uncertainty=UNCERTAINTY, above=above)
    return experiment, memory, jaxpr


def _count_temporaries(
    alone: Settings, target: Target, mesh: Mesh
) -> tuple[Experiment, int, Jaxpr]:
    """The experiment with its state on `mesh`, the peak of the temporaries of its gradients, and
    their jaxpr.

    Args:
      alone: the settings for one device and its images.
    """

    def traced(is_whole: bool) -> _Alone:
        text = f"{alone.values} {target.slice.chip} {is_whole}"
        return _Alone(text, alone, _mesh_of_one(target, is_whole))

    # What GPUs compute with does not depend on it, so one trace serves all their meshes.
    is_whole = target.chip.is_gpu or max(mesh.shape["fsdp"], mesh.shape["tensor"]) == 1
    if not is_whole and mesh.shape["tensor"] == 1:
        is_whole = _exchange_of(traced(True), mesh).shares is not None
    return _temporaries_of(traced(is_whole), mesh, target.chip.platform, target.scale)


def _exchange_of(alone: "_Alone", mesh: Mesh) -> Exchange:
    """The exchange of an experiment on `mesh`."""
    experiment = _experiment_of(alone)
    chosen = experiment.model, experiment.objective, mesh, experiment.freeze
    shares = alone.settings.mesh.shares
    return choose_exchange(*chosen, experiment.parts.accum_steps, shares)


@functools.lru_cache(maxsize=32)
def _temporaries_of(
    traced: "_Alone", mesh: Mesh, platform: str, scale: float
) -> tuple[Experiment, int, Jaxpr]:
    """`_count_temporaries`, once for the layouts that differ in the number of recomputed layers.

    Gradients that a loop stacks are split like the update. Others too on GPUs, and over fsdp on
    TPUs if data has several devices; else the TPU compiler sums them whole.
    """
    experiment, exchange = _experiment_of(traced), _exchange_of(traced, mesh)
    jaxpr = _trace(traced, own_rows=exchange.join is not None)
    experiment = dataclasses.replace(
        experiment,
        parts=experiment.parts._replace(join=exchange.join),
        arguments=(
            with_shardings(experiment.abstract_state, mesh, exchange.shares),
            experiment.abstract_batch,
            *with_shardings(experiment.abstract_frozen, mesh),
        ),
    )
    params = tree.flatten_names(experiment.abstract_state.params)
    updates, scatters = update_specs(experiment), min(mesh.shape["data"], mesh.shape["fsdp"]) > 1

    def share(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> float:
        return 1 / math.prod(mesh.shape[axis] for part in spec for axis in axes_of(part))

    weights = {id(leaf) for leaf in params.values()}
    arguments = [
        Leaf(
            share(leaf, leaf.sharding.spec),
            split=any("tensor" in axes_of(part) for part in leaf.sharding.spec),
            weight=id(leaf) in weights,
        )
        for leaf in jax.tree.leaves(experiment.arguments)
    ]
    outputs = []
    for name, leaf in params.items():
        of_update = share(leaf, updates[name])
        whole = 1.0
        if platform == "gpu":
            whole = of_update
        elif scatters and "fsdp" in leaf.sharding.spec:
            whole = 1 / mesh.shape["fsdp"]
        outputs.append(Leaf(of_update if exchange.join is None else 1.0, whole))
    how = {"tensor": mesh.shape["tensor"], "platform": platform, "scale": scale}
    peak = peak_bytes(jaxpr, arguments, outputs, **how)
    if exchange.shares is not None:
        images = traced.settings.run.global_batch_size // traced.settings.optimizer.accum_steps
        images *= not has_kernel(jaxpr, "mlp_backward")
        peak += _shares_bytes(experiment, exchange.shares, images)
    return experiment, peak, jaxpr


def _shares_bytes(experiment: Experiment, axis: str, images: int) -> int:
    """Bytes that a step of `exchange.share_gradients` holds beyond the jaxpr of one device.

    Whole weights and whole gradients in the dtype of computation; and of each MLP without kernel
    the gradients of its hidden units and its output for so many images, as the compiler puts
    products for weights off to the end, to compute behind the exchanges.
    """
    model, state = experiment.model, experiment.abstract_state
    values = 2 * sum(
        leaf.size for leaf in jax.tree.leaves(state.params) if axis in leaf.sharding.spec
    )
    tokens = model.num_tokens_in_training
    values += images * model.depth * tokens * (model.width + model.mlp_dim)
    return values * jnp.dtype(model.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class _Alone:
    """A config for one device, equal to others with the same `text`."""

    text: str
    settings: Settings = dataclasses.field(compare=False)
    mesh: Mesh = dataclasses.field(compare=False)


def _mesh_of_one(target: Target, is_whole: bool) -> Mesh:
    """A mesh of one device; unless it computes with whole weights, it has no name, and no kernels
    of rows (`devices.kernels`).
    """
    device = describe_devices(target)[0]
    if not is_whole:
        device = dataclasses.replace(device, device_kind="")
    return make_mesh(**dict.fromkeys(AXES, 1), devices=[device])


@functools.lru_cache(maxsize=8)
def _experiment_of(alone: _Alone) -> Experiment:
    return planned_experiment(alone.settings, alone.mesh)


@functools.lru_cache(maxsize=8)
def _trace(alone: _Alone, own_rows: bool) -> Jaxpr:
    """The jaxpr of the gradients on one device; `own_rows`: with the kernels of such devices."""
    experiment = _experiment_of(alone)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), experiment.arguments)

    def gradients(*args: Any) -> Any:
        seen: Any = experiment.step_with(watched(experiment.tx))(*args)[0].opt_state
        return seen[0]

    if own_rows:
        whole = PartitionSpec()
        gradients = jax.shard_map(
            gradients, mesh=alone.mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
    with jax.set_mesh(alone.mesh):
        traced = jax.make_jaxpr(gradients)(*shapes)
    live, _ = partial_eval.dce_jaxpr(traced.jaxpr, True, instantiate=True)
    return live
