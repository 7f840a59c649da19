"""Searches: the largest batch that fits, changes that make a run fit, and the fastest layout.

A layout is a mesh, and what the backward pass recomputes. It changes the speed and the memory of a
step, and its result only by rounding. Layers are unrolled and recompute nothing where that fits;
else as few layers as possible recompute, from the first on. On GPUs, where unrolled layers that
recompute save little memory, they are scanned. A scan with full remat needs the least memory and
compiles the fastest.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from vit_jax import planning
from vit_jax.base.errors import InputError
from vit_jax.config import (
    LAYOUT_KEYS,
    Settings,
    default_config,
    flatten,
)
from vit_jax.config.parts import LARGEST_BATCH
from vit_jax.devices.chips import SLICES
from vit_jax.devices.flops import format_bytes
from vit_jax.models import fields_of, model_of
from vit_jax.models.contract import Model, about, with_known
from vit_jax.models.fields import REMAT
from vit_jax.planning import plan
from vit_jax.planning.calculated import UNCERTAINTY, calculate_layout, uncertainty_of
from vit_jax.planning.estimates import estimate
from vit_jax.planning.stages import plan_each
from vit_jax.planning.targets import Target, batch_ways, described_mesh, target_mesh, target_of

logger = logging.getLogger("vit_jax")

_FSDP = (1, 4, 16, 64)  # over more TPUs the compiler gathers weights by all-reduces
_TRIES = 6  # batch sizes to try for one mesh and one remat policy
_LAYER_TRIES = 4  # numbers of recomputed layers to try for one mesh

# The figures of a plan in a row of `find_layouts`.
_SHOWN = ("mesh", "scan", "remat", "remat_layers", "global_batch_size", "images_per_way",
          "compile_s")  # fmt: skip

Plan = Callable[[Settings], dict[str, Any]]
Changes = dict[str, Any]  # {key of LAYOUT_KEYS: value}


def _model_of(settings: Settings) -> Model:
    return model_of(settings.model, settings.data)


def _calculate(settings: Settings, target: Target) -> dict[str, Any]:
    """`calculate_layout` of the stage that needs the most memory."""
    figures = plan_each(settings, target, calculate_layout)
    return max(figures, key=lambda each: each["memory_bytes"]["peak"])


def meshes(settings: Settings, target: Target) -> list[dict[str, int]]:
    """The shapes of the config's own mesh and of meshes with fsdp 1, 4, 16 and 64.

    On several hosts with GPUs fsdp may also be one host, within which exchanges are fastest.
    """
    own = described_mesh(settings, target).shape
    rest = target.num_chips * target.chip.devices // (own["replica"] * own["tensor"])
    sizes = {*_FSDP}
    if target.chip.is_gpu and target.slice.num_hosts > 1:
        sizes.add(target.slice.chips_per_host)
    splits = {own["fsdp"]} | {fsdp for fsdp in sizes if rest % fsdp == 0}
    return [dict(own) | {"fsdp": fsdp, "data": rest // fsdp} for fsdp in sorted(splits)]


def _remats(settings: Settings) -> tuple[str, ...]:
    """The remat policies of the model's family, with which the objective can compute."""
    if "remat" in fields_of(settings.model.name) and not settings.objective.watches_layers:
        return REMAT["choices"]
    return ("none",)


