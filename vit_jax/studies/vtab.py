"""VTAB-1k: one model fine-tuned on 19 tasks of 1,000 images each, and the mean accuracy.

    dtd_seed_0  dtd_seed_1 ... pets_seed_0 ...   for the tasks whose data are present

All tasks use the config's settings; nothing is tuned. A mean over tasks is only reported if none of
them is missing, since other means are not comparable; its deviation is over the means per seed.

Sources: Zhai et al. 2019 (arXiv:1910.04867), section 2; Dosovitskiy et al. 2020
(arXiv:2010.11929), section 4.2 and appendix B.1.1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.data.vtab import GROUPS, TASKS, find_missing
from vit_jax.errors import Faults, collect_faults
from vit_jax.studies.members import (
    Member,
    Report,
    Result,
    Study,
    check_report,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    value_of,
)

_SPLIT = {"data.split": "train800val200"}


def check(config: ConfigDict) -> None:
    """Raise InputError if the config does not fit, or the data of all tasks are missing."""
    faults = Faults()
    check_report(config, faults)
    name = config.study.metric.partition("/")[0]
    if list(config.evals) != [name]:
        faults.append(
            f"evals: has {', '.join(config.evals) or 'none'}; VTAB needs exactly one evaluator, "
            f"{name!r} of study.metric={config.study.metric!r}"
        )
    missing = find_missing(TASKS, config.data.data_dir)
    if len(missing) == len(TASKS):
        faults.append("\n    ".join([
            f"data.data_dir={config.data.data_dir!r}: the data of all tasks are missing:",
            *dict.fromkeys(missing.values()),
        ]))  # fmt: skip
    collect_faults(faults)


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """One run per seed and task whose data are present; runs do not depend on each other."""
    del results
    missing = find_missing(TASKS, config.data.data_dir)
    return [
        Member(_name(task, seed), {"data.name": f"vtab/{task}", **_SPLIT, "seed": str(seed)})
        for task in TASKS
        if task not in missing
        for seed in _seeds(config)
    ]


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def _name(task: str, seed: int) -> str:
    return f"{task}_seed_{seed}"


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each task, each group and all tasks: mean and deviation over the seeds."""
    missing, seeds = find_missing(TASKS, config.data.data_dir), _seeds(config)
    found = {
        seed: {
            task: value
            for task in TASKS
            if (value := value_of(config, results.get(_name(task, seed)))) is not None
        }
        for seed in seeds
    }
    tasks = {task: mean_and_std([v[task] for v in found.values() if task in v]) for task in TASKS}
    means = {name: _mean_over(tasks_of, found) for name, tasks_of in _averages().items()}
    rows = []
    for task in TASKS:
        ended = [results[_name(task, s)].state for s in seeds if _name(task, s) in results]
        otherwise = "missing" if task in missing else ", ".join(dict.fromkeys(ended)) or "waits"
        rows.append([task, TASKS[task].group, format_mean_std(tasks[task], otherwise)])
    rows += [
        [f"mean of {name}", name, format_mean_std(means[name], "lacks tasks")] for name in means
    ]
    rows += [[f"missing: {task}", TASKS[task].group, how] for task, how in missing.items()]
    return Report(
        columns=["task", "group", metric_in_percent(config)],
        rows=rows,
        values={"tasks": tasks, "means": means, "missing": missing},
        complete=all(len(value) + len(missing) == len(TASKS) for value in found.values()),
    )


def _averages() -> dict[str, list[str]]:
    """{name of an average: its tasks}: one per group, and VTAB's score over all tasks."""
    groups = {group: [name for name, t in TASKS.items() if t.group == group] for group in GROUPS}
    return groups | {"all 19": list(TASKS)}


def _mean_over(names: Sequence[str], found: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Mean and deviation, over the seeds that have results for all of `names`."""
    whole = [values for values in found.values() if values.keys() >= {*names}]
    return mean_and_std([sum(values[name] for name in names) / len(names) for values in whole])


STUDY = Study(lambda config: ("data.name", "data.split"), check, find_members, report)
