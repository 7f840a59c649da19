"""Files of images on disk: what a folder holds, what is skipped, and how messages name files."""

from __future__ import annotations

import collections
import logging
import os
import pathlib
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vit_jax.base.errors import InputError, few, shown
from vit_jax.data.images.formats import EXTENSIONS

# Split -> the names, in small letters, that its folder or list may have.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}

logger = logging.getLogger("vit_jax")
_said: set[str] = set()

BESIDE = "beside the folders of the classes"  # a kind of skipped images
INDEX = ".index.npz"  # ends the name of an index that a search keeps beside its folder
_FILES = f"images are files ending in {', '.join(EXTENSIONS)}"
_MOVE = (
    "put each into the folder of its class; images without classes are for --config=selfsup:folder "
    "and --config=mae:folder"
)


def warn_once(text: str, level: int = logging.WARNING) -> None:
    """Logs a warning, or a text of another level, unless this process has said it."""
    if text not in _said:
        _said.add(text)
        logger.log(level, "%s", text)


def split_of(name: str) -> str | None:
    """The split that a folder or a list of this name holds; None if it names none."""
    return next((split for split, names in SPLIT_NAMES.items() if name.lower() in names), None)


def sort_by_split(
    paths: Iterable[pathlib.Path], where: str
) -> tuple[dict[str, pathlib.Path], list[pathlib.Path]]:
    """({split: its folder or list}, those that name no split).

    Raises: InputError, which begins with `where`, if a split has two.
    """
    found: dict[str, pathlib.Path] = {}
    others = []
    for path in paths:
        split = split_of(path.name if path.is_dir() else path.stem)
        if split is None:
            others.append(path)
        elif (other := found.setdefault(split, path)) != path:
            raise InputError(f"{where}: {other.name} and {path.name} are both {split}; keep one")
    return found, others


class File(NamedTuple):
    """An image file.

    size: in bytes; -1 if it does not exist, as behind a dangling link.
    identity: a number that all links to the file share; 0 if unknown.
    """

    size: int
    identity: int


def look_up(path: str | os.PathLike) -> File | None:
    """The file at `path`; None for a folder, and for a pipe or a device, whose reading may never
    end.
    """
    try:
        found = os.stat(path)
    except OSError:
        return File(-1, 0)
    if not stat.S_ISREG(found.st_mode):
        return None
    return File(found.st_size, found.st_dev << 64 | found.st_ino if found.st_ino else 0)


def group_links(
    root: str | os.PathLike, files: Mapping[str, File], classes: Mapping[str, str]
) -> dict[str, str]:
    """{name: the first name of its file} of those `files` that are one on the disk, by links.

    Names are paths from `root`. Warns, once a process, of the links among them, and of those whose
    `classes` differ.
    """
    by_file: dict[int, list[str]] = {}
    for name, file in files.items():
        if file.identity:
            by_file.setdefault(file.identity, []).append(name)
    first = {n: min(names) for names in by_file.values() if len(names) > 1 for n in names}
    links = sorted(name for name in first if name != first[name])
    other = [name for name in links if classes[name] != classes[first[name]]]
    for what, names in (("count several times", links), ("have several labels", other)):
        if names:
            pairs = few(f"{name} is {first[name]}" for name in names)
            warn_once(
                f"{shown(root)}: {len(names):,} images {what}, by links: {pairs}; remove the links "
                "unless you mean them"
            )
    return first


