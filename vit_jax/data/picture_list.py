"""A list of files and their labels as a source: CSV, or JSON lines.

    file,label              file,labels               {"file": "1.jpg", "label": "cat"}
    1.jpg,cat               1.jpg,cat;dog             {"file": "2.jpg", "labels": ["cat", "dog"]}

`data.data_dir` is the list (a tenth of it is held out), or a folder with a list for each split:
train.csv, val.jsonl, test.csv, with any name that a split's folder may have. Paths are relative to
the folder of the list. The column `labels` may hold several labels for each picture, or none.
"""

from __future__ import annotations

import csv
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.folder_contents import SPLIT_NAMES
from vit_jax.data.image_folder import check_split, held_out_files, picture_source
from vit_jax.data.pictures import file_size, shown, warn_once
from vit_jax.data.sources import Source
from vit_jax.errors import InputError

SUFFIXES = (".csv", ".jsonl")
_SHOWN = 5  # faults, of a list that has many


class Lists(NamedTuple):
    """The lists of a data set.

    by_split: {split: file}; of a single list `train` only.
    """

    root: pathlib.Path
    by_split: dict[str, pathlib.Path]

    def names(self) -> list[str]:
        """The splits that can be asked for."""
        return ["train", "val", *(["test"] if "test" in self.by_split else []), "all"]


def find_lists(data_dir: str | os.PathLike | None) -> Lists:
    """The lists that `data_dir` names: one file, or those of a folder.

    Raises: InputError if there is none for training, or two for a split.
    """
    if data_dir is None:
        raise InputError(
            "data.data_dir=None: data.name='list' needs a .csv or .jsonl file of files and labels, "
            "or a folder with train.csv; give --config.data.data_dir=LIST"
        )
    path = pathlib.Path(data_dir).expanduser()
    where = f"data.data_dir={shown(str(path))!r}"
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{where}: needs a name that ends in {' or '.join(SUFFIXES)}")
        return Lists(path.parent, {"train": path})
    if not path.is_dir():
        raise InputError(
            f"{where}: no such list; if it was moved, give --config.data.data_dir=LIST"
        )
    found: dict[str, pathlib.Path] = {}
    for file in sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES):
        split = next((s for s, names in SPLIT_NAMES.items() if file.stem.lower() in names), None)
        if split in found:
            raise InputError(
                f"{where}: {found[split].name} and {file.name} are both lists of {split}; keep one"
            )
        if split is not None:
            found[split] = file
        else:
            warn_once(f"{shown(str(path))}: ignored {shown(file.name)}, which names no split")
    if "train" not in found:
        raise InputError(f"{where}: holds no train.csv or train.jsonl; add one, or name the list")
    return Lists(path, found)


def picture_list(
    *,
    split: str,
    data_dir: str | os.PathLike | None,
    exif: bool = True,
    multi_label: bool | None = False,
    max_corrupt_fraction: float = 1.0,
    **_,
) -> Source:
    """The pictures of a list; splits `train`, `val`, `all`, and `test` where it has a list.

    Classes are the labels of the training list, sorted, as numbers if all are numbers. Without a
    list for `val` a tenth of the training list is held out, as of an image folder. With
    `multi_label` labels are float32 (C,), 1 for each class that the picture shows; None: they are
    if a picture has several labels, or none.

    Raises: InputError naming the lines that are not as they should be, or labels that the training
      list lacks.
    """
    lists = find_lists(data_dir)
    check_split(split, lists.names(), lists.root)
    training = _read_list(lists.by_split["train"], multi_label)
    class_names = _sorted_labels({label for labels in training.values() for label in labels})
    if not class_names:
        raise InputError(f"data.data_dir: {lists.by_split['train']} has no labels; add some")
    file = lists.by_split.get(split, lists.by_split["train"])
    found = training if file == lists.by_split["train"] else _read_list(file, multi_label)
    if split == "all":
        found = _read_all(lists, multi_label)
    if multi_label is None:
        multi_label = any(len(ls) != 1 for rows in (training, found) for ls in rows.values())
    listed = _sorted_labels({label for labels in found.values() for label in labels})
    if unknown := [label for label in listed if label not in class_names]:
        raise InputError(
            f"data.data_dir: {shown(str(file))} has the labels {', '.join(map(repr, unknown))}, "
            f"which {lists.by_split['train'].name} lacks; give them pictures there or remove them"
        )
    if split != "all" and file == lists.by_split["train"] and "val" not in lists.by_split:
        held_out = held_out_files({p: next(iter(ls), "") for p, ls in found.items()})
        found = {p: ls for p, ls in found.items() if (p in held_out) == (split == "val")}
    if not found:
        raise InputError(f"data.data_dir: {shown(str(file))} lists no pictures; add some")
    sizes = _find_sizes(file, found)
    _warn_of_missing(file, split, sizes)
    label_of = {name: i for i, name in enumerate(class_names)}
    labels: list[Any] = [label_of[labels[0]] for labels in found.values() if not multi_label]
    if multi_label:
        labels = list(np.zeros((len(found), len(class_names)), np.float32))
        for row, shows in zip(labels, found.values(), strict=True):
            row[[label_of[label] for label in shows]] = 1.0
    return picture_source(
        "list", lists.root, file.parent, split, list(found), labels, class_names,
        sizes=list(sizes.values()), exif=exif, max_corrupt_fraction=max_corrupt_fraction,
    )  # fmt: skip


