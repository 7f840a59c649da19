"""The cost of a study on chips that need not be present: the plans of its members."""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError
from vit_jax.config import Settings, own_keys, with_values
from vit_jax.data.dataset_sizes import known_sizes
from vit_jax.data.mixture import parse_mix
from vit_jax.data.subset import subset_size
from vit_jax.inference.pseudo_labels import parse_unlabelled
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.estimates import estimate
from vit_jax.planning.search import rank_layouts
from vit_jax.planning.stages import plan_stages
from vit_jax.planning.targets import Target, described_mesh
from vit_jax.run.setup.opener import Tables
from vit_jax.run.setup.resolve import Changes, resolve
from vit_jax.studies.engine import Study
from vit_jax.studies.tables import Report

# Keys that change the length of a run or its data, but not its step.
_NOT_OF_STEP = ("seed", "duration", "schedule.", "data.subset", "data.num_examples", "evals.",
                "checkpoint.", "log.", "study.", "job.", "init_from")  # fmt: skip
COSTS = {"chip_hours": "chip-hours", "tpu_core_days": "TPU-core-days", "cost": "cost"}  # in tables


class Planner:
    """Calculates the cost of runs on a target; each different step is planned once.

    Times are those at a usual share of the peak; see `estimate`. Input, evaluation, saving and
    start-up are not included.
    """

    def __init__(self, target: Target, price_per_chip_hour: float | None = None):
        self._target, self._price = target, price_per_chip_hour
        self._plans: dict[str, dict[str, Any]] = {}

    def plan(self, config: ConfigDict) -> dict[str, Any]:
        """{"step_s", "steps", "fits", and COSTS} of the run of `config`.

        TPU-core-days are None on GPUs, the cost is None without a price.

        Raises:
          InputError: the config does not suit the target, or its model cannot be calculated.
        """
        asked = Settings.of(config)
        settings = resolve(asked, _Tables(described_mesh(asked, self._target))).settings
        kept = {k: repr(v) for k, v in settings.values.items() if not k.startswith(_NOT_OF_STEP)}
        if len(settings.stages) > 1:
            kept["duration"] = repr(settings.values["duration"])  # decides how long each stage is
        key = json.dumps(kept, sort_keys=True)
        if key not in self._plans:
            layout = rank_layouts(settings, self._target)[0]
            self._plans[key] = plan_stages(layout, self._target, calculate_plan)
        steps = settings.run.duration
        figures = self._plans[key] | {"total_steps": steps}
        run = estimate(figures, self._price)["run"]
        return {
            "steps": steps,
            "fits": figures["memory_bytes"]["fits"],
            **{name: run[name] for name in ("step_s", *COSTS)},
        }


class _Tables(Tables):
    """Also counts what no data set has yet: images of some classes, and pseudo labels."""

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
    num_classes, whole = known_sizes(d.name, d.split, own=own_keys(config, "data"))
    kept = max(round(whole * len(d.classes) / num_classes), 1)
    return kept if d.subset is None else subset_size(d.subset, kept, f"{d.name} {d.split}")


def _count_pseudo(config: ConfigDict) -> int | None:
    """Examples of a run that mixes in pseudo labels that no file holds yet; None: of others.

    As if every image of `study.unlabelled` were labelled, or `study.per_class` of each class.
    """
    d, study = config.data, config.study
    if [part.name for part in parse_mix(d.mix)] != ["pseudo"]:
        return None
    keys = own_keys(config, "data")
    num_classes, own = known_sizes(d.name, d.split, num_classes=d.num_classes, own=keys)
    if study.per_class is not None:
        return own + num_classes * study.per_class
    unlabelled = parse_unlabelled(study.unlabelled, d.split)
    return own + known_sizes(*unlabelled, num_classes=num_classes, own=keys)[1]


def plan_members(study: Study, planner: Planner) -> Report:
    """A row for each training run of a study, and the total of those that could be planned.

    Members that depend on results are planned as if all before them had finished equally well.

    Raises: InputError: the chips suit no training run.
    """
    plans: list[dict[str, Any]] = []
    rows: list[dict[str, str]] = []
    for member in study.all_members():
        if member.command != "train":
            continue
        try:
            plan = planner.plan(study.config_of(member.overrides))
        except InputError as e:
            rows.append({"member": member.name, "note": f"not planned: {'; '.join(e.faults)}"})
            continue
        plans.append(plan)
        note = {} if plan["fits"] else {"note": "does not fit"}
        rows.append({"member": member.name, **_format(plan, f"{plan['step_s'] * 1e3:.3g}"), **note})
    if rows and not plans:
        fault = rows[0]["note"].removeprefix("not planned: ")
        raise InputError(f"no training run of the study can be planned: {fault}")
    known = [name for name in COSTS if plans and plans[0][name] is not None]
    totals = {name: sum(plan[name] for plan in plans) for name in ("steps", *known)}
    return Report([*rows, {"member": f"all {len(plans)}", **_format(totals, "")}])


def _format(plan: Mapping[str, Any], step_ms: str) -> dict[str, str]:
    """{column: number} of a plan, or of totals."""
    costs = {COSTS[name]: f"{value:.4g}" for name, value in plan.items()
             if name in COSTS and value is not None}  # fmt: skip
    return {"steps": f"{plan['steps']:,}", "ms a step": step_ms, **costs}
