"""A list of image files and their labels: CSV, TSV, or JSON lines.

    file,label              file,labels               {"file": "1.jpg", "label": "cat"}
    1.jpg,cat               1.jpg,cat;dog             {"file": "2.jpg", "labels": ["cat", "dog"]}

`data.data_dir` is the list (a tenth of it is held out), or a folder with a list for each split:
train.csv, val.jsonl, test.csv, with any name that a split's folder may have. Paths are relative to
the folder of the list, or absolute. An image may have several labels, or none, in the column
`labels`; or a column for each class, with 1 where the image shows it. The column `split` says the
split of each image; images with the same text in the column `group` are held out together.

The column `caption` says what an image shows. JSON may have several texts there; a CSV has a line
for each of them. A list that is read for captions may lack labels: they count if each image has
one. A CSV with captions has no columns of classes.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from vit_jax.base.errors import InputError, collect_faults, few, shown
from vit_jax.data.captions import NAMES, as_captions
from vit_jax.data.class_names import as_label, places_of, sorted_classes
from vit_jax.data.contract import DataSet, Request, Source
from vit_jax.data.given_labels import counts_matter, say_others
from vit_jax.data.images.files import File, group_links, look_up, sort_by_split, split_of, warn_once
from vit_jax.data.images.formats import EXTENSIONS
from vit_jax.data.sources.folder import check_split, of_classes, own_images, pick, split_files

SUFFIXES = (".csv", ".tsv", ".jsonl")
_DELIMITERS = ",;\t"
# Column -> its names; the first that a list has counts.
_COLUMNS = {
    "file": ("file", "filename", "file_name", "path", "image"),
    "label": ("label", "class"),
    "caption": NAMES[:2],
    **{name: (name,) for name in ("labels", "split", "group")},
}
_SHOWS = {"0": False, "1": True, "0.0": False, "1.0": True}  # values of the column of a class
_SHOWN = 5  # faults, of a list that has many


class Row(NamedTuple):
    """The labels of one file in a list, its split and its group.

    split: train, val or test; None where the list has no column `split`.
    group: of the images that are held out together; None where there is no column `group`.
    captions: of the image.
    """

    labels: tuple[str, ...]
    split: str | None
    group: str | None
    captions: tuple[str | bytes, ...] = ()


Rows = dict[str, Row]


class Lists(NamedTuple):
    """The lists of a data set.

    root: their folder, without links.
    by_split: {split: file}; of a single list `train` only.
    """

    root: pathlib.Path
    by_split: dict[str, pathlib.Path]

    def read(self, split: str, multi_label: bool | None) -> dict[str, Rows]:
        """{split: {file: its row}} of train and of `split`; of `all`, and of a single list, of all.

        Raises: InputError with the first faulty lines, or if a file is in two splits.
        """
        found: dict[str, Rows] = {}
        if len(self.by_split) == 1:
            for path, row in read_list(self.by_split["train"], multi_label).items():
                found.setdefault(row.split or "train", {})[path] = row
        else:
            for name, file in self.by_split.items():
                if split == "all" or name in ("train", split):
                    found[name] = read_list(file, multi_label, name)
        _check_disjoint(self.root, found)
        return found

    def names(self, found: Iterable[str] | None = None) -> list[str]:
        """The splits that can be asked for; `found`: in a single list that has been read."""
        if len(self.by_split) == 1 and found is None:
            found = self.read("all", multi_label=True)
        has_test = "test" in {*self.by_split, *(found or ())}
        return ["train", "val", *["test"] * has_test, "all"]


def find_lists(data_dir: str | os.PathLike | None) -> Lists:
    """The lists that `data_dir` names: one file, or all files of a folder.

    Raises: InputError if there is none for training, or two for a split.
    """
    if data_dir is None:
        needed = "a list of files and labels, or a folder with train.csv"
        raise InputError(f"data.data_dir=None: needs {needed}; give --config.data.data_dir=PATH")
    path = pathlib.Path(data_dir).expanduser()
    where = f"data.data_dir={shown(path)!r}"
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{where}: needs a name that ends in {' or '.join(SUFFIXES)}")
        root = path.parent.resolve()  # TensorFlow takes link/.. for the link's folder
        return Lists(root, {"train": root / path.name})
    if not path.is_dir():
        raise InputError(f"{where}: no such list; give --config.data.data_dir=PATH")
    path = path.resolve()
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
    found, others = sort_by_split(files, where)
    if others:
        warn_once(f"{shown(path)}: ignored {few(p.name for p in others)}, which name no split")
    if "train" not in found:
        raise InputError(f"{where}: holds no train.csv or train.jsonl; add one, or name the list")
    return Lists(path, found)


class List(DataSet):
    """The images of a list; splits `train`, `val`, `all`, and `test` where there are some for it.

    Classes are the labels of the training images, sorted, as numbers if all are numbers. Without
    images for `val` a tenth of the training list is held out by the first labels, as `divider`
    says. With `multi_label` labels are float32 (C,), 1 for each class that the image shows; None:
    they are if an image has several labels, or none.
    """

    is_own = True

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        return find_lists(data_dir).names()

    def open(self, request: Request) -> Source:
        """Raises InputError naming faulty lines, or labels that the training list lacks."""
        split, divider, multi_label = request.split, request.divider, request.multi_label
        lists = find_lists(request.data_dir)
        by_split = lists.read(split, None if request.captions else multi_label)
        check_split(split, lists.names(by_split), lists.root)
        file = lists.by_split.get(split, lists.by_split["train"])
        training = by_split.get("train", {})
        rows = by_split.get(split, training)
        if split == "all":
            rows = {path: row for found in by_split.values() for path, row in found.items()}
        files, groups = _look_up(file, rows)
        if training and split in ("train", "val"):
            firsts = {path: next(iter(row.labels), "") for path, row in training.items()}
            given = "val" in {*lists.by_split, *by_split}
            splits = split_files(divider, lists.root, lists.root, firsts, None if given else groups)
            training = {path: training[path] for path in splits}
            if split == "train" or not given:
                rows = pick(splits, split, rows, file)
        elif split != "all" and (begun := training.keys() & divider.begun_with()):
            training = {path: row for path, row in training.items() if path in begun}
            classes = {path: row.labels for path, row in rows.items()}
            kept = of_classes(_labels_of(training), classes, file)
            rows = {path: rows[path] for path in kept}
        if split not in ("train", "all"):
            divider.warn_of_trained(f"{shown(file)}, {split}", rows)
        class_names: tuple[str, ...] | None = _labels_of(training, divider.class_names)
        counts = np.array([len(row.labels) for row in (*training.values(), *rows.values())])
        if request.captions and not counts_matter(counts, multi_label):
            class_names, multi_label = None, False
        _check_labels(lists, file, class_names, rows)
        if multi_label is None:
            multi_label = bool((counts != 1).any())
        label_of = places_of(class_names or ())
        one_hot = np.eye(len(label_of), dtype=np.float32)
        labels: dict[str, Any] = {}
        for path, row in rows.items():
            numbers = [0] if class_names is None else [label_of[name] for name in row.labels]
            labels[path] = one_hot[numbers].sum(axis=0) if multi_label else numbers[0]
        source = own_images(request, lists.root, file.parent, files, labels, class_names, file)
        captions = [row.captions for row in rows.values()]
        is_read = request.captions and any(captions)
        return dataclasses.replace(
            source, captions=functools.partial(map, captions.__getitem__) if is_read else None
        )


def _labels_of(rows: Mapping[str, Row], known: Sequence[str] = ()) -> tuple[str, ...]:
    return sorted_classes({label for row in rows.values() for label in row.labels}, known)


def _check_labels(
    lists: Lists, file: pathlib.Path, class_names: Sequence[str] | None, rows: Rows
) -> None:
    """Raise InputError unless there are images, and the training images have all their labels.

    `class_names` None: labels do not count.
    """
    where, train = f"data.data_dir: {shown(file)}", lists.by_split["train"].name
    if class_names is not None and not class_names:
        raise InputError(f"{where}: the training images in {train} have no labels; add some")
    known = places_of(class_names or ())
    unknown = [label for label in _labels_of(rows) if label not in known]
    if unknown and class_names is not None:
        raise InputError(f"{where} has the labels {unknown}, which {train} lacks; add them there")
    if not rows:
        raise InputError(f"{where} lists no images; add some")


def _look_up(file: pathlib.Path, rows: Rows) -> tuple[dict[str, File], dict[str, str]]:
    """({path: file}, {path: group}) of the files of a list.

    Files with several names, by links, are a group, and groups that share a file are one.

    Raises: InputError that names a pipe or a device, whose reading may never end.
    """
    files: dict[str, File] = {}
    for path in rows:
        found = look_up(file.parent / path)
        if found is None:
            raise InputError(f"data.data_dir: {shown(file)}: {shown(path)} is no file")
        files[path] = found
    labels = {path: ";".join(row.labels) for path, row in rows.items()}
    links = group_links(file.parent, files, labels)
    groups = {path: f"group {row.group}" for path, row in rows.items() if row.group}
    return files, _join(links, groups)


def _join(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """{path: group}, in which all groups that share a path, directly or not, are one."""
    joined: dict[str, str] = {}

    def first(group: str) -> str:
        while group in joined:
            group = joined[group]
        return group

    for path in one.keys() & other.keys():
        kept, gone = sorted((first(one[path]), first(other[path])))
        if kept != gone:
            joined[gone] = kept
    return {path: first(group) for path, group in {**one, **other}.items()}


def _check_disjoint(root: pathlib.Path, found: Mapping[str, Rows]) -> None:
    """Raise InputError if a file or a group is in two splits."""
    first: dict[str, str] = {}
    faults = []
    for split, rows in found.items():
        groups = {f"the group {row.group}" for row in rows.values() if row.group}
        for name in sorted({*map(shown, rows), *groups}):
            if (other := first.setdefault(name, split)) != split:
                faults.append(f"{name} is in {other} and in {split}; list it in one of them")
    _raise_first(f"data.data_dir: {shown(root)}: ", faults)


def _raise_first(where: str, faults: Sequence[str]) -> None:
    """Raise InputError with the first of `faults`, if there are any, and the number of the rest."""
    more = [f"{len(faults) - _SHOWN} lines more"] * (len(faults) > _SHOWN)
    collect_faults([f"{where}{fault}" for fault in [*faults[:_SHOWN], *more]])


def read_list(file: pathlib.Path, multi_label: bool | None, only: str | None = None) -> Rows:
    """{file: its row} of a list, in its order; `only` is the one split that its rows may name.

    Raises: InputError with the first faulty lines.
    """
    found: Rows = {}
    faults: list[str] = []
    others: list[str] = []
    try:
        for line, row in _rows(file):
            try:
                path = _name_of(file.parent, row.pop("file", None))
                new = _parse_row(path, row, only)
                if multi_label is False and len(new.labels) != 1:
                    others.append(f"line {line}: {path}")
                before = found.get(path, new._replace(captions=()))
                if path in found and not (new.captions and before[:3] == new[:3]):
                    remedy = "list it once, with all its labels in `labels`"
                    raise ValueError(f"{shown(path)} is listed twice; {remedy}")
                found[path] = new._replace(captions=before.captions + new.captions)
            except ValueError as e:
                faults.append(f"line {line}: {e}")
    except (ValueError, csv.Error) as e:
        faults.append(str(e))
    if others:
        faults.insert(0, say_others(others))
    _raise_first(f"data.data_dir: {shown(file)}, ", faults)
    return found


def _name_of(folder: pathlib.Path, path: Any) -> str:
    """The path from a list's resolved `folder` that all spellings of `path` in the list share."""
    if not isinstance(path, str) or not path.strip():
        raise ValueError("has no file; needed: its path from the folder of the list")
    if os.path.isabs(path) or ".." in path.split("/"):  # perhaps behind a link
        parent, name = os.path.split(folder / path)
        path = os.path.relpath(os.path.join(_real_path(parent), name), folder)
    path = os.path.normpath(path)
    if os.path.splitext(path)[1] == "":  # as some lists name images
        path += next((e for e in EXTENSIONS if os.path.exists(folder / f"{path}{e}")), "")
    return path