def _read_all(lists: Lists, multi_label: bool | None) -> dict[str, tuple[str, ...]]:
    """{file: its labels} of all lists, which lie in one folder."""
    found: dict[str, tuple[str, ...]] = {}
    for file in lists.by_split.values():
        found |= _read_list(file, multi_label)
    return found


def _read_list(file: pathlib.Path, multi_label: bool | None) -> dict[str, tuple[str, ...]]:
    """{file: its labels} of a list, in its order.

    Raises: InputError with the first faulty lines.
    """
    found: dict[str, tuple[str, ...]] = {}
    faults: list[str] = []
    where = f"data.data_dir: {shown(str(file))}"
    try:
        for line, path, labels in _rows(file):
            if isinstance(path, str) and os.path.isabs(path):
                path = os.path.relpath(path, file.parent)
            fault = _fault_of_row(path, labels, found, multi_label)
            if fault is None and labels is not None:
                found[path] = labels
            elif fault is not None:
                faults.append(f"{where}, line {line}: {fault}")
    except InputError:  # of the columns
        raise
    except (ValueError, csv.Error) as e:  # text that is not UTF-8 is a ValueError too
        faults.append(f"{where}: cannot be read ({e}); needed: UTF-8, as CSV or JSON lines")
    if len(faults) > _SHOWN:
        faults[_SHOWN:] = [f"{where}: {len(faults) - _SHOWN:,} lines more"]
    if faults:
        raise InputError(*faults)
    return found


def _fault_of_row(path: Any, labels: Any, found: dict, multi_label: bool | None) -> str | None:
    if not isinstance(path, str) or not path:
        return "has no file; needed: its path from the folder of the list"
    if labels is None:
        return f"{shown(path)} has no label; needed: a value for label or labels"
    if path in found:
        return f"{shown(path)} is listed twice; list it once, with all its labels in `labels`"
    if len(labels) != 1 and multi_label is False:
        return (
            f"{shown(path)} has {len(labels)} labels; for lists with several, or none, use "
            "--config=folder:multilabel, which sets data.multi_label=true and a loss and an "
            "evaluator for it"
        )
    return None


def _rows(file: pathlib.Path) -> Iterator[tuple[int, Any, tuple[str, ...] | None]]:
    """(line, path, labels) of each row; labels None where the row states none."""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        if file.suffix.lower() == ".csv":
            reader = csv.DictReader(lines)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            if "file" not in columns or not {"label", "labels"} & {*columns}:
                raise InputError(
                    f"data.data_dir: {shown(str(file))}, line 1: has the columns "
                    f"{', '.join(columns) or 'none'}; needed, with commas between them: file, and "
                    "label or labels"
                )
            for row in reader:
                row = {(k or "").strip().lower(): v for k, v in row.items() if isinstance(v, str)}
                labels = row.get("labels")
                several = None if labels is None else labels.split(";")
                yield reader.line_num, row.get("file"), _labels(row.get("label"), several)
            return
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as e:
                raise ValueError(f"line {number}: {e.msg}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object")
            yield number, row.get("file"), _labels(row.get("label"), row.get("labels"))


def _labels(one: Any, several: Any) -> tuple[str, ...] | None:
    if several is not None:
        several = several if isinstance(several, list) else [several]
        stripped = (str(label).strip() for label in several)
        return tuple(dict.fromkeys(label for label in stripped if label))
    return None if one is None or not str(one).strip() else (str(one).strip(),)


def _sorted_labels(labels: set[str]) -> tuple[str, ...]:
    """As numbers if all are numbers, else as text."""
    are_numbers = all(label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=(lambda label: (int(label), label)) if are_numbers else None))


def _find_sizes(file: pathlib.Path, paths: Iterable[str]) -> dict[str, int]:
    """{path: bytes, -1 if it does not exist} of the files of a list.

    Raises: InputError that names a pipe or a device, whose reading may never end.
    """
    sizes = {}
    for path in paths:
        size = file_size(file.parent / path, or_folder=True)
        if size is None:
            raise InputError(
                f"data.data_dir: {shown(str(file))}: {shown(path)} is no file, but a pipe or a "
                "device; save the picture as a file"
            )
        sizes[path] = size
    return sizes


def _warn_of_missing(file: pathlib.Path, split: str, paths: Mapping[str, int]) -> None:
    """Warns of the files of a list's split that do not exist, whose bytes are -1 in `paths`.

    Raises: InputError if that is all of them.
    """
    missing = [path for path, size in paths.items() if size < 0]
    whole = f"its {len(paths):,} files" + (f" for {split}" if split != "all" else "")
    if missing and len(missing) == len(paths):
        raise InputError(
            f"data.data_dir: {shown(str(file))}: none of {whole} is there, "
            f"{shown(missing[0])} for one; paths are relative to {shown(str(file.parent))}"
        )
    if missing:
        warn_once(
            f"{shown(str(file))}: {len(missing):,} of {whole} are not there, "
            f"{shown(missing[0])} for one; they are masked"
        )
