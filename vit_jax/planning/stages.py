"""Plans of runs of several stages, as `config.sizes` has them: the sums of the stages' plans."""

from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import Settings


def plan_stages(settings: Settings, plan: Callable[[Settings], dict[str, Any]]) -> dict[str, Any]:
    """`plan` of a run; of several stages as `add_up` does."""
    runs = settings.by_stage
    if len(runs) == 1:
        return plan(runs[0])
    plans = []
    for stage, run in zip(settings.stages, runs, strict=True):
        share = run.model.own.get("keep_tokens", 1.0)
        own = {"image_size": stage.size, "keep_tokens": share, "total_steps": len(stage.steps)}
        plans.append(plan(run) | own)
    return add_up(plans)


def add_up(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last of the `plans` of stages, with the memory of the largest.

    "stages" has the figures of each; `estimate` adds their times and costs. One plan stays as it
    is.
    """
    if len(plans) == 1:
        return plans[0]
    memory = [figures["memory_bytes"] for figures in plans]
    largest = max(memory, key=lambda each: (not each["fits"], each["peak"]))
    steps = sum(figures["total_steps"] for figures in plans)
    return {**plans[-1], "memory_bytes": largest, "total_steps": steps, "stages": plans}
