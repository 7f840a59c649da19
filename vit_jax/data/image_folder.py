"""A folder of images as a source: one sub-folder per class.

    DIR/cat/1.jpg           or, with splits of its own,    DIR/train/cat/1.jpg
    DIR/dog/more/2.PNG                                     DIR/val/cat/2.jpg
                                                           DIR/test/dog/3.webp

Splits may be named train or training; val, valid or validation; test or testing, in any case.
Files with an extension in `pictures.EXTENSIONS` count at any depth below the class folder. Each is
read on demand. A warning names the folders and files that are ignored, hidden ones included.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from vit_jax.data.division import Divider, Groups, say_names
from vit_jax.data.folder_contents import SPLIT_NAMES, class_like_folders, describe_contents
from vit_jax.data.host_tf import tf
from vit_jax.data.pictures import (
    Doubles,
    Walk,
    as_paths,
    is_hidden,
    read_picture,
    say_ignored,
    shown,
    warn_once,
    why_file_unreadable,
)
from vit_jax.data.sources import Source, fingerprint
from vit_jax.errors import InputError

_NO_CLASSES = {name for names in SPLIT_NAMES.values() for name in names}

_SHOWN = 8  # names in a warning

T = TypeVar("T")


class Layout(NamedTuple):
    """Where the splits of a folder lie.

    root: the folder.
    splits: {split: its folder}; {} where the classes lie in `root` itself.
    ignored: folders beside the splits.
    """

    root: pathlib.Path
    splits: dict[str, pathlib.Path]
    ignored: list[pathlib.Path]

    @property
    def train_root(self) -> pathlib.Path:
        """The folder of the training images, from which a tenth may be held out."""
        return self.splits.get("train", self.root)

    def names(self) -> list[str]:
        """The splits that can be asked for; `all` is for evaluation and prediction."""
        return ["train", "val", *(["test"] if "test" in self.splits else []), "all"]

    def folders(self, split: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
        """The folders of the images of `split`, one but for `all`, and the folder of them all."""
        several = [*self.splits.values()] if split == "all" else []
        if len(several) > 1:
            return self.root, several
        base = self.splits.get(split, self.train_root)
        return base, [base]


def find_layout(data_dir: str | os.PathLike | None) -> Layout:
    """The layout of the folder `data_dir`.

    Raises: InputError if there is no such folder, a split has two, or val or test has no train.
    """
    if data_dir is None:
        raise InputError(
            "data.data_dir=None: needs the folder with the images; "
            "give --config.data.data_dir=PICTURES"
        )
    root = pathlib.Path(data_dir).expanduser()
    if root.is_file():
        raise InputError(
            f"data.data_dir={shown(str(root))!r} is a file; needed: a folder with one folder a "
            "class; for a list of files and labels use --config=folder:list"
        )
    if not root.is_dir():
        raise InputError(
            f"data.data_dir={shown(str(root))!r} is not a local folder; needed: one folder a "
            "class; if it was moved, give --config.data.data_dir=PICTURES"
        )
    found, ignored = _find_splits(root)
    others = [found[split].name for split in ("val", "test") if split in found]
    if others and "train" not in found:
        raise InputError(
            f"data.data_dir={shown(str(root))!r} has {'/ and '.join(others)}/ but no train/ beside "
            f"it{f' (found {_list_names(ignored)})' if ignored else ''}; add it"
        )
    return Layout(root, found, ignored if found else [])


def _find_splits(root: pathlib.Path) -> tuple[dict[str, pathlib.Path], list[pathlib.Path]]:
    """({split: folder}, other folders) of those in `root`."""
    found: dict[str, pathlib.Path] = {}
    ignored = []
    by_split: dict[str, list[str]] = {}
    for path in class_like_folders(root):
        split = next((s for s, names in SPLIT_NAMES.items() if path.name.lower() in names), None)
        if split is None:
            ignored.append(path)
        else:
            by_split.setdefault(split, []).append(path.name)
            found[split] = path
    for split, names in by_split.items():
        if len(names) > 1:
            raise InputError(
                f"data.data_dir={shown(str(root))!r}: {' and '.join(sorted(names))} are "
                f"folders of one split, {split}; keep one"
            )
    return found, ignored


def _list_names(folders: Sequence[pathlib.Path]) -> str:
    """The names of `folders` for a message, at most a few."""
    names = [shown(path.name) + "/" for path in folders[:_SHOWN]]
    return ", ".join([*names, *["..."] * (len(folders) > _SHOWN)])


def folder(
    *,
    split: str,
    data_dir: str | os.PathLike | None,
    divider: Divider | None = None,
    exif: bool = True,
    max_corrupt_fraction: float = 1.0,
    **_,
) -> Source:
    """The images below `data_dir`; splits `train`, `val`, `all`, and `test` if it has a folder.

    Without a folder for `val`, a tenth of the training images is held out, as `divider` says (None:
    anew). Classes are the sorted names of the training folder's sub-folders, in all splits, but for
    those with images that are in no split. `exif` turns images as their EXIF orientation says.

    Raises: InputError if the folder, a split, or all classes are missing or empty.
    """
    layout, divider = find_layout(data_dir), divider or Divider(anew=True)
    check_split(split, layout.names(), layout.root)
    class_names = _class_names(layout)
    base, parts = layout.folders(split)
    files: dict[str, str] = {}
    sizes: dict[str, int] = {}
    doubles = Doubles()
    for part in parts:
        found, found_sizes = _list_images(part, doubles)
        beginning = "" if part == base else f"{part.name}/"
        files |= {beginning + path: class_name for path, class_name in found.items()}
        sizes |= {beginning + path: size for path, size in found_sizes.items()}
    groups = doubles.groups(base, files)
    if split != "all" and base != layout.train_root:
        class_names = _begun_with(class_names, layout, divider)
        kept = of_classes(class_names, {path: (name,) for path, name in files.items()}, base)
        files = {path: files[path] for path in kept}
        _warn_of_links(base, files, layout.train_root)
    elif files and split != "all":
        given = "val" in layout.splits
        splits = split_files(divider, layout.root, base, files, None if given else groups)
        unknown = {*files.values()} - {files[path] for path in splits}
        class_names = tuple(name for name in class_names if name not in unknown)
        files = pick(splits, split, files, base)
    if not files:
        raise InputError(
            f"data.data_dir: {shown(str(base))} holds no images in folders of classes: "
            f"{describe_contents(base)}"
        )
    paths = sorted(files)
    label_of = {class_name: label for label, class_name in enumerate(class_names)}
    labels = [label_of[files[path]] for path in paths]
    # Names that are not UTF-8 cannot be written down otherwise.
    names = tuple(name.encode(errors="backslashreplace").decode() for name in class_names)
    return picture_source(
        "folder", layout.root, base, split, paths, labels, names,
        sizes=[sizes[path] for path in paths], exif=exif,
        max_corrupt_fraction=max_corrupt_fraction,
    )  # fmt: skip


def picture_source(
    name: str,
    root: pathlib.Path,
    base: pathlib.Path,
    split: str,
    paths: list[str],
    labels: list,
    class_names: tuple[str, ...] | None,
    *,
    sizes: Sequence[int],
    exif: bool,
    max_corrupt_fraction: float = 1.0,
) -> Source:
    """The source `name` of the files `paths` below `base`, which lies in the data's folder `root`.

    labels: of each, an int; or float32 (C,), 1 for each class that it shows.
    sizes: bytes of each; -1 if it does not exist.
    max_corrupt_fraction: the largest share of files that may be missing.

    Raises: InputError if more files are missing.
    """
    _check_missing(base, paths, sizes, max_corrupt_fraction)
    multi_label = isinstance(labels[0], np.ndarray)
    labels_tensor = tf.constant(np.stack(labels) if multi_label else np.array(labels, np.int32))
    paths_tensor = as_paths(paths)
    beginning = os.fsencode(base) + os.fsencode(os.sep)

    def read(record_id):
        path = tf.strings.join([beginning, tf.gather(paths_tensor, record_id)])
        return {
            "image": read_picture(path, exif),
            "label": tf.gather(labels_tensor, record_id),
            "mask": tf.ones([]),
        }

    identity = [name, split, class_names, paths, list(sizes)]
    if name == "list":
        identity.append(np.asarray(labels).tolist())
    return Source(
        name=name,
        split=split,
        num_examples=len(paths),
        num_classes=1 if class_names is None else len(class_names),
        class_names=class_names,
        image_shape=None,
        fingerprint=fingerprint(*identity, *["exif"] * exif),
        read=read,
        record_name=lambda record: shown(os.fspath(base.relative_to(root) / paths[record])),
        encoded=True,
        why_unreadable=lambda record: why_file_unreadable(base / paths[record]),
        multi_label=multi_label,
        file_names=lambda start, stop: paths[start:stop],
    )


def _check_missing(
    base: pathlib.Path, paths: Sequence[str], sizes: Sequence[int], max_fraction: float
) -> None:
    """Raise InputError if more than `max_fraction` of the files are missing."""
    missing = [shown(path) for path, size in zip(paths, sizes, strict=True) if size < 0]
    if len(missing) > max_fraction * len(paths):
        more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
        raise InputError(
            f"data.data_dir: {len(missing):,} of the {len(paths):,} training pictures in "
            f"{shown(str(base))} ({len(missing) / len(paths):.0%}) are missing, more than "
            f"data.max_corrupt_fraction={max_fraction}: {', '.join(missing[:_SHOWN])}{more}; "
            "restore them, take them out of the data, or raise data.max_corrupt_fraction"
        )


def split_files(
    divider: Divider,
    root: pathlib.Path,
    base: pathlib.Path,
    classes: Mapping[str, str],
    groups: Groups,
) -> dict[str, str]:
    """{path: train or val} of the files with `classes`; those that are in neither are left out.

    Paths are from `base`, which lies in the folder `root`.
    """
    before = "" if base == root else f"{base.relative_to(root).as_posix()}/"
    named = {before + path: class_name for path, class_name in classes.items()}
    if groups is not None:
        groups = {before + path: before + group for path, group in groups.items()}
    splits = divider(shown(str(root)), named, groups)
    return {path: splits[before + path] for path in classes if before + path in splits}


def _begun_with(class_names: tuple[str, ...], layout: Layout, divider: Divider) -> tuple[str, ...]:
    """Those of `class_names` in which the run of `divider` began to train; all, if in none."""
    place = len(layout.train_root.relative_to(layout.root).parts)
    begun = {name.split("/")[place] for name in divider.begun_with() if name.count("/") > place}
    return tuple(name for name in class_names if name in begun) or class_names


def _warn_of_links(base: pathlib.Path, paths: Iterable[str], train_root: pathlib.Path) -> None:
    """Warns of those of `paths` below `base` that are links to training pictures."""
    root = os.path.join(os.path.realpath(train_root), "")
    if linked := [p for p in paths if os.path.realpath(base / p).startswith(root)]:
        warn_once(
            f"{shown(str(base))}: {len(linked):,} pictures are links into {train_root.name}/, so "
            f"they are trained on: {say_names(sorted(linked))}; remove the links"
        )


def of_classes(
    class_names: Collection[str], files: Mapping[str, Sequence[str]], where: pathlib.Path
) -> list[str]:
    """The paths of `files`, {path: classes}, whose classes the run began with; warns of others."""
    known = {*class_names}
    kept = [path for path, names in files.items() if known.issuperset(names)]
    if len(kept) < len(files):
        other = sorted({name for names in files.values() for name in names} - known)
        warn_once(
            f"{shown(str(where))}: left out {len(files) - len(kept):,} pictures of classes that "
            f"the run did not begin with: {', '.join(map(shown, other[:_SHOWN]))}"
        )
    return kept


def pick(
    splits: Mapping[str, str], split: str, files: Mapping[str, T], base: pathlib.Path
) -> dict[str, T]:
    """Those of `files` that are in `split`; raises InputError if there is none."""
    found = {path: value for path, value in files.items() if splits.get(path) == split}
    if not found:
        raise InputError(
            f"data.split={split!r}: {shown(str(base))} has {len(files):,} pictures, but none for "
            f"{split}; add pictures, or evaluate all of them with the split 'all'"
        )
    return found


def check_split(split: str, known: Sequence[str], root: pathlib.Path) -> None:
    """Raise InputError if `split` is none of the splits `known` of own pictures in `root`."""
    if split not in known:
        has = " and ".join(map(repr, known))
        raise InputError(f"data.split={split!r}: {shown(str(root))} has the splits {has}")


def _class_names(layout: Layout) -> tuple[str, ...]:
    """The classes of the training images; raises InputError if another split has others."""
    train_root = layout.train_root
    class_names = tuple(path.name for path in class_like_folders(train_root))
    if not class_names:
        needed = (
            "needed: at least 2 folders, each named after its class and holding its images; for "
            "pictures without classes set --config.data.name=unlabelled"
        )
        if layout.ignored:
            needed += (
                f"; if {train_root.name} is the name of a class, as those beside it are "
                f"({_list_names(layout.ignored)}), rename it"
            )
        raise InputError(
            f"data.data_dir: {shown(str(train_root))} has 0 class folders: "
            f"{describe_contents(train_root, needed)}"
        )
    if looking := [name for name in class_names if name.lower() in _NO_CLASSES]:
        raise InputError(
            f"data.data_dir: {shown(str(train_root))} has folders of classes that look like "
            f"splits: {', '.join(looking)}; put train/ and val/ above the classes, or rename them"
        )
    say_ignored(layout.root, map(str, layout.ignored))
    for split in ("val", "test"):
        if split not in layout.splits:
            continue
        other = layout.splits[split]
        if unknown := sorted({path.name for path in class_like_folders(other)} - {*class_names}):
            raise InputError(
                f"data.data_dir: {shown(str(other))} has the classes {unknown}, which "
                f"{shown(str(train_root))} lacks; give them training images there or remove them"
            )
    return class_names


def _list_images(
    split_root: pathlib.Path, doubles: Doubles
) -> tuple[dict[str, str], dict[str, int]]:
    """Class and bytes of each image, by its path relative to `split_root` with forward slashes."""
    walk = Walk(doubles)
    files: dict[str, str] = {}
    sizes: dict[str, int] = {}
    empty = []
    for path in class_like_folders(split_root):
        found = walk.pictures(path)
        for name, size in found.items():
            file = f"{path.name}/{name}"
            files[file], sizes[file] = path.name, size
        if not found:
            empty.append(path.name)
    for path in split_root.iterdir():
        if path.is_dir():
            walk.ignored += [str(path)] * is_hidden(path.name)
        elif walk.size_of_picture(split_root, path.name) is not None:
            walk.skip("beside the folders of the classes", path)
    walk.say(split_root)
    if empty and files:
        warn_once(
            f"{shown(str(split_root))}: these classes hold no picture: "
            f"{', '.join(map(shown, empty))}"
        )
    return files, sizes
