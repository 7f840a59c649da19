"""VTAB-1k: one model fine-tuned on 19 tasks of 1,000 images each, and the mean accuracy.

    caltech101_seed_0  cifar100_seed_0 ... caltech101_seed_1 ...   for tasks whose data are there

All tasks use the config's settings; nothing is tuned. A mean over tasks is only reported if none of
them is missing, since other means are not comparable; its deviation is over the means per seed.

Sources: Zhai et al. 2019 (arXiv:1910.04867), section 2; Dosovitskiy et al. 2020
(arXiv:2010.11929), section 4.2 and appendix B.1.1.
"""

import functools
import statistics

from vit_jax.base.errors import Faults
from vit_jax.data.sources.vtab import GROUPS, TASKS, find_missing
from vit_jax.studies.engine import Found, Member, Results, Study, seeded
from vit_jax.studies.tables import Measured, Report


class Vtab(Study):
    """See the module."""

    own_keys = ("data.name", "data.split")

    @functools.cached_property
    def missing(self) -> dict[str, str]:
        """{task without data: how to get them}."""
        return find_missing(TASKS, self.config.data.data_dir)

    def check_own(self, faults: Faults) -> None:
        faults.need(len(self.missing) < len(TASKS), "\n    ".join([
            f"data.data_dir={self.config.data.data_dir!r}: the data of all tasks are missing:",
            *dict.fromkeys(self.missing.values()),
        ]))  # fmt: skip

    def members(self, results: Results) -> list[Member]:
        """A run of every task whose data are present with the first seed, then the second ..."""
        data = {task: {"data.name": f"vtab/{task}", "data.split": "train800val200"}
                for task in TASKS if task not in self.missing}  # fmt: skip
        return [seeded(f"{task}_seed_{seed}", keys, {"task": task}, seed)
                for seed in self.all_seeds for task, keys in data.items()]  # fmt: skip

    def report(self, found: Found) -> Report:
        """A row for each task, each group and all tasks: mean and deviation over the seeds."""
        tasks = {task: found.measure(task=task) for task in TASKS}
        groups = {group: [name for name, t in TASKS.items() if t.group == group]
                  for group in GROUPS}  # fmt: skip
        means = {}
        for name, members in {**groups, "all 19": [*TASKS]}.items():
            by_seed = zip(*(tasks[task].values for task in members), strict=False)
            whole = [statistics.fmean(values) for values in by_seed if None not in values]
            means[name] = Measured(whole)
        rows = [{"task": task, "group": TASKS[task].group,
                 self.label: "missing" if task in self.missing else cell}
                for task, cell in tasks.items()]  # fmt: skip
        rows += [{"task": f"mean of {name}", "group": name,
                  self.label: mean if mean.known else "lacks tasks"}
                 for name, mean in means.items()]  # fmt: skip
        rows += [{"task": f"missing: {task}", "group": TASKS[task].group, self.label: how}
                 for task, how in self.missing.items()]  # fmt: skip
        return Report(rows, {"missing": self.missing})
