"""The files of data sets in shards, and the splits that their names say.

A file belongs to the split that a word of its name names (`train-000123.tar`,
`imagenet1k-validation-00.tar`), or else a folder above it (`train/00012.tar`), up to
`data.data_dir`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from etils import epath

from vit_jax.base.errors import InputError, few, shown
from vit_jax.data.class_names import read_names
from vit_jax.data.contract import Request
from vit_jax.data.images.files import is_hidden, split_of, warn_once

T = TypeVar("T")

WORD = re.compile(r"(?<!\w)[A-Za-z]\w*")  # the name of a split in TFDS notation, not a unit
CLASSES = "classes.txt"
_NUMBERED = re.compile(r"(.*)(\d{5})-of-(\d{5})(.*)")


class Files(NamedTuple):
    """The files of a data set.

    root: the folder that `data.data_dir` names, or the one of its files.
    by_split: {split: its files, sorted}, of `train` and of the splits that are asked for.
    """

    root: epath.Path
    by_split: dict[str, list[epath.Path]]

    @property
    def paths(self) -> list[epath.Path]:
        """All files."""
        return [path for paths in self.by_split.values() for path in paths]

    def look_up(self, found: Mapping[str, T]) -> dict[str, list[T]]:
        """{split: what `found` has of its files}, by their paths."""
        return {
            split: [found[os.fspath(path)] for path in paths]
            for split, paths in self.by_split.items()
        }

    def class_names(self) -> tuple[str, ...] | None:
        """The lines of `classes.txt` in the root; None if there is no such file.

        Raises: InputError if one is empty, two are equal, or the file is not UTF-8.
        """
        path = self.root / CLASSES
        if not path.exists():
            return None
        where = f"data.data_dir: {shown(path)}"
        try:
            return read_names(path.read_bytes().decode(), where)
        except UnicodeDecodeError as e:
            raise InputError(f"{where}: is not UTF-8 ({e}); save it as UTF-8") from None


def find_files(request: Request, suffixes: tuple[str, ...]) -> Files:
    """The files of `request` with these suffixes, in small letters: (".tar",).

    `data_dir` is a folder, a file, or a pattern with *, ?, [] and braces: `train-{000..127}.tar`.

    Raises: InputError if there are none, one of a pattern is missing, or a split does not exist.
    """
    return take_asked(find_splits(request.data_dir, suffixes), request.split)


def take_asked(files: Files, split: str) -> Files:
    """The `files` that `split` asks for, and the files of `train`.

    Raises: InputError if it asks for one that does not exist.
    """
    asked = {canonical(word[0]) for word in WORD.finditer(split)}
    if "all" in asked:
        return files
    if missing := sorted(asked - {*files.by_split}):
        raise InputError(
            f"data.split={split!r}: {shown(files.root)} has the splits "
            f"{' and '.join(map(repr, files.by_split))}, but not {missing[0]!r}; take a "
            "part of one, as --config.data.split='train[:90%]' "
            "--config.evals.val.split='train[90%:]'"
        )
    asked.add("train")
    return Files(files.root, {s: found for s, found in files.by_split.items() if s in asked})


def find_splits(data_dir: str | None, suffixes: tuple[str, ...]) -> Files:
    """`find_files` for all splits."""
    needed = f"a folder, a file or a pattern of files that end in {suffixes[0]}"
    if data_dir is None:
        raise InputError(f"data.data_dir=None: needs {needed}; give --config.data.data_dir=SHARDS")
    where, path = f"data.data_dir={shown(data_dir)!r}", epath.Path(data_dir)
    if path.is_dir():
        root, patterns = path, ["*"]
    elif path.exists():
        root, patterns = path.parent, [path.name]
    else:
        fixed = re.split(r"[*?\[{]", data_dir)[0].rpartition("/")[0]
        root, patterns = epath.Path(fixed or "."), _expand(data_dir[len(fixed) :].lstrip("/"))
        if not root.is_dir():
            raise InputError(f"{where}: there is no {shown(root)}; needed: {needed}")
    below = {os.path.relpath(path, root): path for path in _files_below(root, suffixes)}
    chosen: set[str] = set()
    for pattern in patterns:
        found = {pattern} if pattern in below else {*fnmatch.filter(below, pattern)}
        if not found:
            missing = shown(root / pattern) if pattern != "*" else f"in it ends in {suffixes[0]}"
            raise InputError(f"{where}: no file {missing}; needed: {needed}")
        chosen |= found
    return sort_files(root, {name: below[name] for name in chosen})


def sort_files(root: epath.Path, files: Mapping[str, epath.Path]) -> Files:
    """The splits of `files`, {path from `root`: file}.

    Raises: InputError if the names say that there are more, as `train-00000-of-00010.parquet` does.
    """
    by_split: dict[str, list[epath.Path]] = {}
    sets: dict[tuple[str, str, str], set[str]] = {}
    for name in sorted(files):
        by_split.setdefault(_split_named(name), []).append(files[name])
        if found := _NUMBERED.fullmatch(name):
            sets.setdefault((found[1], found[3], found[4]), set()).add(found[2])
    for (before, number, after), there in sets.items():
        wanted = (str(i).zfill(len(number)) for i in range(int(number)))
        if missing := [f"{before}{i}-of-{number}{after}" for i in wanted if i not in there]:
            raise InputError(f"data.data_dir: {shown(root)} lacks {few(missing)}; copy them there")
    others = by_split.pop("", [])
    if others and "train" in by_split:
        warn_once(f"{shown(root)}: ignored {few(p.name for p in others)}, which name no split")
    elif others:
        by_split["train"] = others
    return Files(root, by_split)


def _files_below(folder: epath.Path, suffixes: tuple[str, ...]) -> Iterator[epath.Path]:
    """The files with these suffixes at any depth."""
    for path in folder.iterdir():
        if is_hidden(path.name):
            continue
        if path.name.lower().endswith(suffixes):
            yield path
        elif path.is_dir():
            yield from _files_below(path, suffixes)


def _expand(pattern: str) -> list[str]:
    """The patterns that braces stand for: `{00..12}` counts, `{a,b}` lists."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    words = braces[1].split(",")
    if ends is not None:
        words = [str(i).zfill(len(ends[1])) for i in range(int(ends[1]), int(ends[2]) + 1)]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [path for word in words for path in _expand(before + word + after)]


def _split_named(path: str) -> str:
    """The split that a path names; "" if it names none."""
    words = (w for part in reversed(path.split("/")) for w in re.split("[^A-Za-z]+", part))
    return next(filter(None, map(split_of, words)), "")


def canonical(word: str) -> str:
    """`val` for `validation`, and so on."""
    return split_of(word) or word
