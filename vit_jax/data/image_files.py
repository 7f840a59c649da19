"""Sources of unlabelled images: files given by their paths, or all in a folder; labels are 0."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.data.division import Divider
from vit_jax.data.folder_contents import describe_contents
from vit_jax.data.host_tf import tf
from vit_jax.data.image_folder import (
    check_split,
    find_layout,
    pick,
    picture_source,
    split_files,
)
from vit_jax.data.pictures import (
    EXTENSIONS,
    Walk,
    as_paths,
    read_picture,
    shown,
    why_file_unreadable,
)
from vit_jax.data.sources import Source, fingerprint
from vit_jax.data.subset import give_channels
from vit_jax.errors import InputError, collect_faults


def find_images(paths: Sequence[str | os.PathLike]) -> list[str]:
    """As `search_images`, for callers that need all of `paths`.

    Raises: InputError naming every path that does not exist or holds no image.
    """
    found, faults = search_images(paths)
    collect_faults([f"{path}: {fault}" for path, fault in faults.items()])
    if not found:
        raise InputError("no images; give files or folders")
    return found


def search_images(paths: Sequence[str | os.PathLike]) -> tuple[list[str], dict[str, str]]:
    """The files in `paths`, and the pictures at any depth below its folders.

    The files of each folder are sorted. A warning names what is skipped in a folder.

    Returns: the files, and {path: why it gives none} of the other paths.
    """
    found, faults = [], {}
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            walk = Walk()
            below = sorted(os.path.join(path, name) for name in walk.pictures(path))
            walk.say(path)
            found += below
            if not below:
                endings = ", ".join(EXTENSIONS)
                faults[shown(str(path))] = f"holds no file ending in {endings}"
        elif path.is_file():
            found.append(os.fspath(path))
        elif path.exists():  # whose reading may never end
            faults[shown(str(path))] = "no file, but a pipe or a device; save the picture as a file"
        else:
            faults[shown(str(path))] = "no such file or folder"
    return found, faults


def image_files(paths: Sequence[str], exif: bool = True, channels: int = 3) -> Source:
    """A source of the files `paths`, in that order; each is read on demand.

    `exif` turns them by their EXIF orientation; they are decoded to `channels`.
    """
    paths_tensor = as_paths(paths)
    return without_labels(
        lambda record_id: read_picture(tf.gather(paths_tensor, record_id), exif),
        identity=("files", list(paths)),
        names=[shown(path) for path in paths],
        channels=channels,
        why_unreadable=lambda record: why_file_unreadable(paths[record]),
    )


def without_labels(
    read_image: Callable[[tf.Tensor], tf.Tensor],
    identity: Sequence[Any],
    names: Sequence[str],
    channels: int,
    why_unreadable: Callable[[int], str] = lambda record: "",
) -> Source:
    """A source of images without labels.

    read_image: index -> the bytes of an image, as `pictures.as_known_format` gives them.
    identity: of the data, for the fingerprint.
    names: of the images, in messages.
    channels: number of channels that they are decoded to.
    why_unreadable: as in `Source`.
    """

    def read(record_id):
        return {
            "image": read_image(record_id),
            "label": tf.zeros([], tf.int32),
            "mask": tf.ones([]),
        }

    source = Source(
        name="files",
        split="all",
        num_examples=len(names),
        num_classes=1,
        class_names=None,
        image_shape=None,
        fingerprint=fingerprint(*identity),
        read=read,
        record_name=names.__getitem__,
        encoded=True,
        why_unreadable=why_unreadable,
    )
    return give_channels(source, channels)


def unlabelled(
    *,
    split: str,
    data_dir: str | os.PathLike | None,
    divider: Divider | None = None,
    exif: bool = True,
    max_corrupt_fraction: float = 1.0,
    **_,
) -> Source:
    """All pictures at any depth below `data_dir`, flat or nested, without classes.

    Splits are `train`, `all`, and those with a folder of their own; nothing else is held out.

    Raises: InputError if there is no folder, or no picture in it.
    """
    layout = find_layout(data_dir)
    check_split(split, [*dict.fromkeys(("train", *layout.splits, "all"))], layout.root)
    base, parts = layout.folders(split)
    sizes: dict[str, int] = {}
    for part in parts:
        walk = Walk()
        beginning = "" if part == base else f"{part.name}/"
        sizes |= {beginning + path: size for path, size in walk.pictures(part).items()}
        walk.say(part)
    if sizes and split == "train":
        divider = divider or Divider(anew=True)
        splits = split_files(divider, layout.root, base, dict.fromkeys(sizes, ""), None)
        sizes = pick(splits, split, sizes, base)
    paths = sorted(sizes)
    if not paths:
        raise InputError(
            f"data.data_dir: {shown(str(base))} holds no images: {describe_contents(base)}"
        )
    labels = [0] * len(paths)
    return picture_source(
        "unlabelled", layout.root, base, split, paths, labels, None,
        sizes=[sizes[path] for path in paths], exif=exif,
        max_corrupt_fraction=max_corrupt_fraction,
    )  # fmt: skip
