"""A list of files and their labels as a source: CSV, TSV, or JSON lines.

    file,label              file,labels               {"file": "1.jpg", "label": "cat"}
    1.jpg,cat               1.jpg,cat;dog             {"file": "2.jpg", "labels": ["cat", "dog"]}

`data.data_dir` is the list (a tenth of it is held out), or a folder with a list for each split:
train.csv, val.jsonl, test.csv, with any name that a split's folder may have. Paths are relative to
the folder of the list, or absolute. A picture may have several labels, or none, in the column
`labels`; or a column for each class, with 1 where the picture shows it. The column `split` says the
split of each picture; pictures with the same text in the column `group` are held out together.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.division import Divider
from vit_jax.data.folder_contents import SPLIT_NAMES
from vit_jax.data.image_folder import check_split, of_classes, pick, picture_source, split_files
from vit_jax.data.list_files import Row, raise_first, read_list
from vit_jax.data.pictures import Doubles, look_up, shown, warn_once
from vit_jax.data.sources import Source
from vit_jax.errors import InputError

SUFFIXES = (".csv", ".tsv", ".jsonl")


class Lists(NamedTuple):
    """The lists of a data set.

    root: their folder, without links.
    by_split: {split: file}; of a single list `train` only.
    """

    root: pathlib.Path
    by_split: dict[str, pathlib.Path]

    def read(self, split: str, multi_label: bool | None) -> dict[str, dict[str, Row]]:
        """{split: {file: its row}} of train and of `split`; of `all`, and of a single list, of all.

        Raises: InputError with the first faulty lines, or if a file is in two splits.
        """
        if len(self.by_split) == 1:
            found: dict[str, dict[str, Row]] = {}
            for file, row in read_list(self.by_split["train"], multi_label).items():
                found.setdefault(row.split or "train", {})[file] = row
            _check_disjoint(self.root, found)
            return found
        names = [name for name in self.by_split if split == "all" or name in ("train", split)]
        found = {name: read_list(self.by_split[name], multi_label, name) for name in names}
        _check_disjoint(self.root, found)
        return found

    def names(self, found: Iterable[str] | None = None) -> list[str]:
        """The splits that can be asked for; `found`: those of a single list that has been read."""
        if len(self.by_split) == 1 and found is None:
            found = self.read("all", multi_label=True)
        has_test = "test" in {*self.by_split, *(found or ())}
        return ["train", "val", *["test"] * has_test, "all"]


def _check_disjoint(root: pathlib.Path, found: Mapping[str, Mapping[str, Row]]) -> None:
    """Raise InputError if a file or a group is in two splits."""
    where = f"data.data_dir: {shown(str(root))}"
    first: dict[tuple[str, str], str] = {}
    faults: dict[str, None] = {}
    for split, files in found.items():
        for file, row in files.items():
            for key in (("", file), ("the group ", row.group or "")):
                other = first.setdefault(key, split) if key[1] else split
                if other != split:
                    what = "".join((key[0], shown(key[1])))
                    fault = f"{what} is in {other} and in {split}; list it in one of them"
                    faults[f"{where}: {fault}"] = None
    raise_first([*faults], f"{where}: %d more")


def find_lists(data_dir: str | os.PathLike | None) -> Lists:
    """The lists that `data_dir` names: one file, or those of a folder.

    Raises: InputError if there is none for training, or two for a split.
    """
    if data_dir is None:
        raise InputError(
            "data.data_dir=None: data.name='list' needs a .csv, .tsv or .jsonl file of files and "
            "labels, or a folder with train.csv; give --config.data.data_dir=LIST"
        )
    path = pathlib.Path(data_dir).expanduser()
    where = f"data.data_dir={shown(str(path))!r}"
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{where}: needs a name that ends in {' or '.join(SUFFIXES)}")
        root = path.parent.resolve()  # TensorFlow takes link/.. for the link's folder
        return Lists(root, {"train": root / path.name})
    if not path.is_dir():
        raise InputError(
            f"{where}: no such list; if it was moved, give --config.data.data_dir=LIST"
        )
    path = path.resolve()
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
    divider: Divider | None = None,
    exif: bool = True,
    multi_label: bool | None = False,
    max_corrupt_fraction: float = 1.0,
    **_,
) -> Source:
    """The pictures of a list; splits `train`, `val`, `all`, and `test` where there are some for it.

    Classes are the labels of the training pictures, sorted, as numbers if all are numbers. Without
    pictures for `val` a tenth of the training list is held out by the first labels, as `divider`
    says (None: anew). With `multi_label` labels are float32 (C,), 1 for each class that the
    picture shows; None: they are if a picture has several labels, or none.

    Raises: InputError naming the lines that are not as they should be, or labels that the training
      list lacks.
    """
    lists, divider = find_lists(data_dir), divider or Divider(anew=True)
    by_split = lists.read(split, multi_label)
    check_split(split, lists.names(by_split), lists.root)
    file = lists.by_split.get(split, lists.by_split["train"])
    training = by_split.get("train", {})
    rows = by_split.get(split, training)
    if split == "all":
        rows = {path: row for found in by_split.values() for path, row in found.items()}
    sizes, groups = _look_up(file, rows)
    if training and split in ("train", "val"):
        firsts = {path: next(iter(row.labels), "") for path, row in training.items()}
        given = "val" in {*lists.by_split, *by_split}
        splits = split_files(divider, lists.root, lists.root, firsts, None if given else groups)
        training = {path: training[path] for path in splits}
        if split == "train" or not given:
            rows = pick(splits, split, rows, file)
    elif split != "all" and (begun := training.keys() & divider.begun_with()):
        training = {path: row for path, row in training.items() if path in begun}
        known = {label for row in training.values() for label in row.labels}
        kept = of_classes(known, {path: row.labels for path, row in rows.items()}, file)
        rows = {path: rows[path] for path in kept}
    if split not in ("train", "all"):
        divider.warn_of_trained(f"{shown(str(file))}, {split}", rows)
    class_names = _sorted_labels({label for row in training.values() for label in row.labels})
    if not training and any(by_split.values()):
        raise InputError(
            f"data.data_dir: {shown(str(file))} has no pictures with the split train, whose labels "
            "are the classes; add some, or leave out the column split"
        )
    if not class_names:
        raise InputError(f"data.data_dir: {lists.by_split['train']} has no labels; add some")
    if multi_label is None:
        shown_rows = [*training.values(), *rows.values()]
        multi_label = any(len(row.labels) != 1 for row in shown_rows)
    listed = _sorted_labels({label for row in rows.values() for label in row.labels})
    if unknown := [label for label in listed if label not in class_names]:
        raise InputError(
            f"data.data_dir: {shown(str(file))} has the labels {', '.join(map(repr, unknown))}, "
            f"which {lists.by_split['train'].name} lacks; give them pictures there or remove them"
        )
    if not rows:
        raise InputError(f"data.data_dir: {shown(str(file))} lists no pictures; add some")
    sizes = {path: sizes[path] for path in rows}
    _warn_of_missing(file, split, sizes)
    label_of = {name: i for i, name in enumerate(class_names)}
    labels: list[Any] = [label_of[row.labels[0]] for row in rows.values() if not multi_label]
    if multi_label:
        labels = list(np.zeros((len(rows), len(class_names)), np.float32))
        for numbers, row in zip(labels, rows.values(), strict=True):
            numbers[[label_of[label] for label in row.labels]] = 1.0
    return picture_source(
        "list", lists.root, file.parent, split, list(rows), labels, class_names,
        sizes=list(sizes.values()), exif=exif, max_corrupt_fraction=max_corrupt_fraction,
    )  # fmt: skip


def _sorted_labels(labels: set[str]) -> tuple[str, ...]:
    """As numbers if all are numbers, else as text."""
    are_numbers = all(label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=(lambda label: (int(label), label)) if are_numbers else None))


def _look_up(file: pathlib.Path, rows: Mapping[str, Row]) -> tuple[dict[str, int], dict[str, str]]:
    """({path: bytes, -1 if it does not exist}, {path: group}) of the files of a list.

    Files with several names, by links, are a group, and groups that share a file are one.

    Raises: InputError that names a pipe or a device, whose reading may never end.
    """
    sizes, doubles = {}, Doubles()
    for path in rows:
        size, identity = look_up(file.parent / path, or_folder=True)
        if size is None:
            raise InputError(
                f"data.data_dir: {shown(str(file))}: {shown(path)} is no file, but a pipe or a "
                "device; save the picture as a file"
            )
        sizes[path] = size
        doubles.add(path, identity)
    groups = doubles.groups(file.parent, {path: ";".join(row.labels) for path, row in rows.items()})
    of_rows = {path: f"group {row.group}" for path, row in rows.items() if row.group}
    return sizes, _join(groups, of_rows)


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
