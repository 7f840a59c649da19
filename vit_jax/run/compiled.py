"""Compiles what a run computes at every step."""

import logging
import time

import jax

from vit_jax.devices import flops
from vit_jax.job import watchdog
from vit_jax.run.agreement import compare_programs
from vit_jax.run.build import Run

logger = logging.getLogger("vit_jax")


def compile_step(run: Run) -> jax.stages.Compiled:
    """The compiled train step; logs the memory that it needs."""
    e, since = run.experiment, time.perf_counter()
    lowered = e.lower()
    compare_programs(run.config, lowered)
    with watchdog.phase("compile"):
        compiled = lowered.compile()
    memory = flops.expected_memory(compiled.memory_analysis())
    logger.info(
        "compiled in %.0f s; expected memory per device: %s, including %s of temporaries",
        time.perf_counter() - since,
        flops.format_bytes(memory.total),
        flops.format_bytes(memory.temporaries),
    )
    return compiled


def compile_layer_norms(run: Run) -> jax.stages.Compiled | None:
    """The compiled norms by layer; None if `log.by_layer` is off."""
    if not run.config.log.by_layer:
        return None
    e = run.experiment
    with watchdog.phase("compile"):
        return e.layer_norms.lower(*e.arguments).compile()
