"""A grid whose cells choose a setting on validation data, and may go on to fine-tune.

    ViT__400_pictures__weak__seed_0  ViT__400_pictures__strong__seed_0 ...
              the best of each cell, by study.choose_by
    ViT__400_pictures__weak__seed_1 ...              its other seeds
    ViT__400_pictures__weak__seed_0__finetuned ...   from the weights of each

Cells are those of the study `grid`. An entry of `study.candidates` names a setting that every cell
tries with the first seed: "weak: optimizer.weight_decay=0.03". Without candidates nothing is
chosen. `study.finetune` has the keys of the fine-tuning, "data.classes=5,6; duration=100 steps";
it starts from a run's weights, with the model of its cell. With study.point=best, the metrics of a
run are those of its best step instead of its last one.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 4.3: weight decay, dropout and label
smoothing chosen for each size of the data (figure 3), or the same for all sizes and the best
validation accuracy (figure 4).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config.text import apply_overrides
from vit_jax.errors import Faults, collect_faults
from vit_jax.experiment.durations import split_duration
from vit_jax.studies import grid
from vit_jax.studies.figures import draw_panels
from vit_jax.studies.grid import Cell, parse_cells
from vit_jax.studies.members import (
    DIVERGED,
    FINISHED,
    WORKDIR,
    Member,
    Report,
    Result,
    Study,
    check_evaluator,
    check_report,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    name_member,
    value_of,
    write_csv,
)
from vit_jax.studies.noisy_student import Stage, parse_stages

POINTS = ("last", "best")


class _Run(NamedTuple):
    """A member with its place; candidate "": there are none; finetuned: whether it is that part."""

    cell: Cell
    candidate: str
    seed: int
    finetuned: bool
    member: Member


def find_keys(config: ConfigDict) -> set[str]:
    """Keys that the study sets for its members."""
    keys = {key for stage in _candidates(config) for key in stage.overrides}
    return keys | grid.find_keys(config) | ({"init_from"} if config.study.finetune else set())


def check(config: ConfigDict) -> None:
    """Raise InputError if the section `study` does not describe such a grid."""
    study, faults = config.study, Faults()
    faults.check(grid.check, config)
    candidates = faults.check(parse_stages, study.candidates, "study.candidates") or []
    for entry in candidates:
        faults += apply_overrides(copy.deepcopy(config), list(entry.overrides.items()))
    finetuned = copy.deepcopy(config)
    faults += apply_overrides(finetuned, list(_finetune_keys(config).items()))
    faults.need_known("study.point", study.point, POINTS)
    faults.need(
        study.point != "best" or config.checkpoint.keep_best is not None,
        "study.point='best': needs --config.checkpoint.keep_best=METRIC, which finds that step",
    )
    of_metrics = {"metric": config, "choose_by": config, "finetune_metric": finetuned}
    for key, its_config in of_metrics.items():
        if study[key] is not None:
            if key != "metric":
                _check_metric(its_config, key, faults)
            if study.point == "best" and its_config.checkpoint.keep_best is not None:
                _check_best_step(its_config, key, faults)
    faults.need(
        len(candidates) < 2 or study.choose_by is not None,
        "study.choose_by: not set; needs the metric that chooses among study.candidates, one of "
        "validation data, e.g. dev/top1",
    )
    faults.need(
        not study.finetune or study.finetune_metric is not None,
        "study.finetune_metric: not set; needs the metric of the fine-tuned models, e.g. test/top1",
    )
    collect_faults(faults)


def _check_best_step(config: ConfigDict, key: str, faults: Faults) -> None:
    """Adds a fault if the best step of a run of `config` may lack the metric of study.`key`."""
    best = config.checkpoint.keep_best
    name, finder = config.study[key].partition("/")[0], best.partition("/")[0]
    if {name, finder} <= {*config.evals}:
        every, needed = config.evals[name].every, config.evals[finder].every
        faults.need(
            split_duration(every, f"evals.{name}.every")
            == split_duration(needed, f"evals.{finder}.every"),
            f"study.{key}={config.study[key]!r}: evals.{name}.every={every!r} must be the "
            f"{needed!r} of evals.{finder}, which finds the best step "
            f"(checkpoint.keep_best={best!r}), so that the step has this metric too",
        )


def _check_metric(config: ConfigDict, key: str, faults: Faults) -> None:
    other = copy.deepcopy(config)
    other.study.metric = config.study[key]
    found = Faults()
    check_evaluator(other, found)
    check_report(other, found)
    faults += [fault.replace("study.metric", f"study.{key}") for fault in found]


def _candidates(config: ConfigDict) -> list[Stage]:
    return parse_stages(config.study.candidates, "study.candidates") or [Stage("", {})]


def _finetune_keys(config: ConfigDict) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in config.study.finetune.split(";") if pair.strip()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _trained(cell: Cell, candidate: Stage, seed: int) -> _Run:
    between = f"__{candidate.name}" if candidate.name else ""
    name = name_member(f"{cell.row}__{cell.column}{between}__seed_{seed}")
    overrides = {**cell.overrides, **candidate.overrides, "seed": str(seed)}
    return _Run(cell, candidate.name, seed, False, Member(name, overrides))


def _finetuned(config: ConfigDict, run: _Run, result: Result) -> _Run:
    """The fine-tuning from the weights of `run`, which has finished with `result`."""
    source = f"{WORKDIR}/{run.member.name}"
    if config.study.point == "best":
        source += f"/checkpoints/{result.summary['best']['step']}"
    own = {k: v for k, v in run.cell.overrides.items() if k.startswith("model.")}
    overrides = {**own, **_finetune_keys(config), "init_from": source, "seed": str(run.seed)}
    name = name_member(f"{run.member.name}__finetuned")
    return run._replace(finetuned=True, member=Member(name, overrides))


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def _numbers(config: ConfigDict, result: Result) -> Result:
    """`result` with only the metrics of the best step, if that is what counts."""
    if config.study.point == "last" or "best" not in result.summary:
        return result
    kept = {name: value for name, value in result.summary.items() if "/" not in name}
    return result._replace(summary=kept | result.summary["best"])


def _value(config: ConfigDict, result: Result | None, metric: str) -> float | None:
    """A metric of a member; None if it has diverged, failed or not ended."""
    other = copy.deepcopy(config)
    other.study.metric = metric
    return value_of(other, None if result is None else _numbers(config, result))


def choose(config: ConfigDict, cell: Cell, results: Mapping[str, Result]) -> Stage | None:
    """The best candidate of a cell, the first of equally good ones.

    None until all its candidates have ended, or if all have diverged.
    """
    candidates = _candidates(config)
    if len(candidates) == 1:
        return candidates[0]
    ended = [results.get(_trained(cell, c, config.seed).member.name) for c in candidates]
    if any(result is None or result.state not in (FINISHED, DIVERGED) for result in ended):
        return None
    values = [_value(config, result, config.study.choose_by) for result in ended]
    found = [(value, -i) for i, value in enumerate(values) if value is not None]
    return candidates[-max(found)[1]] if found else None


def _runs(config: ConfigDict, results: Mapping[str, Result]) -> list[_Run]:
    """All runs known so far: candidates, the chosen ones' other seeds, then fine-tuning."""
    cells, first = parse_cells(config.study.cells), config.seed
    runs = [_trained(cell, c, first) for c in _candidates(config) for cell in cells]
    chosen = {id(cell): choose(config, cell, results) for cell in cells}
    finals = [
        _trained(cell, best, seed)
        for seed in _seeds(config)
        for cell in cells
        if (best := chosen[id(cell)]) is not None
    ]
    runs += [run for run in finals if run.seed != first]
    if config.study.finetune:
        for run in finals:
            result = results.get(run.member.name)
            if result is not None and result.state == FINISHED:
                runs.append(_finetuned(config, run, result))
    return runs


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """All members known so far; see the module."""
    return [run.member for run in _runs(config, results)]


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each row of the grid and each measure, with the chosen candidate."""
    cells, runs = parse_cells(config.study.cells), _runs(config, results)
    columns = list(dict.fromkeys(cell.column for cell in cells))
    parts = [(False, config.study.metric)]
    if config.study.finetune:
        parts.append((True, config.study.finetune_metric))
    rows, values, panels, complete = [], [], {}, True
    for finetuned, metric in parts:
        label = ("fine-tuned: " if finetuned else "") + metric_in_percent_of(config, metric)
        found = {
            (cell.row, cell.column): _final_values(config, cell, results, runs, finetuned, metric)
            for cell in cells
        }
        for row in dict.fromkeys(cell.row for cell in cells):
            texts = [_text(config, cells, found, row, column, results) for column in columns]
            rows.append([row, label, *texts])
        for cell in cells:
            numbers = found[cell.row, cell.column]
            best = choose(config, cell, results)
            values.append({
                "row": cell.row, "column": cell.column, "metric": metric, "finetuned": finetuned,
                "chosen": None if best is None else best.name or None,
                **mean_and_std(numbers), "values": numbers,
            })  # fmt: skip
            complete &= len(numbers) == config.study.seeds
        panels[label] = _curves(found, cells)
    files = {"study.csv": _write_csv(config, runs, results).encode()}
    axis = grid.parse_axis(columns)
    if axis is not None and all(panels.values()):
        files["study.png"] = draw_panels(panels, x_label=axis.label)
    return Report(
        columns=["", "measure", *columns],
        rows=rows,
        values={"metric": config.study.metric, "cells": values},
        complete=complete,
        files=files,
    )


def metric_in_percent_of(config: ConfigDict, metric: str) -> str:
    """Label of a metric in tables and figures."""
    other = copy.deepcopy(config)
    other.study.metric = metric
    return metric_in_percent(other)


def _final_values(
    config: ConfigDict,
    cell: Cell,
    results: Mapping[str, Result],
    runs: Sequence[_Run],
    finetuned: bool,
    metric: str,
) -> list[float]:
    """The metric of a cell's runs with the chosen candidate, by seed."""
    best = choose(config, cell, results)
    if best is None:
        return []
    found = [
        _value(config, results.get(run.member.name), metric)
        for run in runs
        if run.cell == cell and run.candidate == best.name and run.finetuned == finetuned
    ]
    return [value for value in found if value is not None]


