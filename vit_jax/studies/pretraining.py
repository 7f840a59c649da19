"""Methods of pretraining, compared by their features and by fine-tuning from each, and from none.

    mae__seed_0                 pretrained; its evaluators judge the features
    mae__1_percent__seed_0 ...  fine-tuned from it
    from_scratch__1_percent__seed_0

An entry of `study.stages` names a method and the keys that it changes; one of `study.finetunings`
names a fine-tuning. The config itself is that of fine-tuning, and every fine-tuning is also run
from random weights, with the same number of steps. The study also writes `study.csv`, a row for
each run, and `table.csv`, mean and sample standard deviation of every cell.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import Faults, collect_faults
from vit_jax.studies.members import (
    FINISHED,
    WORKDIR,
    Member,
    Report,
    Result,
    Study,
    accuracies,
    check_evaluator,
    check_report,
    format_mean_std,
    mean_and_std,
    name_member,
    write_csv,
)
from vit_jax.studies.noisy_student import Stage, parse_stages

_FORM = 'needs "name: key=value; key=value"'
_SCRATCH = "from scratch"
_SET = ("seed", "init_from")  # by the study


class Cell(NamedTuple):
    """A cell of the table: a row, a column, and where its value comes from.

    member: name of the member with the first seed, without the seed.
    metric: of its summary.
    """

    row: str
    column: str
    member: str
    metric: str


def methods_of(config: ConfigDict) -> list[Stage]:
    """The methods of pretraining; raises InputError as `parse_stages`."""
    return parse_stages(config.study.stages)


def finetunings_of(config: ConfigDict) -> list[Stage]:
    """The fine-tunings; raises InputError as `parse_stages`."""
    return parse_stages(config.study.finetunings, "study.finetunings")


def find_keys(config: ConfigDict) -> set[str]:
    """Keys that the study sets for its members."""
    stages = [*methods_of(config), *finetunings_of(config)]
    return {*_SET, *(key for stage in stages for key in stage.overrides)}


def check(config: ConfigDict) -> None:
    """Raise InputError if the section `study` names no methods or no fine-tunings."""
    faults = Faults()
    for key, parse in (("stages", methods_of), ("finetunings", finetunings_of)):
        entries = faults.check(parse, config)
        faults.need(config.study[key], f"study.{key}: is empty; {_FORM}")
        for entry in entries or ():
            wrong = sorted({*entry.overrides} & {*_SET})
            faults.need(not wrong, f"study.{key}: {entry.name} sets {', '.join(wrong)}, which the "
                        "study sets; leave it out")  # fmt: skip
    check_report(config, faults)
    check_evaluator(config, faults)
    collect_faults(faults)


def _name(*parts: Any) -> str:
    return name_member("__".join(str(part) for part in parts))


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """Of every seed the pretraining runs, the fine-tunings of those that have finished, and those
    from random weights."""
    found = []
    for seed in _seeds(config):
        sources = {_SCRATCH: "scratch"}
        for method in methods_of(config):
            name = _name(method.name, f"seed_{seed}")
            found.append(Member(name, {**method.overrides, "seed": str(seed)}))
            if name in results and results[name].state == FINISHED:
                sources[method.name] = f"{WORKDIR}/{name}"
        for row, source in sources.items():
            for tuning in finetunings_of(config):
                overrides = {**tuning.overrides, "init_from": source, "seed": str(seed)}
                found.append(Member(_name(row, tuning.name, f"seed_{seed}"), overrides))
    return found


def find_cells(config: ConfigDict) -> list[Cell]:
    """The cells of the table, by rows: the features of a method, then what it is fine-tuned to."""
    own = config.study.metric.partition("/")[0]
    of_features = [
        metric
        for name in config.evals
        if name != own
        for metric in accuracies(config, name) or ()
    ]  # fmt: skip
    cells = []
    for row in [*(method.name for method in methods_of(config)), _SCRATCH]:
        if row != _SCRATCH:
            cells += [Cell(row, metric, row, metric) for metric in of_features]
        for tuning in finetunings_of(config):
            member = f"{row}__{tuning.name}"
            cells.append(Cell(row, tuning.name, member, config.study.metric))
    return cells


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """The table in percent, with "-" for the features of random weights."""
    cells, seeds = find_cells(config), _seeds(config)
    texts, values = {}, []
    for cell in cells:
        runs = [results.get(_name(cell.member, f"seed_{seed}")) for seed in seeds]
        found = [
            run.summary[cell.metric]
            for run in runs
            if run is not None and run.state == FINISHED and cell.metric in run.summary
        ]
        measured = mean_and_std(found)
        states = dict.fromkeys(run.state for run in runs if run is not None)
        some = f" ({len(found)} of {len(seeds)})" * (0 < len(found) < len(seeds))
        texts[cell.row, cell.column] = format_mean_std(measured, ", ".join(states) or "waits")
        texts[cell.row, cell.column] += some
        values.append({"row": cell.row, "column": cell.column, **measured, "values": found})
    rows = list(dict.fromkeys(cell.row for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    members = find_members(config, results)
    ended = [([m.name, m.overrides["seed"]], results[m.name]) for m in members if m.name in results]
    return Report(
        columns=["%", *columns],
        rows=[[row, *(texts.get((row, column), "-") for column in columns)] for row in rows],
        values={"metric": config.study.metric, "cells": values},
        complete=all(len(value["values"]) == len(seeds) for value in values),
        files={
            "study.csv": write_csv(["member", "seed"], ended).encode(),
            "table.csv": _write_table(values).encode(),
        },
    )


def _write_table(values: Sequence[Mapping[str, Any]]) -> str:
    """A row for each cell; nothing where a number is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "mean", "std", "runs"])
    for value in values:
        writer.writerow([
            value["row"], value["column"],
            *("" if value[key] is None else f"{value[key]:.5f}" for key in ("mean", "std")),
            len(value["values"]),
        ])  # fmt: skip
    return text.getvalue()


STUDY = Study(find_keys, check, find_members, report)
