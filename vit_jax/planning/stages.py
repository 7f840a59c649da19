"""Plans of runs of several stages, as `config.sizes` has them: the sums of the stages' plans."""

from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import Settings
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.experiment.stages import check_batch
from vit_jax.planning.targets import Target, described_mesh

Plan = Callable[[Settings, Target], dict[str, Any]]


def plan_stages(settings: Settings, target: Target, plan: Plan) -> dict[str, Any]:
    """`plan` of a run on the target; of several stages as `add_up` does.

    Raises:
      InputError: as `plan_each`.
    """
    plans = plan_each(settings, target, plan)
    if len(plans) > 1:
        stages = zip(settings.stages, settings.by_stage, plans, strict=True)
        for i, (stage, run, figures) in enumerate(stages):
            share = run.model.own.get("keep_tokens", 1.0)
            steps = settings.stages.steps_in(i, settings.run.duration)
            figures |= {"keep_tokens": share, "total_steps": steps, "drawn": [*stage.drawn]}
    return add_up(plans)


def plan_each(settings: Settings, target: Target, plan: Plan) -> list[dict[str, Any]]:
    """`plan` of each stage of a run on the target.

    Raises:
      InputError: as `plan` and `check_batch`.
    """
    for run in settings.by_stage:
        if run.run.global_batch_size != settings.run.global_batch_size or (
            run.data.image_size != settings.data.image_size
        ):
            parsed, mesh = parse_preprocessing(run), described_mesh(run, target)
            check_batch(run.run.global_batch_size, run.data, run.optimizer, mesh, parsed)
    return [plan(run, target) for run in settings.by_stage]


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
