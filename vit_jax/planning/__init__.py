"""Plans of a run's memory, communication, time and cost on hardware you do not have.

The real training step is compiled ahead of time on the CPU; memory, collectives, and cycles or
kernels come from the compiler. If libtpu or JAX's plugin for CUDA is not installed or not wanted,
they are calculated. Time and cost are estimated from them.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from vit_jax.base import files
from vit_jax.config import Settings
from vit_jax.config.plugins import digests
from vit_jax.job.software import software
from vit_jax.models.contract import field_names
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.compiled import compile_plan
from vit_jax.planning.stages import plan_stages
from vit_jax.planning.targets import Target
from vit_jax.run.teachers import abstract_teachers


def plan(
    settings: Settings, target: Target, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Plan the run of some settings: figures for JSON.

    Plans are cached by settings, code and versions. The stages of a run are cached one by one.
    Several processes always compile: XLA for GPUs shares the trials of kernels among them, so none
    may find the plan in its cache while another compiles.

    Args:
      settings: resolved; no data are read.
      target: the hardware to plan for.
      devices: its devices if they are present; None: descriptions of them.

    Raises:
      InputError: the settings do not suit the devices.
    """
    return plan_stages(settings, target, functools.partial(_plan, devices=devices))


def _plan(settings: Settings, target: Target, devices: Sequence[Any] | None) -> dict[str, Any]:
    on_gpus = devices is not None and target.chip.is_gpu  # which choose kernels by trying them
    cached = cache_file(settings, target, tried=on_gpus)
    is_alone = devices is None or jax.process_count() == 1
    if is_alone and cached.exists():
        return json.loads(cached.read_text())
    if target.is_compiled_for:
        figures = compile_plan(settings, target, devices)
    else:
        figures = calculate_plan(settings, target)
    figures |= {"software": software()}
    cached.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(files.absolute(cached), json.dumps(figures) + "\n")
    return figures


def is_cached(settings: Settings, target: Target) -> bool:
    """Whether `plan` finds all its figures in the cache."""
    return all(cache_file(run, target).exists() for run in settings.by_stage)


def cache_file(settings: Settings, target: Target, *, tried: bool = False) -> pathlib.Path:
    """The cache file of the plan of `settings` for `target`, named by a hash of all its inputs.

    `tried`: the compiler has tried kernels on the devices.
    """
    said = [
        settings.values,
        *target.slice,
        target.num_slices,
        *([] if target.is_compiled_for else ["calculated"]),
        *(["tried"] if tried else []),
        *filter(None, [target.measured]),
        software() | digests(settings.run.plugins),
        *[_describe(teacher.model) for teacher in abstract_teachers(settings)],
    ]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return files.cache_folder("plans") / f"{digest}.json"


def _describe(model: nn.Module) -> str:
    """The class and the fields of a model, but for functions, whose `repr` is an address."""
    fields = {f: getattr(model, f) for f in field_names(type(model))}
    kept = {f: value for f, value in fields.items() if f not in ("ops", "constrain")}
    return f"{type(model).__name__} {kept!r}"
