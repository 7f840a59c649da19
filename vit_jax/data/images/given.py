"""Images without labels that a user names or hands over; every label is 0."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.base.errors import InputError, collect_faults, shown
from vit_jax.data.contract import Source, fingerprint
from vit_jax.data.host_tf import tf
from vit_jax.data.images.files import images_below
from vit_jax.data.images.formats import (
    EXTENSIONS,
    USUAL,
    Reading,
    as_file,
    as_known_format,
    read_image,
    to_known_format,
    to_known_mode,
    why_file_unreadable,
)
from vit_jax.data.retries import read_if_there
from vit_jax.data.subset import give_channels


def find_images(paths: Sequence[str | os.PathLike]) -> list[str]:
    """As `search_images`, for callers that need all of `paths`.

    Raises: InputError naming every path that does not exist or holds no image.
    """
    found, faults = search_images(paths)
    collect_faults([f"{path}: {fault}" for path, fault in faults.items()])
    if not found:
        raise InputError("images: none given; give a path, an image, an array or a list of these")
    return found


def search_images(paths: Sequence[str | os.PathLike]) -> tuple[list[str], dict[str, str]]:
    """The files in `paths`, and the images at any depth below its folders.

    The files of each folder are sorted. A warning names what is skipped in a folder.

    Returns: the files, and {path: why it gives none} of the other paths.
    """
    found, faults = [], {}
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            below = sorted(os.path.join(path, name) for name in images_below(path))
            found += below
            if not below:
                faults[shown(path)] = f"holds no file ending in {', '.join(EXTENSIONS)}"
        elif path.is_file():
            found.append(os.fspath(path))
        elif path.exists():  # whose reading may never end
            faults[shown(path)] = "no file, but a pipe or a device; save the image as a file"
        else:
            faults[shown(path)] = "no such file or folder"
    return found, faults


def stamp_of(path: str | os.PathLike) -> str:
    """Size and time of change of a file, by which another one in its place is known; "": none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def image_files(paths: Sequence[str], reading: Reading = USUAL) -> Source:
    """A source of the files `paths`, in that order; each is read on demand.

    What cannot be read is masked at once: nothing is learned from it.
    """
    encoded = [os.fsencode(path) for path in paths]
    paths_tensor, missing = tf.constant(encoded, tf.string), {*encoded}
    return _without_labels(
        lambda record_id: read_image(tf.gather(paths_tensor, record_id), reading, missing),
        identity=("files", list(paths), [*map(stamp_of, paths)]),
        names=[shown(path) for path in paths],
        channels=reading.channels,
        why_unreadable=lambda record: why_file_unreadable(paths[record], reading),
    )


def open_images(images: Any, reading: Reading = USUAL) -> Source:
    """A source of `images`, in their order.

    Args:
      images: one image, or a list of images of any kinds and sizes: a path to a file or a folder;
        the bytes of a file; a Pillow image; an array of uint8 pixels (H, W) or (H, W, C) for C of
        1, 3 or 4, or several of one size, (N, H, W, C). Folders in a list are searched as by
        `find_images`.
      reading: how they become pixels.

    Raises:
      InputError: if there are none, or one is of another kind.
    """
    is_one = isinstance(images, (str, os.PathLike, bytes, Image.Image))
    if is_one or (hasattr(images, "ndim") and images.ndim < 4):
        images = [images]
    images = list(images)
    if all(isinstance(image, (str, os.PathLike)) for image in images):
        return image_files(find_images(images), reading)
    files = [file for i, image in enumerate(images) for file in _encode(i, image, reading)]
    encoded = tf.constant([content for _, content in files])
    return _without_labels(
        lambda record_id: as_known_format(tf.gather(encoded, record_id), reading),
        identity=("images", [len(content) for _, content in files]),
        names=[path or f"image {i}" for i, (path, _) in enumerate(files)],
        channels=reading.channels,
    )


def _encode(i: int, image: Any, reading: Reading) -> list[tuple[str | None, bytes]]:
    """(path if there is one, bytes) of the image, or of each image of a folder.

    All are files, so that all are decoded alike; PNG is lossless.
    """
    if isinstance(image, (str, os.PathLike)):
        return [(path, epath.Path(path).read_bytes()) for path in find_images([image])]
    if isinstance(image, bytes):
        return [(None, image)]
    if not isinstance(image, Image.Image):
        image = image_of(image, f"images[{i}]")
    if image.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        try:
            image = to_known_mode(image, reading)
        except ValueError as e:
            raise InputError(f"images[{i}]: {e}") from None
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1, exif=image.getexif())
    return [(None, png.getvalue())]


def image_of(image: Any, where: str) -> Image.Image:
    """Pixels as an image of Pillow; raises InputError, from `where` on, if they are none."""
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise InputError(f"{where}: an array of {pixels.dtype}; needed: uint8 pixels")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.size == 0 or (pixels.ndim != 2 and pixels.shape[2:] not in ((3,), (4,))):
        needed = "(H, W), or (H, W, C) for 1, 3 or 4 channels C; give a stack of images as a list"
        raise InputError(f"{where}: an array of shape {pixels.shape}; needed: {needed}")
    return Image.fromarray(pixels)


def file_of(image: Any, reading: Reading) -> bytes:
    """An image of any kind as JPEG, PNG or BMP bytes; empty if its bytes hold no image."""
    found = content_of(image)
    return to_known_format(found, reading) if isinstance(found, bytes) else as_file(found, reading)


def content_of(image: Any) -> bytes | Image.Image:
    """An image of any kind as the bytes of its file, or as one of Pillow.

    Raises: InputError if it is of another kind.
    """
    if isinstance(image, Mapping):  # as `datasets` has what it has not decoded
        image = image["path"] if image["bytes"] is None else image["bytes"]
    if isinstance(image, str | os.PathLike):
        image = read_if_there(image)
    return image if isinstance(image, bytes | Image.Image) else image_of(image, "image")


def _without_labels(
    read_encoded: Callable[[tf.Tensor], tf.Tensor],
    identity: Sequence[Any],
    names: Sequence[str],
    channels: int,
    why_unreadable: Callable[[int], str] = lambda record: "",
) -> Source:
    """A source of images without labels.

    read_encoded: index -> the bytes of an image, as `formats.as_known_format` gives them.
    identity: of the data, for the fingerprint.
    names: of the images, in messages.
    channels: number of channels that they are decoded to.
    why_unreadable: as in `Source`.
    """

    def read(record_id: tf.Tensor) -> dict[str, tf.Tensor]:
        label, mask = tf.zeros([], tf.int32), tf.ones([])
        return {"image": read_encoded(record_id), "label": label, "mask": mask}

    source = Source(
        name="files",
        split="all",
        num_examples=len(names),
        num_classes=1,
        fingerprint=fingerprint(*identity),
        read=read,
        record_name=names.__getitem__,
        encoded=True,
        why_unreadable=why_unreadable,
    )
    return give_channels(source, channels)