class Walk:
    """Finds the images at any depth below folders, and notes what it skips.

    Links are followed, but not round and round. Names that begin with a dot, and macOS's `__MACOSX`
    folders, are no images.

    skipped: {kind: files of the kind, which are not read}.
    ignored: the folders that were not entered.
    """

    def __init__(self) -> None:
        self.skipped: dict[str, list[str]] = collections.defaultdict(list)
        self.ignored: list[str] = []

    def images(self, root: str | os.PathLike) -> dict[str, File]:
        """{path: file} of the images below `root`, unsorted; paths from there.

        A dangling link counts, as a record that is broken.
        """
        root, found = os.fspath(root), dict[str, File]()
        seen: set[str] = set()
        note = self.ignored.append
        for parent, folders, names in os.walk(
            root, onerror=lambda error: note(error.filename), followlinks=True
        ):
            seen.add(os.path.realpath(parent))
            self.ignored += [os.path.join(parent, name) for name in folders if is_hidden(name)]
            folders[:] = [
                name
                for name in folders
                if not is_hidden(name) and os.path.realpath(os.path.join(parent, name)) not in seen
            ]
            for name in names:
                if file := self.look_at(parent, name):
                    found[os.path.relpath(os.path.join(parent, name), root)] = file
        return found

    def look_at(self, parent: str | os.PathLike, name: str) -> File | None:
        """The image `name` in `parent`; None if it is no image.

        Such a file is noted, unless it is the index of a search.
        """
        path, extension = os.path.join(parent, name), os.path.splitext(name)[1].lower()
        if name.startswith("."):
            kind = "hidden"
        elif name.endswith(INDEX):
            return None
        elif extension not in EXTENSIONS:
            kind = shown(extension) or "without extension"
        elif file := look_up(path):
            return file
        else:
            kind = f"{extension} that is no file"
        self.skipped[kind].append(path)
        return None

    def say(self, root: str | os.PathLike) -> None:
        """Warns, once a process, of all that was skipped below `root`."""
        say_ignored(root, self.ignored)
        for kinds, remedy in (
            (self.skipped.keys() - {BESIDE}, f"{_FILES}: convert the others"),
            (self.skipped.keys() & {BESIDE}, _MOVE),
        ):
            some = (
                f"{len(self.skipped[kind]):,} {kind} "
                f"({few(os.path.relpath(path, root) for path in self.skipped[kind])})"
                for kind in sorted(kinds)
            )
            if kinds:
                warn_once(f"{shown(root)}: skipped {', '.join(some)}; {remedy}")


def images_below(root: str | os.PathLike) -> dict[str, File]:
    """`Walk.images` of `root`, with a warning of what was skipped."""
    walk = Walk()
    found = walk.images(root)
    walk.say(root)
    return found


def is_hidden(name: str) -> bool:
    """Whether a folder of this name holds files that an operating system adds."""
    return name.startswith(".") or name == "__MACOSX"


def say_ignored(root: str | os.PathLike, folders: Iterable[str | os.PathLike]) -> None:
    """Warns, once a process, that `folders` below `root` are not read."""
    if names := sorted(os.path.relpath(folder, root) for folder in folders):
        warn_once(f"{shown(root)}: ignored these folders: {', '.join(map(shown, names))}")


def class_like_folders(parent: pathlib.Path) -> list[pathlib.Path]:
    """The folders in `parent` that are not hidden, sorted by name.

    Leaves out links to `parent` or to a folder that holds it: they would double every image.
    """
    above = {parent.resolve(), *parent.resolve().parents}
    return sorted(
        p
        for p in parent.iterdir()
        if p.is_dir() and not is_hidden(p.name) and not (p.is_symlink() and p.resolve() in above)
    )


def describe_contents(root: pathlib.Path, remedy: str = "add some") -> str:
    """The content of `root`, and the remedy: "found 12 .jpg, 3 folders, 1 .txt; add some".

    Where a data set lies below `root`, its folder is the remedy instead of `remedy`.
    """
    train = SPLIT_NAMES["train"]
    below = [p for p in class_like_folders(root) if any(os.path.isdir(p / n) for n in train)]
    if len(below) == 1:
        # data_dir may be a key of data or of an evaluator.
        return f"found {shown(below[0].name)}/ with train/ in it; set data_dir to {shown(below[0])}"
    kinds = collections.Counter(
        "folders" if p.is_dir() else p.suffix.lower() or "files without extension"
        for p in sorted(root.iterdir())
        if not is_hidden(p.name)
    )
    found = few(f"{number:,} {what}" for what, number in kinds.most_common())
    return f"found {found or 'nothing in it'}; {remedy}"