_real_path = functools.lru_cache(maxsize=1024)(os.path.realpath)


def _parse_row(path: str, row: Mapping[Any, Any], only: str | None) -> Row:
    """The row of `path`; raises ValueError with a fault of it."""
    labels = tuple(dict.fromkeys([*as_labels(row.get("label")), *as_labels(row.get("labels"))]))
    split = split_of(str(row.get("split") or "").strip())
    if "split" in row and (split is None or only not in (None, split)):
        needed = only or "train, val or test"
        raise ValueError(f"{shown(path)} has the split {row['split']!r}; needed: {needed}")
    group = row.get("group")
    captions = tuple(as_captions(row.get("caption")))
    return Row(labels, split, None if group in (None, "") else str(group), captions)


def as_labels(value: Any) -> list[str]:
    """The labels in one cell of a list, or in one value of JSON; [] if it is empty.

    Raises: ValueError if it is neither text nor a whole number, nor a list of these.
    """
    if isinstance(value, list):
        return [label for part in value for label in as_labels(part)]
    parts = value.split(";") if isinstance(value, str) else [value]
    return [*filter(None, map(as_label, parts))]


def _rows(file: pathlib.Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """(line, {column: value}) of each row, with the columns of a `Row` and `file`.

    Warns of columns that are not read.

    Raises: ValueError if columns are missing, or a line is no row.
    """
    unknown: set[str] = set()
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = _json_rows(lines) if file.suffix.lower() == ".jsonl" else _csv_rows(lines)
        for line, row in rows:
            known = _find_columns(tuple(row))
            unknown |= {*row} - {*known.values(), ""}
            yield line, {column: row[name] for column, name in known.items()}
    if unknown:
        warn_once(f"{shown(file)}: these columns are not read: {few(sorted(unknown))}")


@functools.lru_cache(maxsize=64)
def _find_columns(names: tuple[Any, ...]) -> Mapping[str, str]:
    """{column: its name in a list} of the columns that are read and are among `names`."""
    given = {name.strip().lower(): name for name in names}
    found = {c: next((n for n in options if n in given), "") for c, options in _COLUMNS.items()}
    return {column: given[name] for column, name in found.items() if name}


def _csv_rows(lines: TextIO) -> Iterator[tuple[int, dict[Any, Any]]]:
    header = lines.readline()
    names_by = {
        mark: next(csv.reader([header], delimiter=mark, skipinitialspace=True), [])
        for mark in _DELIMITERS
    }
    # Commas, unless another delimiter gives a column for the file.
    delimiter = next((m for m in names_by if "file" in _find_columns(tuple(names_by[m]))), ",")
    names = names_by[delimiter]
    columns = _find_columns(tuple(names))
    # pandas writes the numbers of rows in a column without a name.
    others = [name for name in names if name.strip() and name not in columns.values()]
    classes = [] if {"label", "labels", "caption"} & {*columns} else others
    if not (columns.keys() - {"file", "split", "group"} or classes) or "file" not in columns:
        raise ValueError(
            f"line 1: has the columns {shown(', '.join(names)) or 'none'}; needed: file, and "
            "label, labels or caption, or a column of 0 and 1 for each class"
        )
    if again := [name for name in (*columns.values(), *classes) if names.count(name) > 1]:
        raise ValueError(f"line 1: has the column {shown(again[0])} twice; keep one of the two")
    reader = csv.DictReader(lines, names, delimiter=delimiter, skipinitialspace=True)
    for row in reader:
        if None in row:  # the values beyond the last column
            raise ValueError(
                f"line {reader.line_num + 1}: has {len(row[None]):,} more values than there are "
                "columns; write several labels into one cell, as cat;dog"
                + " and captions in quotes"
                * ("caption" in columns)
            )
        for name in classes:
            if row[name] not in _SHOWS:
                raise ValueError(
                    f"line {reader.line_num + 1}: has {row[name]!r} for {shown(name)}; needed: a "
                    "column label or labels, or 0 or 1 in the column of each class"
                )
        if classes:
            row["labels"] = [name for name in classes if _SHOWS[row.pop(name)]]
        yield reader.line_num + 1, row


def _json_rows(lines: TextIO) -> Iterator[tuple[int, dict[Any, Any]]]:
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                row = json.loads(text)
            except json.JSONDecodeError as e:
                raise ValueError(f"line {number}: {e.msg}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object; needed: one object a line")
            yield number, row
