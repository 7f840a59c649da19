"""Every cell of a table, each trained with several seeds: mean and deviation.

An entry of `study.cells` names a cell and the config keys that it changes:

    "1-D | every layer: model.pos_embed=learned_1d; model.pos_embed_at=layers"

is the cell in row "1-D" and column "every layer". The study also writes `study.csv`, one row per
run, and, if the column names are numbers with a common unit ("100 images", "1000 images"),
`study.png`, where each row of the table is a curve.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import Faults, collect_faults
from vit_jax.studies.figures import draw_curves
from vit_jax.studies.members import (
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

_FORM = 'needs "row | column: key=value; key=value"'


class Cell(NamedTuple):
    """A cell of the table, with the overrides of its runs."""

    row: str
    column: str
    overrides: Mapping[str, str]

    def member(self, seed: int) -> Member:
        name = name_member(f"{self.row}__{self.column}__seed_{seed}")
        return Member(name, {**self.overrides, "seed": str(seed)})


def parse_cells(texts: Sequence[str]) -> list[Cell]:
    """Parse `study.cells`.

    Raises:
      InputError: lists all entries that are malformed or not unique.
    """
    cells, faults = [], Faults()
    for text in texts:
        place, _, changes = text.partition(":")
        row, bar, column = (part.strip() for part in place.partition("|"))
        pairs = [change.partition("=") for change in changes.split(";")]
        overrides = {key.strip(): value.strip() for key, _, value in pairs}
        if not (row and bar and column and all(overrides) and all(e for _, e, _ in pairs)):
            faults.append(f"study.cells: {text!r}: {_FORM}")
        elif len(overrides) < len(pairs):
            faults.append(f"study.cells: {text!r}: sets a key twice; remove one")
        else:
            cells.append(Cell(row, column, overrides))
    names = [cell.member(0).name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    faults += [
        f"study.cells: two cells share the runs {name[:-1]}SEED; rename one" for name in twice
    ]
    collect_faults(faults)
    return cells


def find_keys(config: ConfigDict) -> set[str]:
    """Keys that the cells set."""
    return {key for cell in parse_cells(config.study.cells) for key in cell.overrides}


def check(config: ConfigDict) -> None:
    """Raise InputError if the section `study` does not describe a grid."""
    faults = Faults()
    if not config.study.cells:
        faults.append(f"study.cells: is empty; {_FORM}")
    if "seed" in (faults.check(find_keys, config) or ()):
        faults.append("study.cells: must not set seed; each cell runs with study.seeds seeds, "
                      "starting at the config's seed")  # fmt: skip
    check_report(config, faults)
    check_evaluator(config, faults)
    collect_faults(faults)


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """Runs of all cells with the first seed, then with the second, and so on."""
    del results  # members do not depend on each other
    cells = parse_cells(config.study.cells)
    return [cell.member(seed) for seed in _seeds(config) for cell in cells]


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """The table, with "-" for cells that are not in the grid."""
    cells, seeds = parse_cells(config.study.cells), _seeds(config)
    row_names = list(dict.fromkeys(cell.row for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in cells))
    by_place = {(cell.row, cell.column): cell for cell in cells}

    def values_of(cell):
        found = [value_of(config, results.get(cell.member(seed).name)) for seed in seeds]
        return [value for value in found if value is not None]

    def text_of(place):
        if place not in by_place:
            return "-"
        ended = [results.get(by_place[place].member(seed).name) for seed in seeds]
        states = dict.fromkeys(result.state for result in ended if result is not None)
        text = format_mean_std(measured[place], ", ".join(states) or "waits")
        some = 0 < len(values[place]) < len(seeds)
        return text + f" ({len(values[place])} of {len(seeds)})" * some

    values = {place: values_of(cell) for place, cell in by_place.items()}
    measured = {place: mean_and_std(found) for place, found in values.items()}
    rows = [[row, *(text_of((row, column)) for column in columns)] for row in row_names]
    files = {"study.csv": _write_csv(cells, seeds, results).encode()}
    axis = parse_axis(columns)
    if axis is not None and any(values.values()):
        points = {
            row: [(x, [100 * value for value in values[row, column]])
                  for x, column in axis.places if values.get((row, column))]
            for row in row_names
            if any(values.get((row, column)) for column in columns)
        }  # fmt: skip
        y_label = metric_in_percent(config)
        files["study.png"] = draw_curves(points, x_label=axis.label, y_label=y_label)
    return Report(
        columns=[metric_in_percent(config), *columns],
        rows=rows,
        values={
            "metric": config.study.metric,
            "cells": [
                {"row": row, "column": column, **measured[row, column], "values": found}
                for (row, column), found in values.items()
            ],
        },
        complete=all(len(found) == len(seeds) for found in values.values()),
        files=files,
    )


class Axis(NamedTuple):
    """Columns that are numbers with a common unit: (number, column) by size, and the unit."""

    places: list[tuple[float, str]]
    label: str


def parse_axis(columns: Sequence[str]) -> Axis | None:
    """The axis of `columns`; None if they are not numbers with a common unit, or fewer than two."""
    matches = [re.fullmatch(r"(\d+(?:\.\d+)?) (.+)", column) for column in columns]
    if len(columns) < 2 or not all(matches) or len({match[2] for match in matches}) > 1:
        return None
    places = sorted((float(match[1]), match[0]) for match in matches)
    return Axis(places, matches[0][2])


def _write_csv(cells: Sequence[Cell], seeds: Sequence[int], results: Mapping[str, Result]) -> str:
    """One row per ended run: cell, seed, state, and numbers from its summary."""
    ended = [
        ([cell.row, cell.column, seed], results[cell.member(seed).name])
        for cell in cells
        for seed in seeds
        if cell.member(seed).name in results
    ]
    return write_csv(["row", "column", "seed"], ended)


STUDY = Study(find_keys, check, find_members, report)
