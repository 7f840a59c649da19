"""Plans for TPUs: the real training step, compiled ahead of time."""

import contextlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.devices import flops
from vit_jax.planning import hlo
from vit_jax.planning.kernel_cycles import count_cycles, find_kernels
from vit_jax.planning.plan_figures import describe, judge, state_bytes
from vit_jax.planning.targets import Target, plan_mesh, readable_mesh
from vit_jax.run.teachers import planned_experiment

logger = logging.getLogger("vit_jax")


def compile_plan(
    config: ConfigDict, target: Target, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """`plan` for TPUs, by the TPU compiler."""
    mesh = plan_mesh(config, target, devices)
    experiment = planned_experiment(config, mesh)
    figures = describe(config, target, mesh, experiment)
    logger.info(
        "compiling %s for %d x %s, mesh %s, %d images per batch shard, remat %s",
        config.model.name, target.num_slices, target.slice.name, readable_mesh(mesh.shape),
        figures["images_per_way"], figures["remat"],
    )  # fmt: skip
    since = time.perf_counter()
    memory: dict[str, Any] = state_bytes(experiment)
    state = sum(memory.values())
    compiled = None
    with jax.set_mesh(mesh):
        try:
            traced = experiment.trace()
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
        stats = flops.expected_memory(compiled.memory_analysis())
        memory |= {"temporaries": stats.temporaries, "peak": stats.total}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # programs for tpu7x have no text
            program = hlo.Program(compiled.as_text())
    cycles = program and program.cycles()
    kernels = [] if cycles is None else count_cycles(find_kernels(traced.jaxpr.jaxpr), target)
    return figures | {
        "by": "compiler",
        "compile_s": compile_s,
        "memory_bytes": memory | judge(memory["peak"], target, compiled is not None),
        "collectives": program and collective_table(program, mesh),
        "hbm_bytes_accessed": program and program.bytes_accessed(),
        "compiler_cycles": cycles and cycles + sum(row["cycles"] for row in kernels),
        "kernels": kernels,
    }


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


def collective_table(program: hlo.Program, mesh: Mesh) -> list[dict[str, Any]]:
    """The collectives of a step, grouped by kind, mesh axes, network and asynchrony."""
    shape = tuple(mesh.shape.values())
    slices = [getattr(device, "slice_index", None) for device in mesh.devices.flat]
    rows: dict[tuple, dict[str, Any]] = {}
    for each in program.collectives():
        places = np.unravel_index(each.groups[0], shape)
        axes = [axis for axis, at in zip(mesh.shape, places, strict=True) if len(set(at)) > 1]
        crosses = any(len({slices[i] for i in group}) > 1 for group in each.groups)
        key = (each.kind, tuple(axes), "DCN" if crosses else "ICI", each.asynchronous)
        row = rows.setdefault(key, {"count": 0, "bytes": 0, "sent_bytes": 0.0})
        row["count"] += each.count
        row["bytes"] += each.count * each.size
        row["sent_bytes"] += each.count * each.sent
    table = [
        {"kind": kind, "axes": list(axes), "network": network, "asynchronous": asynchronous, **row}
        for (kind, axes, network, asynchronous), row in rows.items()
    ]
    return sorted(table, key=lambda row: -row["sent_bytes"])
