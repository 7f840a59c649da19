"""The plan of a run: its fastest layout, its time and cost, and remedies where it does not fit."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from vit_jax import planning
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.devices.chips import Slice
from vit_jax.planning.calculated import calculate_memory, calculate_plan
from vit_jax.planning.estimates import estimate
from vit_jax.planning.measured import Certificate
from vit_jax.planning.plan_tables import answer
from vit_jax.planning.search import find_remedies, plan_layouts, rank_layouts
from vit_jax.planning.stages import add_up, plan_stages
from vit_jax.planning.targets import Target

logger = logging.getLogger("vit_jax")


def find_target(
    found: Slice | None, num_slices: int, certificate: Certificate | None, may_compile: bool
) -> Target:
    """The hardware to plan for.

    Args:
      found: from `chips.find_slices`; None: the CPU of the certificate.
      num_slices: slices joined by DCN; 1 for a CPU.

    Raises:
      InputError: there is no slice, or the certificate is of another chip.
    """
    if found is not None:
        if certificate is not None:
            certificate.check_chip(found.chip)
        return Target(found, num_slices, may_compile=may_compile and certificate is None)
    if certificate is None or not certificate.is_of_cpu:
        raise InputError("--topology: missing; only the certificate of a CPU needs none")
    if num_slices != 1:
        raise InputError(
            f"--num_slices={num_slices}: joins slices of TPUs, and {certificate.source} is of a "
            "CPU; leave it out"
        )
    return certificate.target


def plan_run(
    settings: Settings,
    target: Target,
    known: Mapping[str, Any],
    certificate: Certificate | None = None,
) -> dict[str, Any]:
    """The figures of the fastest layout that the settings leave open, with time and cost.

    Args:
      settings: from `targets.settle`.
      known: the price and the goodput of `estimate`.
      certificate: replaces assumptions on time and memory.

    Raises:
      InputError: the settings do not suit the target.
    """
    layouts = rank_layouts(settings, target)
    if target.is_compiled_for and not planning.is_cached(layouts[0], target):
        logger.info("%s", _first_answer(layouts[0], target, known))
    settings, figures = plan_layouts(layouts, functools.partial(planning.plan, target=target))
    if certificate is not None:
        step = certificate.nearest_to(figures)
        stages, scaled = figures.get("stages", [figures]), target._replace(scale=step.scale)
        for stage, run in zip(stages, settings.by_stage, strict=True):
            stage |= {"memory_bytes": calculate_memory(run, scaled), "measured": step.model}
        figures = add_up(stages)
        known = {**known, "share_of_peak": step.share_of_peak, "measured": target.measured}
    return _estimated(figures, settings, target, known)


def _estimated(
    figures: dict[str, Any], settings: Settings, target: Target, known: Mapping[str, Any]
) -> dict[str, Any]:
    """`figures` of the plan of `settings` with time and cost, and if it does not fit with remedies.

    The remedies are found by calculation or by the compiler, as the figures were.
    """
    figures |= {"estimate": estimate(figures, **known)}
    if not figures["memory_bytes"]["fits"]:
        by_calculation = figures["by"] != "compiler"
        figures["remedies"] = find_remedies(settings, target, figures, calculate=by_calculation)
    return figures


def _first_answer(settings: Settings, target: Target, known: Mapping[str, Any]) -> str:
    """The answer by calculation, which takes seconds, while the compiler takes minutes."""
    try:
        figures = plan_stages(settings, target, calculate_plan)
    except InputError:  # there are no formulas for it, or the compiler's plan is refused too
        return "No quick answer by calculation. The compiler's figures follow."
    shown = answer(_estimated(figures, settings, target, known))
    return f"{shown}. The compiler's figures follow."
