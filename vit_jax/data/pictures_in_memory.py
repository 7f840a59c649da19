"""A source of unlabelled images that are already in memory; every label is 0."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.data.host_tf import tf
from vit_jax.data.image_files import find_images, image_files, without_labels
from vit_jax.data.pictures import as_known_format, to_8_bit
from vit_jax.data.sources import Source
from vit_jax.errors import InputError


def open_images(images: Any, exif: bool = True, channels: int = 3) -> Source:
    """A source of `images`, in their order.

    Args:
      images: one image, or a list of images of any kinds and sizes: a path to a file or a folder; a
        Pillow image; an array of uint8 pixels (H, W) or (H, W, C) for C of 1, 3 or 4, or several of
        one size, (N, H, W, C). Folders in a list are searched as by `find_images`.
      exif, channels: as in `image_files`.

    Raises:
      InputError: if there are none, or one is of another kind.
    """
    if isinstance(images, (str, os.PathLike)):
        return image_files(find_images([images]), exif, channels)
    if isinstance(images, Image.Image) or (hasattr(images, "ndim") and images.ndim < 4):
        images = [images]
    images = list(images)
    if images and all(isinstance(image, (str, os.PathLike)) for image in images):
        return image_files(find_images(images), exif, channels)
    encoded = [file for i, image in enumerate(images) for file in _encode(i, image)]
    return _in_memory(encoded, exif, channels)


def _encode(i: int, image: Any) -> list[tuple[str | None, bytes]]:
    """(path if there is one, bytes) of the image, or of those of a folder.

    All are files, so that all are decoded alike; PNG is lossless.
    """
    if isinstance(image, (str, os.PathLike)):
        return [(path, epath.Path(path).read_bytes()) for path in find_images([image])]
    if not isinstance(image, Image.Image):
        image = _from_pixels(i, image)
    if image.mode not in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        try:
            image = to_8_bit(image)
        except ValueError as e:
            raise InputError(f"images[{i}]: {e}; scale them to 8 or 16 bits") from None
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1, exif=image.getexif())
    return [(None, png.getvalue())]


def _from_pixels(i: int, image: Any) -> Image.Image:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise InputError(
            f"images[{i}]: an array of {pixels.dtype}; needed: uint8 pixels from 0 to 255. For "
            "values in the model's own range, call model.apply (vit_jax.load_pretrained)"
        )
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.size == 0 or not (
        pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    ):
        raise InputError(
            f"images[{i}]: an array of shape {pixels.shape}; needed: (H, W), or (H, W, C) for 1, 3 "
            "or 4 channels C"
        )
    return Image.fromarray(pixels)


def _in_memory(encoded: Sequence[tuple[str | None, bytes]], exif: bool, channels: int) -> Source:
    """A source of (path or None, bytes) of files."""
    if not encoded:
        raise InputError("images: none given; give a path, a picture, an array or a list of these")
    kept = tf.constant([image for _, image in encoded])
    return without_labels(
        lambda record_id: as_known_format(tf.gather(kept, record_id), exif),
        identity=("images", [len(image) for _, image in encoded]),
        names=[path or f"image {i}" for i, (path, _) in enumerate(encoded)],
        channels=channels,
    )
