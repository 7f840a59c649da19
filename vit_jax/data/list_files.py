"""Reads lists of images and their labels: CSV, TSV and JSON lines; see `picture_list`."""

from __future__ import annotations

import csv
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from vit_jax.data.folder_contents import SPLIT_NAMES
from vit_jax.data.pictures import EXTENSIONS, shown, warn_once
from vit_jax.errors import InputError

_DELIMITERS = ",;\t"
_FILE = ("file", "filename", "file_name", "path", "image")  # names of the column, the first counts
_LABEL = ("label", "class")
_OTHER = ("labels", "split", "group")
_SHOWS = {"0": False, "1": True, "0.0": False, "1.0": True}  # values of the column of a class
_SHOWN = 5  # faults, of a list that has many


class Row(NamedTuple):
    """What a list says of one file.

    split: train, val or test; None where the list has no column `split`.
    group: of the pictures that are held out together; None where there is no column `group`.
    """

    labels: tuple[str, ...]
    split: str | None
    group: str | None


def raise_first(faults: list[str], more: str) -> None:
    """Raise InputError with the first of `faults`, if there are any, and the number of the rest."""
    if len(faults) > _SHOWN:
        faults[_SHOWN:] = [more % (len(faults) - _SHOWN)]
    if faults:
        raise InputError(*faults)


def read_list(
    file: pathlib.Path, multi_label: bool | None, split: str | None = None
) -> dict[str, Row]:
    """{file: its row} of a list, in its order; `split` is the only one that its rows may name.

    Raises: InputError with the first faulty lines.
    """
    found: dict[str, Row] = {}
    faults: list[str] = []
    where = f"data.data_dir: {shown(str(file))}"
    name_of = _namer(file.parent)
    try:
        for line, row in _rows(file):
            try:
                path = name_of(row.pop("file", None))
                found_row = _parse_row(path, row, found, multi_label, split)
            except ValueError as e:
                faults.append(f"{where}, line {line}: {e}")
            else:
                found[path] = found_row
    except InputError:  # of the columns
        raise
    except (ValueError, csv.Error) as e:  # text that is not UTF-8 is a ValueError too
        faults.append(f"{where}: cannot be read ({e}); needed: UTF-8, as CSV or JSON lines")
    raise_first(faults, f"{where}: %d lines more")
    return found


def _namer(folder: pathlib.Path) -> Callable[[Any], str]:
    """path in a list -> the path from the list's resolved `folder` that all its spellings share.

    The function raises ValueError for what is no path.
    """
    real = functools.lru_cache(maxsize=1024)(os.path.realpath)

    def name_of(path: Any) -> str:
        if not isinstance(path, str) or not path.strip():
            raise ValueError("has no file; needed: its path from the folder of the list")
        if "\0" in path:
            raise ValueError(f"{shown(path)} has a NUL in its name; write the file's name")
        if os.path.isabs(path) or ".." in path.split("/"):  # perhaps behind a link
            parent, name = os.path.split(folder / path)
            path = os.path.relpath(os.path.join(real(parent), name), folder)
        path = os.path.normpath(path)
        if os.path.splitext(path)[1] == "":  # as some lists name pictures
            endings = (e for e in EXTENSIONS if os.path.exists(folder / f"{path}{e}"))
            path += next(endings, "")
        return path

    return name_of


def _parse_row(
    path: str,
    row: Mapping[Any, Any],
    found: Mapping[str, Row],
    multi_label: bool | None,
    only: str | None,
) -> Row:
    """The row of `path`; raises ValueError with a fault of it."""
    if None in row:
        raise ValueError(
            f"has {len(row[None]):,} more values than there are columns; write several labels into "
            'one cell, as cat;dog or, where ; separates columns, as "cat;dog"'
        )
    if path in found:
        raise ValueError(
            f"{shown(path)} is listed twice; list it once, with one split, and "
            "all its labels in `labels`"
        )
    labels = tuple(dict.fromkeys([*_labels(row.get("label")), *_labels(row.get("labels"))]))
    if not labels and "labels" not in row:
        raise ValueError(f"{shown(path)} has no label; needed: a value for label or labels")
    if len(labels) != 1 and multi_label is False:
        raise ValueError(
            f"{shown(path)} has {len(labels)} labels; for lists with several, or none, use "
            "--config=folder:multilabel, which sets data.multi_label=true and a loss and an "
            "evaluator for it"
        )
    split = None
    if "split" in row:
        said = str(row["split"] or "").strip()
        split = next((s for s, names in SPLIT_NAMES.items() if said.lower() in names), None)
        if split is None:
            raise ValueError(f"{shown(path)} has the split {said!r}; needed: train, val or test")
        if only not in (None, split):
            raise ValueError(f"{shown(path)} has the split {said!r} in the list of {only}")
    group = row.get("group")
    return Row(labels, split, None if group in (None, "") else str(group))


