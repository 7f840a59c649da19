"""Methods of pretraining, compared by their features and by fine-tuning from each, and from none.

    mae__seed_0                 pretrained; its evaluators judge the features
    mae__1_percent__seed_0 ...  fine-tuned from it
    from_scratch__1_percent__seed_0

An entry of `study.stages` names a method and the keys that it changes; one of `study.finetunings`
names a fine-tuning. The config itself is the fine-tuning's, and every fine-tuning is also run
from random weights, with the same number of steps.
"""

from typing import Any

from vit_jax.config import key
from vit_jax.studies.engine import Found, Member, Results, Study, accuracies, join_name, seeded
from vit_jax.studies.tables import Report, best_first

_SCRATCH = "from scratch"


class Pretraining(Study):
    """See the module."""

    stages: tuple[str, ...] = key((), 'runs by name, "name: key=value; key=value"', form="entries")
    finetunings: tuple[str, ...] = key((), '"name: key=value; key=value"', form="entries")

    own_keys = ("init_from",)

    def members(self, results: Results) -> list[Member]:
        """Of every seed the pretraining runs, then the fine-tunings from each and from none."""
        found = []
        for seed in self.all_seeds:
            sources = {_SCRATCH: ""}
            for (method,), changes in self.entries["stages"].items():
                sources[method] = name = join_name(method, f"seed_{seed}")
                place = {"method": method, "finetuning": ""}
                found.append(seeded(name, changes, place, seed))
            for method, source in sources.items():
                init_from = {"init_from": f"{self.workdir}/{source}" if source else "scratch"}
                for (tuning,), changes in self.entries["finetunings"].items():
                    name = join_name(method, tuning, f"seed_{seed}")
                    place = {"method": method, "finetuning": tuning}
                    found.append(seeded(name, changes | init_from, place, seed, after=source))
        return found

    def report(self, found: Found) -> Report:
        """The table in percent, with "-" for the features of random weights."""
        own = self.metric.partition("/")[0]
        of_features = [metric for name in self.config.evals if name != own
                       for metric in accuracies(self.config, name) or ()]  # fmt: skip
        rows = []
        for method in [*(name for (name,) in self.entries["stages"]), _SCRATCH]:
            row: dict[str, Any] = {"%": method}
            for metric in of_features if method != _SCRATCH else ():
                row[metric] = found.measure(metric, method=method, finetuning="")
            for (tuning,) in self.entries["finetunings"]:
                row[tuning] = found.measure(method=method, finetuning=tuning)
            rows.append(row)
        tuned = [member for member in found.members if member.place["finetuning"]]
        columns = [name for (name,) in self.entries["finetunings"]]
        return Report(best_first(rows, *columns), best=found.best_of(tuned))
