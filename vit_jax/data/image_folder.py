"""A folder of images as a source: one sub-folder a class.

    DIR/cat/1.jpg           or, with a validation set of its own,    DIR/train/cat/1.jpg
    DIR/dog/more/2.PNG                                               DIR/val/cat/2.jpg

JPEG and PNG files are read, whatever the case of their extension, at any depth below the class;
names that begin with a dot are ignored. Files are read when their record is asked for.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re

from vit_jax.data.host_tf import tf
from vit_jax.data.sources import Source, same_fingerprints
from vit_jax.errors import InputError

EXTENSIONS = (".jpg", ".jpeg", ".png")


def check_holdout(rule: str) -> None:
    """Raises InputError if `rule` is no value of `data.holdout`."""
    if not re.fullmatch(r"names|seed \d+", rule):
        raise InputError(
            f"data.holdout={rule!r}: needs names, or for the images that an older run held out "
            "its seed, e.g. 'seed 0'"
        )


def folder(*, split: str, data_dir: str | os.PathLike | None, holdout: str, **_) -> Source:
    """The images below `data_dir`; splits `train` and `val`.

    Without `val/`, a tenth of the images, round(n / 10) but at least one, is held out as `val`:
    chosen by the rule `holdout` and the files' names, and spread evenly over the classes. Classes
    are the sorted names of the training folder's sub-folders, in both splits.

    Raises: InputError if the folder, a split, or a class is missing or empty.
    """
    root = _check_folder(split, data_dir)
    train_root = root / "train" if (root / "train").is_dir() else root
    class_names = _class_names(root, train_root)
    if (root / "val").is_dir():
        base = root / split
        files = _list_images(base)
    else:
        base = train_root
        files = _list_images(base)
        held_out = _held_out(files, holdout)
        files = {path: c for path, c in files.items() if (path in held_out) == (split == "val")}
    if not files:
        raise InputError(f"data.data_dir: {base} holds no images; add some")

    paths = sorted(files)
    label_of = {class_name: label for label, class_name in enumerate(class_names)}
    labels = [label_of[files[path]] for path in paths]
    sizes = [os.stat(base / path).st_size for path in paths]
    paths_tensor, labels_tensor = tf.constant(paths), tf.constant(labels, tf.int32)

    def read(record_id):
        path = tf.strings.join([os.fspath(base), tf.gather(paths_tensor, record_id)], os.sep)
        return {
            "image": tf.io.read_file(path),
            "label": tf.gather(labels_tensor, record_id),
            "mask": tf.ones([]),
        }

    return Source(
        name="folder",
        split=split,
        num_examples=len(paths),
        num_classes=len(class_names),
        class_names=class_names,
        image_shape=None,
        fingerprints=same_fingerprints("folder", split, class_names, paths, sizes),
        read=read,
        record_name=lambda record: os.fspath(base.relative_to(root) / paths[record]),
        encoded=True,
        file_names=lambda start, stop: paths[start:stop],
    )


def _check_folder(split: str, data_dir: str | os.PathLike | None) -> pathlib.Path:
    """The path of `data_dir`; raises InputError if it or `split` is none of an image folder."""
    if split not in ("train", "val"):
        raise InputError(f"data.split={split!r}: an image folder has the splits 'train' and 'val'")
    if data_dir is None:
        raise InputError(
            "data.data_dir=None: data.name='folder' needs the folder with the images; "
            "give --config.data.data_dir=PICTURES"
        )
    root = pathlib.Path(data_dir)
    if not root.is_dir():
        raise InputError(
            f"data.data_dir={str(root)!r} is not a local folder; needed: one folder a class"
        )
    if (root / "val").is_dir() and not (root / "train").is_dir():
        raise InputError(f"data.data_dir={str(root)!r} has val/ but no train/ beside it; add it")
    return root


def _class_names(root: pathlib.Path, train_root: pathlib.Path) -> tuple[str, ...]:
    """The classes of the training images; raises InputError if `root`/val has others."""
    class_names = tuple(_visible_folders(train_root))
    if len(class_names) < 2:
        raise InputError(
            f"data.data_dir: {train_root} has {len(class_names)} class folders {class_names}; "
            "needed: at least 2, each named after its class and holding its images"
        )
    val_names = _visible_folders(root / "val") if (root / "val").is_dir() else []
    if unknown := sorted(set(val_names) - set(class_names)):
        raise InputError(
            f"data.data_dir: {root / 'val'} has the classes {unknown}, which {train_root} "
            "lacks; give them training images there or remove them"
        )
    return class_names


def _visible_folders(parent: pathlib.Path) -> list[str]:
    return sorted(p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))


def _list_images(split_root: pathlib.Path) -> dict[str, str]:
    """Class of each image, by its path relative to `split_root` with forward slashes."""
    files: dict[str, str] = {}
    for class_name in _visible_folders(split_root):
        num_before = len(files)
        seen = set()  # links are followed, but not round and round
        for parent, folders, names in os.walk(split_root / class_name, followlinks=True):
            seen.add(os.path.realpath(parent))
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".")
                and os.path.realpath(os.path.join(parent, name)) not in seen
            ]
            for name in names:
                if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                    path = pathlib.Path(parent, name).relative_to(split_root)
                    files[path.as_posix()] = class_name
        if len(files) == num_before:
            raise InputError(
                f"data.data_dir: {split_root / class_name} holds no image; needed: files ending "
                f"in {', '.join(EXTENSIONS)}; add some or remove the folder"
            )
    return files


def _held_out(files: dict[str, str], rule: str) -> set[str]:
    """A tenth of `files` (path -> class), as evenly over the classes as can be.

    The j-th of a class's k files, in the order of the hashes of their names, gets the rank
    (j + 0.5) / k; the lowest ranks of all classes are held out. By the rule "seed N" the seed comes
    before the name that is hashed.
    """
    prefix = "" if rule == "names" else rule.removeprefix("seed ") + "/"

    def draw(path):
        return hashlib.sha256(f"{prefix}{path}".encode()).digest()

    by_class: dict[str, list[str]] = {}
    for path in sorted(files, key=draw):
        by_class.setdefault(files[path], []).append(path)
    ranks = {
        path: ((j + 0.5) / len(paths), path)
        for paths in by_class.values()
        for j, path in enumerate(paths)
    }
    num_held_out = max(1, round(len(files) / 10))
    return set(sorted(files, key=ranks.__getitem__)[:num_held_out])
