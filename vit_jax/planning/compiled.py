"""Plans by XLA's compilers for TPUs and GPUs: the real training step, compiled ahead of time."""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import Settings
from vit_jax.devices import flops
from vit_jax.devices.chips import product_flops_per_s
from vit_jax.planning import hlo
from vit_jax.planning.calculated import scanned
from vit_jax.planning.estimates import speed_of
from vit_jax.planning.kernel_cycles import count_cycles, find_kernels
from vit_jax.planning.plan_figures import describe, judge, state_bytes
from vit_jax.planning.targets import Target, host_of_gpu, plan_mesh, readable_mesh
from vit_jax.run.teachers import planned_experiment

logger = logging.getLogger("vit_jax")

_SAID_EVERY_S = 30
_START_S = 1e-5  # of an exchange between GPUs


def compile_plan(
    settings: Settings, target: Target, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """`plan` by the compiler for the target's chips.

    Only the TPU compiler refuses a program that is too large; for GPUs its bytes decide.
    """
    since, mesh = time.perf_counter(), plan_mesh(settings, target, devices)
    experiment = planned_experiment(settings, mesh)
    with jax.set_mesh(mesh):
        traced, step_flops = experiment.trace(), experiment.flops_per_step
    figures = describe(settings, target, mesh, experiment, scanned(settings, mesh), step_flops)
    logger.info(
        "compiling %s for %d x %s, mesh %s, %d images per batch shard, remat %s",
        settings.model.name, target.num_slices, target.slice.name, readable_mesh(mesh.shape),
        figures["images_per_way"], figures["remat"],
    )  # fmt: skip
    memory: dict[str, Any] = state_bytes(experiment)
    state = sum(memory.values())
    compiled = None
    # Another process compiles the kernels at the same time.
    with saying_how_long(since), futures.ThreadPoolExecutor() as threads, jax.set_mesh(mesh):
        counting = threads.submit(count_cycles, find_kernels(traced.jaxpr.jaxpr), target)
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            needed = needed_memory(str(error), state)
            if needed is None:
                raise
            memory |= {"temporaries": max(needed - state, 0), "peak": needed}
    compile_s = time.perf_counter() - since
    logger.info("%s after %.0f s", "compiled" if compiled else "does not fit", compile_s)
    program = None
    if compiled is not None:
        analysis = compiled.memory_analysis()
        stats = flops.expected_memory(analysis)
        memory |= {"temporaries": stats.temporaries, "peak": stats.total}
        if target.chip.is_gpu:
            aliased = analysis.alias_size_in_bytes
            memory |= {"arguments": stats.arguments, "updated_in_place": aliased}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # programs for tpu7x have no text
            program = hlo.Program(compiled.as_text())
    cycles = program and program.cycles()
    kernels = [] if cycles is None else counting.result()
    times = None
    if program is not None and target.chip.is_gpu:
        kernels, times = kernel_table(program, target), scheduled_s(program, mesh, target)
    return figures | {
        "by": "compiler",
        "compile_s": compile_s,
        "memory_bytes": memory | judge(memory["peak"], target, compiled is not None),
        "collectives": program and collective_table(program, mesh, target),
        "hbm_bytes_accessed": program and program.bytes_accessed(),
        "compiler_cycles": cycles and cycles + sum(row["cycles"] for row in kernels),
        "kernels": kernels,
        "scheduled_s": times,
    }


@contextlib.contextmanager
def saying_how_long(since: float) -> Iterator[None]:
    """Log the seconds since then, by `time.perf_counter`, as long as the body runs."""
    done = threading.Event()

    def say() -> None:
        while not done.wait(_SAID_EVERY_S):
            logger.info("compiling since %.0f s", time.perf_counter() - since)

    threading.Thread(target=say, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def needed_memory(message: str, state: int) -> int | None:
    """The bytes that a program needs if the compiler failed for lack of memory, else None.

    Args:
      message: the compiler's error message.
      state: bytes of the arguments; a message about temporaries does not include them.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    number = r"([\d.]+)([KMGT]?)"
    used = re.search(rf"Used {number} of", message)
    temporaries = re.search(rf"temporaries \({number}\)", message)
    found = used or temporaries
    if found is None:
        return None
    exponent = "KMGT".index(found[2]) + 1 if found[2] else 0
    return int(float(found[1]) * 1024**exponent) + (0 if used else state)


def collective_table(program: hlo.Program, mesh: Mesh, target: Target) -> list[dict[str, Any]]:
    """The collectives of a step, grouped by kind, mesh axes, network and asynchrony."""
    shape, homes = tuple(mesh.shape.values()), _homes(mesh, target)
    rows: dict[tuple, dict[str, Any]] = {}
    for each in program.collectives():
        places = np.unravel_index(each.groups[0], shape)
        axes = [axis for axis, at in zip(mesh.shape, places, strict=True) if len(set(at)) > 1]
        key = (each.kind, tuple(axes), _network(each, homes, target), each.asynchronous)
        row = rows.setdefault(key, {"count": 0, "bytes": 0, "sent_bytes": 0.0})
        row["count"] += each.count
        row["bytes"] += each.count * each.size
        row["sent_bytes"] += each.count * each.sent
    table = [
        {"kind": kind, "axes": list(axes), "network": network, "asynchronous": asynchronous, **row}
        for (kind, axes, network, asynchronous), row in rows.items()
    ]
    return sorted(table, key=lambda row: -row["sent_bytes"])


def _homes(mesh: Mesh, target: Target) -> list[Any]:
    """The slice of each TPU, or the host of each GPU: the fast network ends there."""
    is_gpu, devices = target.chip.is_gpu, mesh.devices.flat
    return [host_of_gpu(d) if is_gpu else getattr(d, "slice_index", None) for d in devices]


def _network(each: hlo.Collective, homes: Sequence[Any], target: Target) -> str:
    """The network of a collective; see `_homes`."""
    if any(len({homes[i] for i in group}) > 1 for group in each.groups):
        return "network" if target.chip.is_gpu else "DCN"
    return target.chip.fast_network


def scheduled_s(program: hlo.Program, mesh: Mesh, target: Target) -> dict[str, float]:
    """Seconds that a GPU computes, that it exchanges, and that the step takes.

    Kernels and exchanges start in XLA's order. A kernel takes its roofline time. One exchange runs
    at a time, beside the kernels, and takes 10 us to start, and then the time to send a device's
    bytes by the ring algorithm.
    """
    works = {work.name: max(bounds_of(work, target).values()) for work in program.work}
    homes = _homes(mesh, target)
    exchanges = {
        name: _START_S + each.sent / speed_of(target.chip, _network(each, homes, target))
        for name, each in program.started().items()
    }
    kernels_s = exchanges_s = now = free = 0.0
    ends: dict[str, float] = {}
    for each in program.executed():
        if (seconds := exchanges.get(each.name)) is not None:
            free = ends[each.name] = max(now, free) + seconds
            exchanges_s += seconds
        elif (seconds := works.get(each.name)) is not None:
            now, kernels_s = now + seconds, kernels_s + seconds
        elif each.opcode.endswith("-done"):
            now = max(now, ends.get(each.operands[0], now))
    return {"kernels": kernels_s, "exchanges": exchanges_s, "step": max(now, free)}


def bounds_of(work: hlo.Work, target: Target) -> dict[str, float]:
    """The least seconds of a GPU's kernel by its products, and by its bytes in memory."""
    chip, products = target.slice.chip, work.flops.items()
    times = (n / product_flops_per_s(chip, dtype, exact=exact) for (dtype, exact), n in products)
    return {
        "flops": sum(times),
        "hbm": work.bytes / target.chip.hbm_bytes_per_s,
    }


def kernel_table(program: hlo.Program, target: Target) -> list[dict[str, Any]]:
    """The kernels of a GPU's step without collectives, grouped by kind and by what bounds them.

    A kernel takes the time of its products at their dtype's peak, or of its bytes at the memory's
    bandwidth, whichever is longer.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for work in program.work:
        if work.kind in hlo.COLLECTIVES:
            continue
        bounds = bounds_of(work, target)
        bound_by = max(bounds, key=bounds.__getitem__)
        row = rows.setdefault(
            (work.kind, bound_by), {"count": 0, "flops": 0, "bytes": 0, "roofline_s": 0.0}
        )
        row["count"] += work.count
        row["flops"] += work.count * sum(work.flops.values())
        row["bytes"] += work.count * work.bytes
        row["roofline_s"] += work.count * bounds[bound_by]
    table = [{"name": name, "bound_by": bound, **row} for (name, bound), row in rows.items()]
    return sorted(table, key=lambda row: -row["roofline_s"])
