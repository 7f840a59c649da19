"""A folder of images: one sub-folder per class, or images without labels at any depth.

    DIR/cat/1.jpg           or, with splits of its own,    DIR/train/cat/1.jpg
    DIR/dog/more/2.PNG                                     DIR/val/cat/2.jpg
                                                           DIR/test/dog/3.webp

Splits may be named train or training; val, valid or validation; test or testing, in any case.
Files with an extension in `formats.EXTENSIONS` count at any depth below the class folder. Each is
read on demand. A warning names the folders and files that are ignored, hidden ones included.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from vit_jax.base.errors import InputError, few, shown
from vit_jax.data.class_names import as_name, places_of, sorted_classes
from vit_jax.data.contract import DataSet, Request, Source, fingerprint
from vit_jax.data.division import Divider, Groups
from vit_jax.data.host_tf import tf
from vit_jax.data.images.files import (
    BESIDE,
    File,
    Walk,
    class_like_folders,
    describe_contents,
    group_links,
    images_below,
    is_hidden,
    say_ignored,
    sort_by_split,
    split_of,
    warn_once,
)
from vit_jax.data.images.formats import Turn, read_image, turn_of, why_file_unreadable
from vit_jax.data.retries import retried

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

    def find(
        self, split: str, list_images: Callable[[pathlib.Path], dict[str, File]]
    ) -> tuple[pathlib.Path, dict[str, File]]:
        """(the folder of the images of `split`, {path from there: file}), by `list_images`."""
        if split == "all" and len(self.splits) > 1:
            found = {folder.name: list_images(folder) for folder in self.splits.values()}
            return self.root, {f"{n}/{p}": file for n in found for p, file in found[n].items()}
        base = self.splits.get(split, self.train_root)
        return base, list_images(base)


def find_layout(data_dir: str | os.PathLike | None) -> Layout:
    """The layout of the folder `data_dir`.

    Raises: InputError if there is no such folder, a split has two, or val or test has no train.
    """
    if data_dir is None:
        raise InputError("data.data_dir=None: needs a folder; give --config.data.data_dir=PATH")
    root = pathlib.Path(data_dir).expanduser()
    where = f"data.data_dir={shown(root)!r}"
    if not root.is_dir():
        is_list = root.is_file()
        remedy = "use --config=folder:list" if is_list else "give --config.data.data_dir=PATH"
        raise InputError(f"{where} is not a local folder; needed: a folder of images; {remedy}")
    splits, ignored = sort_by_split(class_like_folders(root), where)
    if splits and "train" not in splits:
        raise InputError(
            f"{where} has {'/ and '.join(path.name for path in splits.values())}/ but no train/ "
            f"beside it{f' (found {few(p.name for p in ignored)})' if ignored else ''}; add it"
        )
    return Layout(root, splits, ignored if splits else [])


class Folder(DataSet):
    """The images below `data_dir`; splits `train`, `val`, `all`, and `test` if it has a folder.

    Without a folder for `val`, a tenth of the training images is held out, as `divider` says.
    Classes are the sorted names of the training folder's sub-folders, as numbers if all are whole
    numbers, in all splits, but for those with images that are in no split.
    """

    is_own = True

    @classmethod
    def splits(cls, name: str, data_dir: str | None) -> Sequence[str]:
        layout = find_layout(data_dir)
        return layout.names() if len(class_like_folders(layout.train_root)) > 1 else ()

    def open(self, request: Request) -> Source:
        """Raises InputError if the folder, a split, or all classes are missing or empty."""
        split, divider = request.split, request.divider
        layout = find_layout(request.data_dir)
        check_split(split, layout.names(), layout.root)
        class_names = _class_names(layout, divider.class_names)
        base, found = layout.find(split, _list_images)
        below_split = bool(layout.splits) and base == layout.root
        classes = {path: as_name(path.split("/")[below_split]) for path in found}
        groups = group_links(base, found, classes)
        if split != "all" and base != layout.train_root:
            class_names = _begun_with(class_names, layout, divider)
            kept = of_classes(class_names, {path: (name,) for path, name in classes.items()}, base)
            classes = {path: classes[path] for path in kept}
            _warn_of_links(base, classes, layout.train_root)
            there = {*classes.values()}
            if there and (without := [n for n in class_names if as_name(n) not in there]):
                warn_once(
                    f"{shown(base)}: no images of {few(without)}, which {shown(layout.train_root)} "
                    "has; metrics of this split leave these classes out"
                )
        elif classes and split != "all":
            given = "val" in layout.splits
            splits = split_files(divider, layout.root, base, classes, None if given else groups)
            unknown = {*classes.values()} - {classes[path] for path in splits}
            class_names = tuple(name for name in class_names if as_name(name) not in unknown)
            classes = pick(splits, split, classes, base)
        if not classes:
            what = f"holds no images in folders of classes: {describe_contents(base)}"
            raise InputError(f"data.data_dir: {shown(base)} {what}")
        label_of = places_of(class_names)
        labels = {path: label_of[classes[path]] for path in sorted(classes)}
        return own_images(request, layout.root, base, found, labels, class_names, base)


class Unlabelled(DataSet):
    """All images at any depth below `data_dir`, flat or nested, without classes.

    Splits are `train`, `all`, and those with a folder of their own; nothing else is held out.
    """

    is_own = True

    def open(self, request: Request) -> Source:
        """Raises InputError if there is no folder, or no image in it."""
        layout = find_layout(request.data_dir)
        names = [*dict.fromkeys(("train", *layout.splits, "all"))]
        check_split(request.split, names, layout.root)
        base, found = layout.find(request.split, images_below)
        if not found:
            raise InputError(
                f"data.data_dir: {shown(base)} holds no images: {describe_contents(base)}"
            )
        labels = dict.fromkeys(sorted(found), 0)
        if request.split == "train":
            classes = dict.fromkeys(found, "")
            splits = split_files(request.divider, layout.root, base, classes, None)
            labels = pick(splits, "train", labels, base)
        return own_images(request, layout.root, base, found, labels, None, base)


def own_images(
    request: Request,
    root: pathlib.Path,
    base: pathlib.Path,
    files: Mapping[str, File],
    labels: Mapping[str, int] | Mapping[str, np.ndarray],
    class_names: tuple[str, ...] | None,
    where: pathlib.Path,
) -> Source:
    """The source of the user's own image files with `labels`, in this order.

    root: folder of the data, from which messages name the files.
    base: the folder in `root` from which paths begin.
    files: {path: file}, more than those with labels.
    labels: {path: label}, an int; or float32 (C,), 1 for each class that the image shows.
    where: the folder or the list that has the files, for messages.

    Raises: InputError if more of the files are missing than `max_corrupt_fraction`, or all those
      with labels are.
    """
    paths, sizes = [*labels], [files[path].size for path in labels]
    _check_missing(request, where, files, paths)
    columns = np.array([*labels.values()])
    multi_label = columns.ndim == 2
    labels_tensor = tf.constant(columns, tf.float32 if multi_label else tf.int32)
    paths_tensor = tf.constant([os.fsencode(path) for path in paths], tf.string)
    beginning = os.fsencode(base) + os.fsencode(os.sep)
    missing = {beginning + os.fsencode(path) for path in paths if files[path].size < 0}

    def read(record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        path = tf.strings.join([beginning, tf.gather(paths_tensor, record_id)])
        return {
            "image": read_image(path, request.reading, missing),
            "label": tf.gather(labels_tensor, record_id),
            "mask": tf.ones([]),
        }

    def turn(record: int) -> Turn | None:
        path = base / paths[record]
        return turn_of(retried(path.read_bytes, path))

    identity = [request.name, request.split, class_names, paths, sizes]
    if request.name == "list":
        identity.append(columns.tolist())
    return Source(
        name=request.name,
        split=request.split,
        num_examples=len(paths),
        num_classes=1 if class_names is None else len(class_names),
        class_names=class_names,
        fingerprint=fingerprint(*identity, *["exif"] * request.exif),
        read=read,
        record_name=lambda record: shown(base.relative_to(root) / paths[record]),
        encoded=True,
        why_unreadable=lambda record: why_file_unreadable(base / paths[record], request.reading),
        turn=turn,
        multi_label=multi_label,
        file_names=lambda start, stop: paths[start:stop],
    )


def _check_missing(
    request: Request, where: pathlib.Path, files: Mapping[str, File], paths: Collection[str]
) -> None:
    """Raise InputError if too many of `files`, or all `paths` of the split, are missing."""
    most, missing = request.max_corrupt_fraction, [p for p in files if files[p].size < 0]
    if len(missing) > most * len(files) or {*paths}.issubset(missing):
        raise InputError(
            f"data.data_dir: {len(missing):,} of the {len(files):,} images in {shown(where)} "
            f"({len(missing) / len(files):.0%}) are missing, with "
            f"data.max_corrupt_fraction={most}: {few(missing)}; restore them, take them out of the "
            "data, or raise data.max_corrupt_fraction"
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
    splits = divider(shown(root), named, groups)
    return {path: splits[before + path] for path in classes if before + path in splits}


def _begun_with(class_names: tuple[str, ...], layout: Layout, divider: Divider) -> tuple[str, ...]:
    """Those of `class_names` in which the run of `divider` began to train; all, if in none."""
    place = len(layout.train_root.relative_to(layout.root).parts)
    names = {name.split("/")[place] for name in divider.begun_with() if name.count("/") > place}
    begun = {*map(as_name, names)}
    return tuple(name for name in class_names if as_name(name) in begun) or class_names


def of_classes(
    class_names: Sequence[str], files: Mapping[str, Sequence[str]], where: pathlib.Path
) -> list[str]:
    """The paths of `files`, {path: classes}, whose classes the run began with; warns of others."""
    known = places_of(class_names).keys()
    kept = [path for path, names in files.items() if known >= {*names}]
    if len(kept) < len(files):
        other = {name for names in files.values() for name in names} - known
        warn_once(
            f"{shown(where)}: left out {len(files) - len(kept):,} images of classes that "
            f"the run did not begin with: {few(sorted(other))}"
        )
    return kept


def pick(
    splits: Mapping[str, str], split: str, files: Mapping[str, T], base: pathlib.Path
) -> dict[str, T]:
    """Those of `files` that are in `split`; raises InputError if there is none."""
    found = {path: value for path, value in files.items() if splits.get(path) == split}
    if not found:
        raise InputError(
            f"data.split={split!r}: {shown(base)} has {len(files):,} images, but none for "
            f"{split}; add images, or evaluate all of them with the split 'all'"
        )
    return found


def check_split(split: str, known: Sequence[str], root: pathlib.Path) -> None:
    """Raise InputError if `split` is none of the splits `known` of the images in `root`."""
    if split not in known:
        has = " and ".join(map(repr, known))
        raise InputError(f"data.split={split!r}: {shown(root)} has the splits {has}")


def _class_names(layout: Layout, known: Sequence[str]) -> tuple[str, ...]:
    """The classes of the training images, those `known` first.

    Raises: InputError if another split has others.
    """
    train_root = layout.train_root
    where = f"data.data_dir: {shown(train_root)}"
    class_names = sorted_classes((p.name for p in class_like_folders(train_root)), known)
    if not class_names:
        needed = (
            "needed: at least 2 folders, each named after its class and holding its images; for "
            "images without classes set --config.data.name=unlabelled"
        )
        raise InputError(f"{where} has 0 class folders: {describe_contents(train_root, needed)}")
    if looking := [name for name in class_names if split_of(name)]:
        raise InputError(
            f"{where} has folders of classes that look like splits: {', '.join(looking)}; rename "
            "them"
        )
    say_ignored(layout.root, layout.ignored)
    for other in layout.splits.values():
        names = {as_name(path.name) for path in class_like_folders(other)}
        if unknown := sorted(names - places_of(class_names).keys()):
            raise InputError(
                f"data.data_dir: {shown(other)} has the classes {unknown}, which "
                f"{shown(train_root)} lacks; give them training images there or remove them"
            )
    return class_names


def _list_images(split_root: pathlib.Path) -> dict[str, File]:
    """{class/path: file} of the images below the folders of classes in `split_root`."""
    walk, empty = Walk(), []
    files: dict[str, File] = {}
    for path in class_like_folders(split_root):
        found = walk.images(path)
        files |= {f"{path.name}/{name}": file for name, file in found.items()}
        if not found:
            empty.append(path.name)
    for path in split_root.iterdir():
        if path.is_dir():
            walk.ignored += [str(path)] * is_hidden(path.name)
        elif walk.look_at(split_root, path.name):
            walk.skipped[BESIDE].append(str(path))
    walk.say(split_root)
    if empty and files:
        warn_once(f"{shown(split_root)}: these classes hold no image: {few(empty)}")
    return files


def _warn_of_links(base: pathlib.Path, paths: Collection[str], train_root: pathlib.Path) -> None:
    """Warns of the `paths` below `base` that are links to training images."""
    root = os.path.join(os.path.realpath(train_root), "")
    if linked := [p for p in paths if os.path.realpath(base / p).startswith(root)]:
        warn_once(
            f"{shown(base)}: {len(linked):,} images are links into {train_root.name}/, so "
            f"they are trained on: {few(sorted(linked))}; remove the links"
        )
