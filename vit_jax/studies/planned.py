"""What a study costs on chips that need not be present: the plans of its members."""

import json
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import flatten, with_values
from vit_jax.data.dataset_sizes import known_sizes
from vit_jax.data.mixture import parse_mix
from vit_jax.data.subset import subset_size
from vit_jax.errors import InputError
from vit_jax.evaluators.metric_names import declared_metrics
from vit_jax.experiment.durations import parse_durations
from vit_jax.inference.pseudo_labels import parse_unlabelled
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.estimates import estimate
from vit_jax.planning.search import rank_layouts
from vit_jax.planning.targets import Target
from vit_jax.run.opener import Tables
from vit_jax.run.resolve import Changes, resolve
from vit_jax.studies.members import FINISHED, Member, Result, Study
from vit_jax.studies.running import member_config

# Keys that change the length of a run or its data, but not its step.
_NOT_OF_STEP = ("seed", "duration", "schedule.", "data.subset", "data.num_examples", "evals.",
                "checkpoint.", "log.", "study.", "job.", "init_from")  # fmt: skip
COSTS = ("hours", "chip_hours", "tpu_core_days", "cost")


class Planner:
    """Calculates the cost of runs on a target; each different step is planned once.

    Times are those at a usual share of the peak; see `estimate`. Input, evaluation, saving and
    start-up are not included.
    """

    def __init__(self, target: Target, price_per_chip_hour: float | None = None):
        self._target, self._price = target, price_per_chip_hour
        self._plans: dict[str, dict[str, Any]] = {}

    def plan(self, config: ConfigDict) -> dict[str, Any]:
        """{"step_s", "steps", "fits", "peak_bytes", and COSTS} of the run of `config`.

        TPU-core-days are None on GPUs, the cost is None without a price.

        Raises:
          InputError: the config does not suit the target, or its model cannot be calculated.
        """
        config = resolve(config, _Tables()).config
        flat = flatten(config)
        kept = {k: repr(v) for k, v in flat.items() if not k.startswith(_NOT_OF_STEP)}
        key = json.dumps(kept, sort_keys=True)
        if key not in self._plans:
            layout = rank_layouts(config, self._target)[0]
            self._plans[key] = calculate_plan(layout, self._target)
        steps = parse_durations(config)["duration"]
        figures = self._plans[key] | {"total_steps": steps}
        run, memory = estimate(figures, self._price)["run"], figures["memory_bytes"]
        return {
            "step_s": run["step_s"],
            "steps": steps,
            "fits": memory["fits"],
            "peak_bytes": memory["peak"],
            **{name: run[name] for name in COSTS},
        }


class _Tables(Tables):
    """Also counts what no data set has yet: pictures of some classes, and pseudo labels."""

    def data(self, config: ConfigDict) -> Changes:
        if config.data.num_examples is None:
            number = _count_classes(config) or _count_pseudo(config)
            config = with_values(config, {"data.num_examples": number})
        return super().data(config)


def _count_classes(config: ConfigDict) -> int | None:
    """Examples of a run that keeps some classes, as if all were equally large; None: of others."""
    d = config.data
    if d.classes is None:
        return None
    num_classes, whole = known_sizes(d.name, d.split)
    kept = max(round(whole * len(d.classes) / num_classes), 1)
    return kept if d.subset is None else subset_size(d.subset, kept, f"{d.name} {d.split}")


def _count_pseudo(config: ConfigDict) -> int | None:
    """Examples of a run that mixes in pseudo labels that no file holds yet; None: of others.

    As if every picture of `study.unlabelled` were labelled, or `study.per_class` of each class.
    """
    d, study = config.data, config.study
    if [part.name for part in parse_mix(d.mix)] != ["pseudo"]:
        return None
    num_classes, own = known_sizes(d.name, d.split, num_classes=d.num_classes)
    if study.per_class is not None:
        return own + num_classes * study.per_class
    return own + known_sizes(*parse_unlabelled(config), num_classes=num_classes)[1]


def plan_study_members(study: Study, config: ConfigDict, planner: Planner) -> list[dict[str, Any]]:
    """`plan_members` for all members, each as if those before it had finished, equally well."""
    metrics = {m: 0.5 for name in config.evals for m in declared_metrics(config, name) or ()}
    done = Result(FINISHED, {"step": 1, "exaflops": 1.0, **metrics, "best": {"step": 1, **metrics}})
    results: dict[str, Result] = {}
    while new := [m for m in study.members(config, results) if m.name not in results]:
        results |= {member.name: done for member in new}
    return plan_members(config, study.members(config, results), planner)


def plan_members(
    config: ConfigDict, members: Iterable[Member], planner: Planner
) -> list[dict[str, Any]]:
    """The plan of each training run among `members`, with its name.

    A run whose plan cannot be calculated has the reason as "error" instead.
    """
    rows = []
    for member in members:
        if member.command != "train":
            continue
        try:
            rows.append({"member": member.name, **planner.plan(member_config(config, member))})
        except InputError as e:
            rows.append({"member": member.name, "error": "; ".join(e.faults)})
    return rows
