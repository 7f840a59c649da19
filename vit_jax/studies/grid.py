"""Every cell of a table, each trained with several seeds; it may choose a setting, and fine-tune.

An entry of `study.cells` names a cell and the config keys that it changes:

    "1-D | every layer: model.pos_embed=learned_1d; model.pos_embed_at=layers"

is the cell in row "1-D" and column "every layer". If the column names are numbers with a common
unit ("100 images", "1000 images"), each row of the table is also a curve in `study.png`.

    ViT__400_images__weak__seed_0  ViT__400_images__strong__seed_0 ...
              the best of each cell, by study.choose_by
    ViT__400_images__weak__seed_1 ...              its other seeds
    ViT__400_images__weak__seed_0__finetuned ...   from the weights of each

An entry of `study.candidates` names a setting that every cell tries with the first seed:
"weak: optimizer.weight_decay=0.03". Without candidates nothing is chosen. `study.finetune` has the
keys of the fine-tuning, "data.classes=5,6; duration=100 steps"; it starts from a run's weights,
with the model of its cell.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.3: weight decay, dropout and label
smoothing chosen for each size of the data (figure 3), or the same for all sizes and the best
validation accuracy (figure 4).
"""

from collections.abc import Sequence

from vit_jax.base.errors import Faults
from vit_jax.config import key
from vit_jax.studies.engine import (
    Found,
    Member,
    Metric,
    Results,
    Study,
    join_name,
    parse_changes,
    seeded,
)
from vit_jax.studies.figures import draw_table
from vit_jax.studies.tables import Measured, Report, best_first


class Grid(Study):
    """See the module."""

    cells: tuple[str, ...] = key((), '"row | column: key=value; key=value"', form="entries")
    candidates: tuple[str, ...] = key(
        (), 'of every cell: "name: key=value; key=value"', form="entries"
    )
    choose_by: str | None = key(None, "metric that chooses among candidates")
    finetune: str = key("", 'what follows, "key=value; key=value"; "": nothing')
    finetune_metric: str | None = key(None, "metric of the fine-tuned model")

    may_be_empty = ("candidates",)

    @property
    def own_keys(self) -> Sequence[str]:
        return ["init_from"] if self.finetune else []

    def metrics(self) -> list[Metric]:
        finetuned = self.config_of(parse_changes(self.finetune))
        found = [
            Metric("metric", self.metric, self.config),
            Metric("choose_by", self.choose_by or "", self.config, chooses=True),
            Metric("finetune_metric", self.finetune_metric or "", finetuned),
        ]
        return [metric for metric in found if metric.name]

    def check_own(self, faults: Faults) -> None:
        faults.need(len(self.candidates) < 2 or self.choose_by, "study.choose_by: not set; needs "
                    "the metric that chooses among study.candidates, e.g. dev/top1")  # fmt: skip
        faults.need(not self.finetune or self.finetune_metric, "study.finetune_metric: not set; "
                    "needs the metric of the fine-tuned models, e.g. test/top1")  # fmt: skip

    def members(self, results: Results) -> list[Member]:
        """The candidates of all cells, the other seeds of the chosen ones, then fine-tuning."""
        chosen, first = self._chosen(results), self.config.seed
        tried = [(cell, name, first) for name in self._candidates for cell in self.entries["cells"]]
        finals = [(cell, name, seed) for seed in self.all_seeds for cell, name in chosen.items()]
        found = [self._train(*place) for place in dict.fromkeys(tried + finals)]
        if self.finetune:
            found += [self._finetune(*place, results) for place in finals]
        return found

    @property
    def _candidates(self) -> dict[str, dict[str, str]]:
        found = {name: changes for (name,), changes in self.entries["candidates"].items()}
        return found or {"": {}}

    def _chosen(self, results: Results) -> dict[tuple[str, ...], str]:
        """{cell: its best candidate} for the cells that have chosen."""
        chosen = {}
        for cell in self.entries["cells"]:
            tries = {name: self._train(cell, name, self.config.seed) for name in self._candidates}
            best = self.choose(results, tries, self.choose_by or self.metric)
            if best is not None:
                chosen[cell] = best
        return chosen

    def _train(self, cell: tuple[str, ...], candidate: str, seed: int) -> Member:
        place = {"row": cell[0], "column": cell[1], "candidate": candidate, "part": "trained"}
        changes = self.entries["cells"][cell] | self._candidates[candidate]
        return seeded(join_name(*cell, candidate, f"seed_{seed}"), changes, place, seed)

    def _finetune(
        self, cell: tuple[str, ...], candidate: str, seed: int, results: Results
    ) -> Member:
        """The fine-tuning from the weights of a run."""
        run = self._train(cell, candidate, seed)
        source = f"{self.workdir}/{run.name}"
        if self.config.study.point == "best" and run.name in results:
            best = results[run.name].summary.get("best", {})
            source += f"/checkpoints/{best.get('step')}"
        model = {k: v for k, v in self.entries["cells"][cell].items() if k.startswith("model.")}
        changes = {**model, **parse_changes(self.finetune), "init_from": source}
        place = {**run.place, "part": "fine-tuned"}
        return seeded(join_name(run.name, "finetuned"), changes, place, seed, after=run.name)

    def report(self, found: Found) -> Report:
        """A row for each row of the grid and each measure, with the chosen candidate."""
        chosen = self._chosen(found.results)
        table: dict[str, dict[str, dict[str, Measured]]] = {}  # {measure: {row: {column: cell}}}
        metrics = {"trained": self.metric}
        if self.finetune:
            metrics["fine-tuned"] = self.finetune_metric or ""
        for part, metric in metrics.items():
            rows = table[f"{'fine-tuned: ' * (part == 'fine-tuned')}{metric}, %"] = {}
            for row, column in self.entries["cells"]:
                best = chosen.get((row, column))
                place = {"row": row, "column": column, "candidate": best, "part": part}
                cell = Measured() if best is None else found.measure(metric, note=best, **place)
                rows.setdefault(row, {})[column] = cell
        files = draw_table(table)
        part, metric = [*metrics.items()][-1]
        finals = [m for (row, column), best in chosen.items()
                  for m in found.at(row=row, column=column, candidate=best, part=part)]  # fmt: skip
        return Report(
            rows=[
                row
                for measure, rows in table.items()
                for row in best_first(
                    ({"": row, "measure": measure} if self.finetune else {measure: row}) | cells
                    for row, cells in rows.items()
                )
            ],
            files=files,
            best=found.best_of(finals, metric),
        )