def _text(
    config: ConfigDict,
    cells: Sequence[Cell],
    found: Mapping[tuple[str, str], list[float]],
    row: str,
    column: str,
    results: Mapping[str, Result],
) -> str:
    """A cell of the table: mean, deviation, the chosen candidate."""
    cell = next((cell for cell in cells if (cell.row, cell.column) == (row, column)), None)
    if cell is None:
        return "-"
    best = choose(config, cell, results)
    text = format_mean_std(mean_and_std(found[row, column]), "waits")
    some = 0 < len(found[row, column]) < config.study.seeds
    text += f" ({len(found[row, column])} of {config.study.seeds})" * some
    return text + (f" [{best.name}]" if best is not None and best.name else "")


def _curves(
    found: Mapping[tuple[str, str], list[float]], cells: Sequence[Cell]
) -> dict[str, list[tuple[float, list[float]]]]:
    """{row: [(number of its column, values in per cent)]} for columns that are numbers."""
    axis = grid.parse_axis(list(dict.fromkeys(cell.column for cell in cells)))
    if axis is None:
        return {}
    curves = {
        row: [(x, [100 * value for value in found[row, column]])
              for x, column in axis.places if found.get((row, column))]
        for row in dict.fromkeys(cell.row for cell in cells)
    }  # fmt: skip
    return {row: places for row, places in curves.items() if places}


def _write_csv(config: ConfigDict, runs: Sequence[_Run], results: Mapping[str, Result]) -> str:
    """One row per ended run: its place, and numbers from its summary."""
    ended: list[tuple[Sequence[Any], Result]] = [
        (
            [run.cell.row, run.cell.column, run.candidate, run.seed,
             "fine-tuned" if run.finetuned else "trained"],
            _numbers(config, results[run.member.name]),
        )
        for run in runs
        if run.member.name in results
    ]  # fmt: skip
    return write_csv(["row", "column", "candidate", "seed", "part"], ended)


STUDY = Study(find_keys, check, find_members, report)
