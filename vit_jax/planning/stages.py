"""Plans of runs of several stages, as `config.sizes` has them: the sums of the stages' plans."""

from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import Settings
from vit_jax.config.base import in_steps


def split_run(settings: Settings) -> list[Settings]:
    """For each stage of a run, a run of its program, as long as the whole."""
    if len(settings.stages) == 1:
        return [settings]
    fixed = in_steps(settings.to_config()) | {"model.keep_tokens_until": None}
    runs = []
    for stage in settings.stages:
        own = {"data.image_size": stage.size, "global_batch_size": stage.batch}
        own |= {"model.keep_tokens": None} if stage.keeps_all else {}
        runs.append(settings.with_values(fixed | own))
    return runs


def plan_stages(settings: Settings, plan: Callable[[Settings], dict[str, Any]]) -> dict[str, Any]:
    """`plan` of a run; of several stages as `add_up` does."""
    runs, stages = split_run(settings), settings.stages
    if len(runs) == 1:
        return plan(settings)
    sizes = [{"image_size": stage.size[0], "total_steps": len(stage.steps)} for stage in stages]
    return add_up([plan(run) | size for run, size in zip(runs, sizes, strict=True)])


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
