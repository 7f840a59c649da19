"""Inference: images a second by batch size, and the largest batch that fits into a device.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.5, figures 12 and 13: peak inference
speed by image size, and the largest batch per core.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.config import Settings
from vit_jax.devices import flops
from vit_jax.devices.chips import memory_limit
from vit_jax.devices.mesh import AXES, make_mesh
from vit_jax.diagnosis.benchmarks.rounds import measure, spread
from vit_jax.models.contract import about
from vit_jax.planning.estimates import USUAL_SHARE
from vit_jax.planning.targets import Target, find_devices
from vit_jax.run.teachers import planned_experiment

BATCH_SIZES = (1, 8, 64)
_NUM_ROUNDS = 3


def compile_forward(
    settings: Settings, mesh: Mesh, batch_size: int
) -> tuple[Any, Callable[[], tuple[Any, jax.Array]], int]:
    """(compiled, function that makes its arguments, bytes) of the forward pass of the model.

    It is compiled for the one device of `mesh`.

    Parameters are float32, images (B, H, W, channels) float32; the model computes in `model.dtype`.
    """
    model = planned_experiment(settings, mesh).model
    shape = (batch_size, *settings.data.image_size, about(model).channels)
    everywhere = NamedSharding(mesh, P())
    images = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)
    init = functools.partial(model.init, train=False)
    with jax.set_mesh(mesh):
        variables = jax.eval_shape(init, jax.random.key(0), images)
        variables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), variables
        )
        forward = jax.jit(functools.partial(model.apply, train=False))
        compiled = forward.lower(variables, images).compile()

    def arguments() -> tuple[Any, jax.Array]:
        # No zeros: accelerators multiply these faster, as they need less power.
        rng = np.random.default_rng(0)

        def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
            values = 0.02 * rng.standard_normal(x.shape, np.float32)
            return jax.device_put(values.astype(x.dtype), everywhere)

        return jax.tree.map(draw, variables), draw(images)

    return compiled, arguments, flops.expected_memory(compiled.memory_analysis()).total


def largest_batch(memory: dict[int, int], capacity: int) -> int:
    """The largest batch that fits; memory grows on a straight line through two sizes of `memory`.

    Args:
      memory: {batch size: bytes} of at least two sizes; the two largest are used.
      capacity: bytes of the device.
    """
    (small, at_small), (large, at_large) = sorted(memory.items())[-2:]
    each = max((at_large - at_small) / (large - small), 1.0)
    return max(int((capacity - at_large) / each) + large, 0)


def measure_inference(settings: Settings, *, num_rounds: int | None = None) -> dict[str, Any]:
    """Compile and run the forward pass on the first of this machine's devices.

    Returns:
      Figures for JSON: images a second for each of BATCH_SIZES as {"median", "min", "max"} of the
      rounds, or None for a batch that does not fit; bytes, and the largest batch by these bytes.
    """
    device = jax.devices()[0]
    settings, mesh = _on_one_device(settings, device)
    capacity, by = _capacity(device)
    rows: dict[str, dict[str, Any]] = {}
    memory = {}
    for batch_size in BATCH_SIZES:
        forward, make_arguments, memory[batch_size] = compile_forward(settings, mesh, batch_size)
        row = rows[str(batch_size)] = {"images_per_s": None, "memory_bytes": memory[batch_size]}
        if memory[batch_size] > capacity:
            continue
        arguments = make_arguments()

        def call(forward: Callable = forward, arguments: tuple[Any, jax.Array] = arguments) -> None:
            jax.block_until_ready(forward(*arguments))

        call()
        costs = measure({"forward": call}, num_rounds or _NUM_ROUNDS)["forward"]
        row["images_per_s"] = spread([batch_size / cost.wall_s for cost in costs])
    return {
        "device_kind": device.device_kind,
        "gflop_per_image": _gflop_per_image(settings, mesh),
        "batch": rows,
        "capacity_bytes": capacity,
        "capacity_by": by,
        "largest_batch": largest_batch(memory, capacity),
    }


def plan_inference(settings: Settings, target: Target) -> dict[str, Any]:
    """The same for a chip that is not here.

    The chip's compiler gives the memory, if it is installed; else this machine's CPU compiler,
    which is only a guide. Images a second are the roofline's bound by FLOPs, for GPUs at a usual
    share of it.
    """
    chip, compiled_for = target.chip, target.is_compiled_for
    device = find_devices(target)[0] if compiled_for else jax.devices("cpu")[0]
    settings, mesh = _on_one_device(settings, device)
    memory = {size: compile_forward(settings, mesh, size)[-1] for size in BATCH_SIZES[1:]}
    capacity = chip.usable_bytes // chip.devices
    kind = "GPU" if chip.is_gpu else "TPU"
    gflop = _gflop_per_image(settings, mesh)
    share = USUAL_SHARE if chip.is_gpu else 1.0
    return {
        "topology": target.slice.name,
        "gflop_per_image": gflop,
        "memory_bytes": {str(size): number for size, number in memory.items()},
        "memory_by": f"the {kind} compiler" if compiled_for else "the CPU compiler, as a guide",
        "capacity_bytes": capacity,
        "largest_batch": largest_batch(memory, capacity),
        "images_per_s": share * chip.peak_flops / chip.devices / (gflop * 1e9),
        "images_per_s_by": f"{share:.0%} of the peak of a device, by FLOPs",
    }


def _on_one_device(settings: Settings, device: Any) -> tuple[Settings, Mesh]:
    """`settings` for one device, and the mesh of that device."""
    sizes = {f"mesh.{axis}": 1 for axis in AXES}
    settings = settings.with_values(sizes | {"optimizer.accum_steps": 1})
    return settings, make_mesh(**dict.fromkeys(AXES, 1), devices=[device])


def _gflop_per_image(settings: Settings, mesh: Mesh) -> float:
    return 2 * flops.forward_macs(planned_experiment(settings, mesh).model) / 1e9


def _capacity(device: jax.Device) -> tuple[int, str]:
    """(bytes, who says so) that programs may use on a device."""
    if (limit := memory_limit(device)) is not None:
        return limit, "the device's limit"
    return int(np.int64(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")), "all of the RAM"