def largest_batch(settings: Settings, target: Target) -> dict[str, Any]:
    """`plan` of the largest batch that fits, as far as `_TRIES` compilations find it.

    The number of images in each part of the batch is 1, 2, 4 or a multiple of 8. The duration is
    taken from the config, so "90 epochs" stay 90 epochs. If none fits, it is the last plan tried.

    Raises:
      InputError: every batch tried is refused.
    """
    ways = batch_ways(target_mesh(settings, target).shape)
    unit = settings.optimizer.accum_steps
    least, fitting = 0, {}  # the largest number that fits so far, and its plan
    too_many: int | None = None
    figures, fault = {}, InputError()
    number = _round_down(max(settings.run.global_batch_size // ways, unit), unit)
    for _ in range(_TRIES):
        try:
            figures = plan(settings.with_values({"global_batch_size": number * ways}), target)
        except InputError as e:  # such as the batch of a stage, which the devices do not divide
            fault, too_many, number = e, number, _round_down((least + number) // 2, unit)
            if number <= least:
                break
            continue
        memory = figures["memory_bytes"]
        if memory["fits"]:
            least, fitting = number, figures
        else:
            too_many = number
        # Assume that all temporaries grow with the batch: then at least this many images fit.
        growing = memory["temporaries"] + memory["batch"]
        room = memory["capacity"] - memory["peak"] + growing
        number = _round_down(int(number * max(room, 0) / growing), unit)
        number = min(number, _round_down(LARGEST_BATCH // ways, unit))
        if too_many is not None and number >= too_many:
            number = _round_down((least + too_many) // 2, unit)
        if number <= least:
            break
    if not figures:
        raise fault
    return fitting or figures


def _round_down(number: int, unit: int) -> int:
    """The largest number of images up to `number` that suits the chip, a multiple of `unit`."""
    good = number // 8 * 8 if number >= 8 else 2 ** max(number.bit_length() - 1, 0)
    return max(good // unit, 1) * unit if number else 0


def find_remedies(
    settings: Settings, target: Target, figures: Mapping[str, Any], *, calculate: bool = False
) -> list[dict[str, Any]]:
    """Changes that may make a plan fit; each one is planned, up to the first that fits.

    The order is remat, mesh, microbatches, batch. A change that is too large by calculation is
    not compiled. A larger topology is suggested without a plan.

    Args:
      figures: from `plan` or `calculate_plan`.
      calculate: calculate the memory, in seconds, also for a target that is compiled for.

    Returns:
      [{"change": {config key: value} or {"topology": name}, "peak_bytes", "fits"}]; the last two
      are None for a topology.
    """
    both, tries = _changes(settings, target, figures)
    tried: list[dict[str, Any]] = []
    for change in tries:
        if change and change not in [earlier["change"] for earlier in tried]:
            tried += _try(settings, change, target, calculate)
            if tried and tried[-1]["fits"]:
                return tried
    saving = settings.with_values(both)
    if calculate:
        batch = _calculated_batch(saving, target)
    else:
        largest = largest_batch(saving, target)
        batch = largest["memory_bytes"]["fits"] and largest["global_batch_size"]
    least = batch_ways(figures["mesh"]) * settings.optimizer.accum_steps
    tried += _try(settings, both | {"global_batch_size": batch or least}, target, calculate)
    chip, number = target.slice.chip, target.slice.num_chips
    same = [other for other in SLICES.values() if other.chip == chip]
    larger = f"{chip}:{2 * number}" if target.chip.is_gpu else None
    larger = larger or next((other.name for other in same if other.num_chips > number), None)
    if larger is not None and not any(each["fits"] for each in tried):
        tried.append({"change": {"topology": larger}, "peak_bytes": None, "fits": None})
    return tried


def _changes(
    settings: Settings, target: Target, figures: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The change that saves most without smaller parts of a batch, and all changes to try first."""
    shape, remats = figures["mesh"], _remats(settings)
    scan = {"model.scan": True} if target.chip.is_gpu and _may_scan(settings) else {}
    later = remats[remats.index(figures["remat"]) + 1 :]
    heavier = [scan | {"model.remat": remat} for remat in later]
    full = heavier[-1] if heavier else {}
    together = shape["data"] * shape["fsdp"]
    fsdp = max(size for size in range(1, min(together, _FSDP[-1]) + 1) if together % size == 0)
    split = {} if shape["fsdp"] >= fsdp else {
        "mesh.fsdp": fsdp, "mesh.data": together // fsdp, "mesh.replica": shape["replica"],
    }  # fmt: skip
    share, accum = figures["images_per_way"], settings.optimizer.accum_steps
    parts = [accum * times for times in (2, 4, 8, 16, 32) if share % (accum * times) == 0]
    both = full | split
    tries = [*heavier, split, both, *(both | {"optimizer.accum_steps": steps} for steps in parts)]
    return both, tries


def _try(
    settings: Settings, change: Changes, target: Target, calculate: bool
) -> list[dict[str, Any]]:
    """A remedy's row: planned, or calculated if that is asked for or says that it cannot fit.

    There is none if the run would refuse the change, such as microbatches of an objective that
    couples rows.
    """
    changed = settings.with_values(change)
    try:
        memory = _calculate(changed, target)["memory_bytes"]
        if not calculate and memory["fits"]:
            memory = plan(changed, target)["memory_bytes"]
    except InputError:
        return []
    fits = memory["fits"] and not (calculate and memory["may_not_fit"])
    return [{"change": change, "peak_bytes": memory["peak"], "fits": fits}]


def _calculated_batch(settings: Settings, target: Target) -> int | None:
    """The largest batch that surely fits by calculation, or None."""
    ways = batch_ways(described_mesh(settings, target).shape)
    batch = most = min(settings.run.global_batch_size, LARGEST_BATCH)
    for _ in range(2):  # the second time from nearby, because `growing` is not quite linear
        try:
            near = settings.with_values({"global_batch_size": batch})
            memory = _calculate(near, target)["memory_bytes"]
        except InputError:  # such as the batch of a stage, which the devices do not divide
            break
        growing = memory["batch"] + memory["temporaries"]
        certain = 0.999 * memory["capacity"] / (1 + uncertainty_of(settings, target))
        room = max(int(certain) - memory["peak"] + growing, 0)
        images = min(batch * room // growing, most) // ways
        batch = ways * _round_down(images, settings.optimizer.accum_steps)
        if not batch:
            return None
    return batch


def find_layouts(
    settings: Settings,
    target: Target,
    *,
    batches: bool = False,
    price_per_chip_hour: float | None = None,
    goodput: float | None = None,
) -> list[dict[str, Any]]:
    """Layouts for the config's global batch, the fastest that fit first.

    Equally fast ones are sorted by their kernels, or by their exchanges.

    A key of LAYOUT_KEYS that the config sets itself keeps its value. With `batches` the layouts are
    all meshes with all remat policies instead, each with the largest batch that fits. The price and
    the goodput are those of `estimate`.
    """
    plan = functools.partial(planning.plan, target=target)
    found = _largest_batches(settings, target) if batches else _layouts(settings, target, plan)
    rows = []
    for changes, figures in found:
        memory, order = figures["memory_bytes"], (0.0, 0.0)
        row = {"changes": changes, "fits": memory["fits"], "peak_bytes": memory["peak"]}
        row |= {key: figures[key] for key in _SHOWN}
        if memory["fits"]:
            times = estimate(figures, price_per_chip_hour, goodput)
            row["estimate"], kernels = times["run"], times["by_kernel"]
            finer = kernels["step_s"] if kernels else times["roofline"].get("collectives_s", 0.0)
            order = -row["estimate"]["images_per_s"], finer
        rows.append((order, row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _largest_batches(
    settings: Settings, target: Target
) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """All meshes with all remat policies, each with `largest_batch`."""
    for mesh in meshes(settings, target):
        for remat in _remats(settings):
            changes: Changes = {f"mesh.{axis}": size for axis, size in mesh.items()}
            changes["model.remat"] = remat
            figures = largest_batch(settings.with_values(changes), target)
            yield changes | {"global_batch_size": figures["global_batch_size"]}, figures


def rank_layouts(settings: Settings, target: Target) -> list[Settings]:
    """`settings` in the layouts that may fit, the fastest first, by calculation, in seconds.

    The fastest adds least to a step by layers that are computed again or have no kernels, by
    shares of weights that end within a tile, and by exchanges; see `calculate_layout`. Where no
    compiler refuses a layout, as for GPUs, those that may not fit come last. Without `auto` it is
    the config in its own layout, and if none may fit, in the layout of least memory.
    """
    if not settings.run.auto:
        return [settings]
    calculate = functools.partial(_calculate, target=target)
    found = []
    for changes, figures in _layouts(settings, target, calculate):
        memory = figures["memory_bytes"]
        risk = not target.is_compiled_for and memory["may_not_fit"]
        adds = figures["added_s"], figures["hidden_s"]
        order = not memory["fits"], risk, adds, memory["peak"]
        found.append((order, settings.with_values(changes)))
    found.sort(key=lambda each: each[0])
    least = min(found, key=lambda each: each[0][-1])[1]
    return [layout for (fails, *_), layout in found if not fails] or [least]


def plan_layouts(layouts: Sequence[Settings], plan: Plan) -> tuple[Settings, dict[str, Any]]:
    """The first of `rank_layouts` that fits by `plan`, and its plan; else the last.

    Only that one is planned, and those before it, which the compiler has refused.
    """
    for layout in layouts:
        figures = plan(layout)
        if figures["memory_bytes"]["fits"] or layout is layouts[-1]:
            return layout, figures
        logger.info("auto: the compiler finds no room for %s; the next layout follows",
                    describe_layout(layout))  # fmt: skip
    raise AssertionError("there is always a layout")


def describe_layout(settings: Settings) -> str:
    """The flags of LAYOUT_KEYS that are not open, and of several microbatches."""
    known = {key: v for key in LAYOUT_KEYS if (v := settings.values[key]) is not None}
    if (parts := settings.optimizer.accum_steps) > 1:
        known["optimizer.accum_steps"] = parts
    return " ".join(f"--config.{key}={value}" for key, value in known.items())


def choose_layout(settings: Settings, mesh: Mesh, *, may_compile: bool = True) -> Settings:
    """`settings` with the fastest layout that fits the devices of `mesh`, which the log names.

    CPUs, and devices of unknown memory, keep the config's layout. Without `may_compile` the
    calculation decides.

    Raises:
      InputError: no layout fits.
    """
    devices = list(mesh.devices.flat)
    target = target_of(devices)
    if target is None:
        if (device := devices[0]).platform != "cpu":
            kind = device.device_kind
            logger.info("auto: the memory of %s is not known; the layout stays as it is", kind)
        return settings
    target = target._replace(may_compile=may_compile)
    plan = functools.partial(_calculate, target=target)
    if target.is_compiled_for:
        plan = functools.partial(planning.plan, target=target, devices=devices)
    layout, figures = plan_layouts(rank_layouts(settings, target), plan)
    memory = figures["memory_bytes"]
    if not memory["fits"]:
        raise InputError(
            f"auto=true: no layout fits {target.slice.name}; the smallest needs "
            f"{format_bytes(memory['peak'])} of {format_bytes(memory['capacity'])} a device; set a "
            "smaller --config.global_batch_size or a larger --config.optimizer.accum_steps, or try "
            "it with --config.auto=false"
        )
    logger.info("auto: the fastest layout for %s: %s", target.slice.name, describe_layout(layout))
    return layout


def _layouts(
    settings: Settings, target: Target, plan: Plan
) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """The layouts of the keys that the config leaves open, with their plans.

    Its own mesh, if it is not the default one, else several; on each the layouts of the layers.
    """
    free: list[Changes] = [{}]
    if _is_default(settings, ("mesh.data", "mesh.fsdp")):
        free = [{"mesh.data": -1, "mesh.fsdp": mesh["fsdp"]} for mesh in meshes(settings, target)]
    for mesh in free:
        on_mesh = settings.with_values(mesh)
        for changes, figures in _layouts_on(on_mesh, target, plan):
            yield mesh | changes, figures


def _is_default(settings: Settings, keys: tuple[str, ...]) -> bool:
    defaults = flatten(default_config(settings.run.plugins))
    return all(settings.values[key] == defaults[key] for key in keys)


def _may_scan(settings: Settings) -> bool:
    """Whether the config leaves open if layers are scanned, and their parameters get stacked.

    A scan that keeps the parameters apart, as a BiT's, only saves time to compile.
    """
    is_open = settings.model.own.get("scan") is None
    return is_open and about(with_known(_model_of(settings), scan=True)).stacks_layers


def _layouts_on(
    settings: Settings, target: Target, plan: Plan
) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """Layouts of the layers on the config's mesh, with their plans.

    The first needs the least memory: if it does not fit, no other is tried. On GPUs layers that
    recompute are scanned, also with remat "dots", which on TPUs is slower than full remat of some
    layers.
    """
    fields = fields_of(settings.model.name)
    if len(_remats(settings)) == 1 or not _is_default(
        settings, ("model.remat", "model.remat_layers")
    ):
        yield {}, plan(settings)
        return
    scan, free = settings.model.own.get("scan"), _may_scan(settings)
    least = {"model.remat": "full"} | ({"model.scan": True} if free else {})
    none = {"model.remat": "none"} | ({"model.scan": False} if free else {})
    figures = plan(settings.with_values(least))
    yield least, figures
    if not figures["memory_bytes"]["fits"]:
        return
    figures = plan(settings.with_values(none))
    memory = figures["memory_bytes"]
    if memory["fits"]:
        yield none, figures
    if memory["fits"] and not memory["may_not_fit"]:
        return
    if target.chip.is_gpu:
        dots = least | {"model.remat": "dots"}
        yield dots, plan(settings.with_values(dots))
    elif "remat_layers" in fields and not scan:
        yield from _with_least_remat(settings, plan, figures)


def _with_least_remat(
    settings: Settings, plan: Plan, figures: dict[str, Any]
) -> Iterator[tuple[Changes, dict[str, Any]]]:
    """The unrolled layout whose fewest layers recompute; `figures`: the plan without remat."""
    depth = _model_of(settings).depth
    saved, layers = figures["memory_bytes"]["temporaries"] / depth, 0
    for _ in range(_LAYER_TRIES):
        memory = figures["memory_bytes"]
        short = -memory["margin"]
        if memory["may_not_fit"]:  # the next one shall fit for certain
            short = memory["peak"] - memory["capacity"] / (1 + UNCERTAINTY)
        layers += max(math.ceil(short / saved), 1)
        if layers > depth:
            return
        changes = {"model.scan": False, "model.remat": "full", "model.remat_layers": layers}
        figures = plan(settings.with_values(changes))
        if figures["memory_bytes"]["fits"]:
            yield changes, figures
        if figures["memory_bytes"]["fits"] and not figures["memory_bytes"]["may_not_fit"]:
            return
