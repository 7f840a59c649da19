"""Learning-rate sweep on a development split, then several runs on the whole training split.

    dev_lr_0.003  dev_lr_0.01 ...      trained on study.train_split, scored on study.dev_split
              best of them
    lr_0.01_seed_0  lr_0.01_seed_1 ... trained on data.split, scored on the evaluator's own split

During the sweep the evaluator sees the development split instead of its own (the test split).

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix B.1.1: three runs, mean and deviation.
"""

from collections.abc import Mapping

from vit_jax.base.errors import Faults
from vit_jax.config import flatten, key
from vit_jax.studies.engine import Found, Member, Metric, Results, Study, seeded
from vit_jax.studies.tables import Best, Report, best_first


class FinetuneSweep(Study):
    """See the module."""

    peak_lrs: tuple[float, ...] = key((), "candidates to choose from")
    train_split: str | None = key(None, "split of data.name to train on during the search")
    dev_split: str | None = key(None, "split of data.name that selects the setting")

    own_keys = ("optimizer.peak_lr",)

    def metrics(self) -> list[Metric]:
        tries = [Metric("dev_split", self.metric, self.config_of(self._dev_splits), chooses=True)]
        return super().metrics() + (tries if len(self.peak_lrs) > 1 else [])

    def check_own(self, faults: Faults) -> None:
        lrs, name = self.peak_lrs, self.metric.partition("/")[0]
        faults.need(lrs and len({*lrs}) == len(lrs) and min(lrs) > 0, f"study.peak_lrs={lrs}: "
                    "needs distinct positive numbers, e.g. 0.01,0.03")  # fmt: skip
        for split in ("train_split", "dev_split") if len(lrs) > 1 else ():
            faults.need(getattr(self, split), f"study.{split}: not set; needs a split of "
                        f"{self.config.data.name}")  # fmt: skip
        faults.need(
            [*self.config.evals] == [name] and "split" in self.config.evals[name],
            f"evals: has {', '.join(self.config.evals) or 'none'}; a sweep needs exactly one "
            f"evaluator, {name!r} of study.metric={self.metric!r}, with one split, so that no "
            "other sees the test split",
        )

    @property
    def _split_key(self) -> str:
        return f"evals.{self.metric.partition('/')[0]}.split"

    @property
    def _dev_splits(self) -> dict[str, str]:
        return {"data.split": self.train_split or "", self._split_key: self.dev_split or ""}

    @property
    def _tries(self) -> dict[float, Member]:
        return {lr: self._run(f"dev_lr_{lr}", lr, self.config.seed, self._dev_splits)
                for lr in self.peak_lrs}  # fmt: skip

    def _run(self, name: str, lr: float, seed: int, splits: Mapping[str, str]) -> Member:
        split = splits.get(self._split_key) or flatten(self.config)[self._split_key]
        place = {"peak_lr": lr, "scored on": split}
        return seeded(name, {"optimizer.peak_lr": str(lr), **splits}, place, seed)

    def best_lr(self, results: Results) -> float | None:
        """The best learning rate of the sweep, the lowest of equally good ones; see `choose`."""
        return self.choose(results, dict(sorted(self._tries.items())), self.metric)

    def members(self, results: Results) -> list[Member]:
        """The runs of the sweep and, once they have all ended, those with the best rate."""
        best = self.best_lr(results)
        tries = [*self._tries.values()] if len(self.peak_lrs) > 1 else []
        if best is None:
            return tries
        seeds = self.all_seeds
        return tries + [self._run(f"lr_{best}_seed_{seed}", best, seed, {}) for seed in seeds]

    def report(self, found: Found) -> Report:
        """Rows of the sweep, the best first, rows of the final runs, and their mean."""
        own_split = flatten(self.config)[self._split_key]
        final = found.at(**{"scored on": own_split})
        tries = [member for member in found.members if member not in final]
        rows = []
        for members in (tries, final):
            new = ({"member": m.name, **m.place, self.label: found.measure(**m.place)}
                   for m in members)  # fmt: skip
            rows += best_first(new, self.label)
        mean = found.measure(**{"scored on": own_split})
        best = self.best_lr(found.results)
        if mean.known:
            rows.append({"member": "mean ± std", "peak_lr": best, "scored on": own_split,
                         self.label: mean})  # fmt: skip
        return Report(rows, {"peak_lr": best}, mean.is_whole, best=Best(found.measured(final)))
