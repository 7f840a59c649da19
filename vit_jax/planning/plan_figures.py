"""The parts of a plan that need no compiler: sizes, sharding, bytes of the state."""

import collections
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.base import tree
from vit_jax.config import Settings
from vit_jax.config import stored as stored_config
from vit_jax.devices import sharding
from vit_jax.devices.chips import count_chips
from vit_jax.experiment.experiment import Experiment
from vit_jax.experiment.model_name import describe_model
from vit_jax.models.contract import about
from vit_jax.planning.targets import Target, batch_ways, plan_mesh
from vit_jax.run.teachers import planned_experiment


def describe(
    settings: Settings,
    target: Target,
    mesh: Mesh,
    experiment: Experiment,
    counted: Experiment | None = None,
    step_flops: int | None = None,
) -> dict[str, Any]:
    """The figures of a plan that need no compiler.

    Args:
      counted: an experiment with the same FLOPs that is traced faster; None: `experiment`.
      step_flops: FLOPs of a step; None: as many as `counted` has.
    """
    ways = batch_ways(mesh.shape)
    counted, model = counted or experiment, about(experiment.model)
    by_sizes = None
    if experiment.objective.is_single_pass and experiment.freeze is None:
        by_sizes = model.flops_by_sizes
    if step_flops is None:
        with jax.set_mesh(mesh):
            step_flops = counted.flops_per_step
    return {
        "config": stored_config.to_json(settings.to_config()),
        "model": describe_model(settings.model),
        "topology": target.slice.name,
        "num_slices": target.num_slices,
        "num_chips": count_chips(mesh.devices.flat),
        "num_hosts": target.slice.num_hosts * target.num_slices,
        "devices_per_chip": target.chip.devices,
        "mesh": dict(mesh.shape),
        "remat": model.remat,
        "remat_layers": model.remat_layers,
        "scan": model.scan,
        "image_size": settings.data.image_size,
        "global_batch_size": settings.run.global_batch_size,
        "images_per_way": settings.run.global_batch_size // ways,
        "accum_steps": settings.optimizer.accum_steps,
        "total_steps": experiment.total_steps,
        "num_params": experiment.num_params,
        "dropout": getattr(model, "dropout", 0.0),
        "host_bytes_at_save": host_bytes_at_save(experiment, mesh),
        "flops": {
            "forward_macs_per_image": counted.forward_flops_per_image // 2,
            "model_per_image_by_sizes": by_sizes,
            "model_per_image_by_jaxpr": counted.flops_per_image,
            "model_per_step": counted.flops_per_image * settings.run.global_batch_size,
            "counted_per_step": step_flops,
        },
    }


def judge(
    peak: int, target: Target, fits: bool = True, uncertainty: float = 0.0,
    above: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare `peak` bytes with a device's capacity; `fits` False records that it does not fit.

    The true peak may be (1 + uncertainty) times smaller, and (1 + above) times larger; `above` is
    `uncertainty` by default. "fits": it may fit. "may_not_fit": it may be too large all the same.
    """
    above = uncertainty if above is None else above
    capacity = target.chip.usable_bytes // target.chip.devices
    fits = fits and peak <= capacity * (1 + uncertainty)
    return {
        "capacity": capacity,
        "margin": capacity - peak,
        "fits": fits,
        "may_not_fit": fits and peak * (1 + above) > capacity,
    }


def state_bytes(experiment: Experiment) -> dict[str, int]:
    """The bytes that a device holds permanently, and its part of a batch."""
    state = experiment.abstract_state
    parts = {
        "params": state.params,
        "optimizer": state.opt_state,
        "ema": (state.ema, state.ema_model_state),
        "other_state": (state.step, state.model_state, state.objective_state),
        "teachers": experiment.abstract_frozen,
        "batch": experiment.abstract_batch,
    }
    return {name: sharding.bytes_per_device(part) for name, part in parts.items()}


def accessed_bytes(memory: Mapping[str, int], accum_steps: int) -> int:
    """The bytes that a device reads and writes in a step, given its `memory_bytes`.

    One read and one write of each byte of the state and the batch, and of the temporaries of each
    microbatch.
    """
    return 2 * (memory["peak"] + memory["temporaries"] * (accum_steps - 1))


def host_bytes_at_save(experiment: Experiment, mesh: Mesh) -> int:
    """The maximum bytes of host memory while the state is copied there to be saved.

    The host holds one copy of each different part of the state on its devices.
    """
    by_host = collections.defaultdict(list)
    for device in mesh.devices.flat:
        slice_index = getattr(device, "slice_index", None)
        by_host[slice_index, device.process_index].append(device)
    devices = set(next(iter(by_host.values())))

    @functools.cache
    def count_parts(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> int:
        indices = sharding.devices_indices_map(shape)
        return len({str(index) for device, index in indices.items() if device in devices})

    return sum(
        count_parts(leaf.shape, leaf.sharding) * sharding.bytes_per_device(leaf)
        for leaf in jax.tree.leaves(experiment.abstract_state)
    )


def show_sharding(settings: Settings, target: Target) -> list[dict[str, Any]]:
    """The name, shape, sharding and bytes per device of every parameter."""
    experiment = planned_experiment(settings, plan_mesh(settings, target))
    return [
        {
            "name": name,
            "shape": list(leaf.shape),
            "sharding": [list(a) if isinstance(a, tuple) else a for a in leaf.sharding.spec],
            "bytes_per_device": sharding.bytes_per_device(leaf),
        }
        for name, leaf in tree.flatten_names(experiment.abstract_state.params).items()
    ]
