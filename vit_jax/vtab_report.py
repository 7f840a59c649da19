"""VTAB's report: accuracies of its tasks, averaged as the benchmark does."""

from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.data.vtab import GROUPS, TASKS
from vit_jax.errors import collect_faults, nearest


class Report(NamedTuple):
    """Top-1 accuracies; what lacks a task is None, as a mean over others would not compare.

    tasks: of each task that has one, in VTAB's order.
    groups: the mean over each group's tasks.
    mean: over all 19 tasks, so that a group counts by its size.
    missing: the tasks without one.
    """

    tasks: dict[str, float]
    groups: dict[str, float | None]
    mean: float | None
    missing: tuple[str, ...]


def report(top1: Mapping[str, float]) -> Report:
    """The report of accuracies by task, of some or all of the 19.

    Source: Zhai et al. 2019 (arXiv:1910.04867), section 2: the score is the mean over the tasks.

    Raises:
      InputError: naming every task that there is not.
    """
    unknown = [task for task in top1 if task not in TASKS]
    collect_faults([f"{task!r}: no task of VTAB; {nearest(task, list(TASKS))}" for task in unknown])

    def mean(names: list[str]) -> float | None:
        if not top1.keys() >= {*names}:
            return None
        return sum(top1[name] for name in names) / len(names)

    in_group = {group: [n for n, task in TASKS.items() if task.group == group] for group in GROUPS}
    return Report(
        tasks={name: top1[name] for name in TASKS if name in top1},
        groups={group: mean(names) for group, names in in_group.items()},
        mean=mean(list(TASKS)),
        missing=tuple(name for name in TASKS if name not in top1),
    )