def _labels(value: Any) -> list[str]:
    """The labels in one cell of a list; [] if it is empty.

    Raises: ValueError if it is neither text nor a number, nor a list of these.
    """
    if value is None or value != value:  # NaN, as pandas writes what is missing
        return []
    if isinstance(value, list):
        return [label for part in value for label in _labels(part)]
    if not isinstance(value, str | int | float):
        raise ValueError(f"has the label {value!r}; needed: text, a number, or a list of these")
    return [label.strip() for label in str(value).split(";") if label.strip()]


def _rows(file: pathlib.Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """(line, {column: value}) of each row, with the columns of a `Row` and `file`.

    Values for which there is no column have the key None. Warns of columns that are not read.

    Raises: InputError if columns are missing; ValueError if a line is no row.
    """
    unknown: set[str] = set()
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = _json_rows if file.suffix.lower() == ".jsonl" else _csv_rows
        for line, row in rows(file, lines):
            known = _find_columns(tuple(row))
            unknown |= {*row} - {*known.values(), None, ""}
            extra = {None: row[None]} if None in row else {}
            yield line, {column: row[name] for column, name in known.items()} | extra
    if unknown:
        names = ", ".join(map(shown, sorted(unknown)))
        warn_once(f"{shown(str(file))}: these columns are not read: {names}")


@functools.lru_cache(maxsize=64)
def _find_columns(names: tuple[Any, ...]) -> Mapping[str, str]:
    """{column: its name in a list} of the columns that are read and are among `names`."""
    given = {name.strip().lower(): name for name in names if name is not None}
    known = {"file": _FILE, "label": _LABEL} | {name: (name,) for name in _OTHER}
    found = {c: next((n for n in options if n in given), None) for c, options in known.items()}
    return {c: given[name] for c, name in found.items() if name is not None}


def _csv_rows(file: pathlib.Path, lines: TextIO) -> Iterator[tuple[int, dict[Any, Any]]]:
    header = lines.readline()
    # Commas, unless another delimiter gives a column for the file.
    names_by = {
        mark: next(csv.reader([header], delimiter=mark, skipinitialspace=True), [])
        for mark in _DELIMITERS
    }
    delimiter = next((m for m in names_by if "file" in _find_columns(tuple(names_by[m]))), ",")
    names = names_by[delimiter]
    columns = _find_columns(tuple(names))
    of_labels = {"label", "labels"} & {*columns}
    # pandas writes the numbers of rows in a column without a name.
    others = [name for name in names if name.strip() and name not in columns.values()]
    classes = [] if of_labels else others
    if "file" not in columns or not (of_labels or classes):
        raise InputError(
            f"data.data_dir: {shown(str(file))}, line 1: has the columns "
            f"{shown(', '.join(names)) or 'none'}; needed: file, and label or labels, or a column "
            "of 0 and 1 for each class"
        )
    reader = csv.DictReader(lines, names, delimiter=delimiter, skipinitialspace=True)
    for row in reader:
        for name in classes:
            if row[name] not in _SHOWS:
                raise InputError(
                    f"data.data_dir: {shown(str(file))}, line {reader.line_num + 1}: has "
                    f"{row[name]!r} for {shown(name)}; needed: a column label or labels, or 0 or 1 "
                    "in the column of each class"
                )
        if classes:
            row["labels"] = [name.strip() for name in classes if _SHOWS[row.pop(name)]]
        yield reader.line_num + 1, row


def _json_rows(file: pathlib.Path, lines: TextIO) -> Iterator[tuple[int, dict[Any, Any]]]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"line {number}: {e.msg}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no object")
        yield number, row
