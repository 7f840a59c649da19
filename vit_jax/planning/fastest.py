"""The fastest layout of a run that fits: its mesh, and what its backward pass recomputes.

A layout changes the speed and the memory of a step, and its result only by rounding. Layers are
unrolled and recompute nothing where that fits; else as few layers as possible recompute, from the
first on. A scan with full remat needs the least memory and compiles the fastest.
"""

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import planning
from vit_jax.config import default_config, flatten, model_fields
from vit_jax.devices.flops import format_bytes
from vit_jax.errors import InputError
from vit_jax.models import create_model, find_family
from vit_jax.models.fields import field_names
from vit_jax.objectives.features import compares_layers
from vit_jax.planning.estimates import estimate
from vit_jax.planning.search import changed, meshes
from vit_jax.planning.targets import Target, batch_ways, target_of

logger = logging.getLogger("vit_jax")

_TRIES = 4  # numbers of recomputed layers to try for one mesh

Plan = Callable[[ConfigDict], dict[str, Any]]
Changes = dict[str, Any]  # {key of LAYOUT_KEYS: value}


def find_layouts(
    config: ConfigDict,
    target: Target,
    price_per_chip_hour: float | None = None,
    devices: Sequence[Any] | None = None,
) -> list[dict[str, Any]]:
    """Layouts for the config's global batch, the fastest that fit first.

    A key of LAYOUT_KEYS that the config sets itself keeps its value. `devices`: see `plan`.
    """
    plan = functools.partial(planning.plan, target=target, devices=devices)
    rows = []
    for mesh in _free_meshes(config, target):
        for changes, figures in _layouts_on(changed(config, mesh), plan):
            row = {key: figures[key] for key in ("mesh", "scan", "remat", "remat_layers")}
            memory = figures["memory_bytes"]
            row |= {"changes": mesh | changes, "peak_bytes": memory["peak"]}
            row |= {"fits": memory["fits"], "compile_s": figures["compile_s"]}
            if memory["fits"]:
                row["estimate"] = estimate(figures, price_per_chip_hour)["run"]
            rows.append(row)
    return sorted(rows, key=lambda row: -row["estimate"]["images_per_s"] if row["fits"] else 0)


def choose_layout(config: ConfigDict, mesh: Mesh) -> ConfigDict:
    """`config` with the fastest layout that fits the devices of `mesh`, which the log names.

    Devices of unknown memory, such as CPUs, keep the config's layout.

    Raises:
      InputError: no layout fits.
    """
    target = target_of(list(mesh.devices.flat))
    if target is None:
        kind = mesh.devices.flat[0].device_kind
        logger.info("auto: the memory of %s is not known; the layout stays as it is", kind)
        return config
    rows = find_layouts(config, target, devices=list(mesh.devices.flat))
    if not rows[0]["fits"]:
        least = min(row["peak_bytes"] for row in rows)
        capacity = target.chip.usable_bytes // target.chip.devices
        raise InputError(
            f"auto=true: no layout fits {target.slice.name}; the smallest needs "
            f"{format_bytes(least)} of {format_bytes(capacity)} a device; set a smaller "
            "--config.global_batch_size or a larger --config.optimizer.accum_steps"
        )
    changes = rows[0]["changes"]
    said = " ".join(f"--config.{key}={value}" for key, value in changes.items())
    logger.info("auto: the fastest of %d layouts for %s: %s", len(rows), target.slice.name, said)
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    config.update_from_flattened_dict(changes)
    return config


def _free_meshes(config: ConfigDict, target: Target) -> list[Changes]:
    """The meshes to try: the config's own, if it is not the default one, else several."""
    if not _is_default(config, ("mesh.data", "mesh.fsdp")):
        return [{}]
    ways = [mesh for mesh in meshes(config, target)
            if config.global_batch_size % batch_ways(mesh) == 0]  # fmt: skip
    return [{"mesh.data": -1, "mesh.fsdp": mesh["fsdp"]} for mesh in ways]


def _is_default(config: ConfigDict, keys: tuple[str, ...]) -> bool:
    values, defaults = flatten(config), flatten(default_config(config.plugins))
    return all(values[key] == defaults[key] for key in keys)


def _layouts_on(config: ConfigDict, plan: Plan) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """Layouts of the layers on the config's mesh, with their plans.

    The first needs the least memory: if it does not fit, no other is tried.
    """
    module = find_family(config.model.name).module
    fields = field_names(module)
    is_free = "remat" in fields and not compares_layers(config.objective.features)
    if not is_free or not _is_default(config, ("model.remat", "model.remat_layers")):
        yield {}, plan(config)
        return
    scan = config.model.scan
    # A scan that keeps the parameters apart, as a BiT's, only saves time to compile.
    free = "scan" in fields and scan is None and getattr(module, "stacks_layers", True)
    least = {"model.remat": "full"} | ({"model.scan": True} if free else {})
    none = {"model.remat": "none"} | ({"model.scan": False} if free else {})
    figures = plan(changed(config, least))
    yield least, figures
    if not figures["memory_bytes"]["fits"]:
        return
    figures = plan(changed(config, none))
    if figures["memory_bytes"]["fits"]:
        yield none, figures
    elif "remat_layers" in fields and not scan:
        yield from _with_least_remat(config, plan, figures)


def _with_least_remat(
    config: ConfigDict, plan: Plan, figures: dict[str, Any]
) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """The unrolled layout whose fewest layers recompute; `figures`: the plan without remat."""
    depth = _depth(config)
    saved, layers = figures["memory_bytes"]["temporaries"] / depth, 0
    for _ in range(_TRIES):
        layers += max(math.ceil(-figures["memory_bytes"]["margin"] / saved), 1)
        if layers > depth:
            return
        changes = {"model.scan": False, "model.remat": "full", "model.remat_layers": layers}
        figures = plan(changed(config, changes))
        if figures["memory_bytes"]["fits"]:
            yield changes, figures
            return


def _depth(config: ConfigDict) -> int:
    """Number of layers of the config's model."""
    fields = model_fields(config)
    return create_model(config.model.name, 1, config.data.image_size, **fields).depth
