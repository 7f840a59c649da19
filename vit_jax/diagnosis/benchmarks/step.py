"""Measures the training step on this machine's devices, without the input pipeline."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.base.pictures import Pictures
from vit_jax.base.tree import Batch
from vit_jax.config import Settings
from vit_jax.data.elements import PARALLEL_CALLS
from vit_jax.devices import flops
from vit_jax.devices.chips import count_chips
from vit_jax.diagnosis.benchmarks.rounds import measure, spread, spread_of_ratio
from vit_jax.experiment.experiment import Experiment
from vit_jax.run.teachers import planned_experiment

MATMUL_SIZE = 1536  # size of the float32 products to which steps on a CPU are compared
_WARM_UP_STEPS = 2
_NUM_ROUNDS = 10
_BUDGET_S = 20.0  # duration of all steps if their number is not given


def measure_step(
    settings: Settings,
    mesh: Mesh,
    *,
    num_steps: int | None = None,
    num_rounds: int | None = None,
    matmul_size: int = MATMUL_SIZE,
) -> dict[str, Any]:
    """Compile and run the training step of a config on a synthetic batch on the devices.

    On a CPU, each round also times float32 products of two square matrices with as many FLOPs on
    the same threads. `ratio_to_matmul` is the ratio of the CPU seconds of steps and products in one
    round; it would be 1 if only matrix products took time.

    Args:
      settings: resolved; no data are read.
      mesh: the mesh of the devices.
      num_steps: number of steps to time; None runs for 20 seconds, at least 5 steps, and at least
        one a round.
      num_rounds: rounds into which the steps are divided; None: at most 10.
      matmul_size: rows and columns of the matrices.

    Returns:
      Figures for JSON; measured ones as {"median", "min", "max"} of the rounds. `mfu` is None if
      the chip's peak is unknown.
    """
    experiment = planned_experiment(settings, mesh)
    with jax.set_mesh(mesh):
        take_steps, compile_s, memory = compile_steps(experiment, settings.data.num_classes)
        take_steps(_WARM_UP_STEPS)
        if num_steps is None:
            since = time.perf_counter()
            take_steps(1)
            in_budget = math.floor(_BUDGET_S / (time.perf_counter() - since))
            num_steps = max(5, in_budget, num_rounds or 1)
        num_rounds = min(num_steps, num_rounds or _NUM_ROUNDS)
        images = settings.run.global_batch_size * (num_steps // num_rounds)
        calls = {"steps": lambda: take_steps(num_steps // num_rounds)}
        on_cpu, products = mesh.devices.flat[0].platform == "cpu", 0
        if on_cpu:
            products = max(1, round(images * experiment.flops_per_image / (2 * matmul_size**3)))
            calls["matmul"] = make_matmuls(matmul_size, products)
            calls["matmul"]()
        costs = measure(calls, num_rounds)

    images_per_s = spread([images / cost.wall_s for cost in costs["steps"]])
    cpu_s = [cost.cpu_s / images for cost in costs["steps"]]
    device_kind = mesh.devices.flat[0].device_kind
    figures = {
        "device_kind": device_kind,
        "num_devices": mesh.size,
        "cpu_cores": PARALLEL_CALLS,
        "mesh": dict(mesh.shape),
        "global_batch_size": settings.run.global_batch_size,
        "num_params": experiment.num_params,
        "gflop_per_image": experiment.flops_per_image / 1e9,
        "compile_s": compile_s,
        "memory_per_device_bytes": memory.total,
        "steps": num_rounds * (num_steps // num_rounds),
        "images_per_s": images_per_s,
        "cpu_s_per_image": spread(cpu_s),
        "mfu": flops.mfu(
            experiment.flops_per_image * images_per_s["median"],
            device_kind=device_kind,
            num_chips=count_chips(mesh.devices.flat),
        ),
    }
    if on_cpu:
        # The products have nearly as many FLOPs as the steps; scale their time by the difference.
        scale = experiment.flops_per_image / (products * 2 * matmul_size**3)
        matmul_s = [cost.cpu_s * scale for cost in costs["matmul"]]
        figures |= {
            "matmul_size": matmul_size,
            "matmul_cpu_s_per_image": spread(matmul_s),
            "ratio_to_matmul": spread_of_ratio(cpu_s, matmul_s),
        }
    return figures


def compile_steps(
    experiment: Experiment, num_classes: int
) -> tuple[Callable[[int], None], float, flops.Memory]:
    """(a function that takes a number of steps, compilation time in seconds, memory of a step).

    The memory is taken at the first step.
    """
    since = time.perf_counter()
    compiled = experiment.lower().compile()
    compile_s = time.perf_counter() - since
    state = batch = frozen = metrics = None

    def take_steps(number: int) -> None:
        nonlocal state, batch, frozen, metrics
        if state is None:
            state, batch = experiment.init(), made_up_batch(experiment, num_classes)
            frozen = jax.tree.map(  # zeros in place of the weights of the teachers
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), experiment.abstract_frozen
            )
        for _ in range(number):
            state, metrics = compiled(state, batch, *frozen)
        jax.block_until_ready((state, metrics))

    return take_steps, compile_s, flops.expected_memory(compiled.memory_analysis())


def made_up_batch(experiment: Experiment, num_classes: int) -> dict[str, jax.Array]:
    """A training batch of noise on the devices, sharded as the step expects."""
    shapes = experiment.abstract_batch
    images = [name for name, leaf in shapes.items() if leaf.dtype == jnp.uint8]
    one_label, text = len(shapes["label"].shape) == 1, experiment.batch.text

    def make(key: jax.Array) -> Batch:
        texts = {}
        if text is not None:
            ids = jax.random.randint(key, shapes["text"].shape, 0, text.vocabulary)
            texts = {"text": ids, "text_mask": jnp.ones(shapes["text_mask"].shape)}
        made: dict[str, Any] = {
            name: jax.random.bits(key, shapes[name].shape, jnp.uint8) for name in images
        }
        if isinstance(shapes.get("image"), Pictures):  # each a row of all its patches
            full = jnp.asarray([[1, shapes["image"].shape[1]]], jnp.int32)
            made["image"] = Pictures(made["image"], jnp.tile(full, (len(made["image"]), 1)))
        return texts | {
            **made,
            "label": jax.random.randint(
                key, shapes["label"].shape, 0, num_classes if one_label else 2, jnp.int32
            ).astype(shapes["label"].dtype),
            "mask": jnp.ones(shapes["mask"].shape, jnp.float32),
            "id": jnp.arange(shapes["id"].size, dtype=jnp.int32),
        }

    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def make_matmuls(size: int, number: int) -> Callable[[], None]:
    """A function that runs `number` products of float32 `size` x `size` matrices in sequence."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.float32)
    product = jax.jit(jnp.matmul).lower(a, b).compile()

    def multiply() -> None:
        for _ in range(number):
            jax.block_until_ready(product(a, b))

    return multiply
