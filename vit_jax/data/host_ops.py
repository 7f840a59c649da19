"""Preprocessing on the host: ops that map an image to an image, made from literal arguments.

An op is called as op(image, key) inside a tf.data map. It takes uint8 pixels (h, w, 3), or JPEG or
PNG bytes if it is in TAKES_ENCODED, and returns uint8 pixels; results in floating point are rounded
and clipped. `key` is an int64 (2,) seed for TensorFlow's stateless ops. `size` is an int or (H, W);
the default is data.image_size. Wrong arguments raise ValueError.

The argument `crop` lets a resize follow data.image_size: "resize_small(crop=0.875)|central_crop"
resizes to 256 for an image size of 224, and to 439 for 384. Cropping an image smaller than `size`
is an error, unless `pad=True` adds a black border.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np

from vit_jax.config import image_hw
from vit_jax.config.base import LARGEST_SIDE
from vit_jax.data import jpeg
from vit_jax.data.augment import autoaugment_pair, random_operations
from vit_jax.data.host_tf import tf

Size = int | tuple[int, int]


@dataclasses.dataclass(frozen=True)
class HostOp:
    """An op with its arguments: op(image, key) returns the next image.

    gives: the minimum (height, width) of its results; None if it keeps the image's size.
    needs: the minimum (height, width) of its input; None if it takes any size.
    decodes_for: the largest (height, width) to which a resize after it may resize; None if it
      decodes no JPEGs at a fraction of their size, or resizes them itself.
    """

    apply: Callable[[Any, Any], Any]
    gives: tuple[int, int] | None = None
    needs: tuple[int, int] | None = None
    decodes_for: tuple[int, int] | None = None

    def __call__(self, image, key):
        return self.apply(image, key)


def decode() -> HostOp:
    """Decode JPEG or PNG bytes to 8-bit RGB, also from grey, CMYK, alpha, palette and 16 bits."""
    return HostOp(lambda image, key: to_pixels(image))


def scaled_decode(size: Size | None = None, *, crop: float = 1.0) -> HostOp:
    """Decode as `decode`, but large JPEGs at a half, a quarter or an eighth of their size.

    For a resize that follows: "scaled_decode(crop=0.875)|resize_small(crop=0.875)|central_crop".
    Both sides stay at least twice `size` / `crop`; smaller JPEGs are decoded at full size. libjpeg
    scales while it decodes, which saves most of the time for photographs of 12 megapixels.

    The result is close to the mean of every 2 x 2, 4 x 4 or 8 x 8 pixels: in smooth images it
    differs from the mean by less than 0.6 of 255 on average, and by at most 5.
    """
    size = _before_crop(size, crop)

    def decode_jpeg(encoded):
        shape = tf.image.extract_jpeg_shape(encoded)
        sides = shape[0], shape[1]
        return jpeg.scaled_for(size, sides, lambda ratio: jpeg.decode(encoded, ratio=ratio))

    def apply(image, key):
        if image.dtype != tf.string:
            return image
        is_jpeg = tf.io.is_jpeg(image)
        return tf.cond(is_jpeg, lambda: decode_jpeg(image), lambda: to_pixels(image))

    return HostOp(apply, decodes_for=size)


def inception_crop(
    size: Size | None = None,
    area_min: float = 0.05,
    area_max: float = 1.0,
    antialias: bool = False,
) -> HostOp:
    """Crop a random window and resize it to `size`, bilinearly.

    The window covers `area_min` to `area_max` of the image and has an aspect from 3:4 to 4:3. For a
    JPEG only the window is decoded; the pixels equal those of the fully decoded image.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6.
    """
    return _inception_crop(size, area_min, area_max, antialias, scaled=False)


def scaled_inception_crop(
    size: Size | None = None,
    area_min: float = 0.05,
    area_max: float = 1.0,
    antialias: bool = False,
) -> HostOp:
    """Crop as `inception_crop`, but decode large windows of JPEGs as `scaled_decode` does.

    The window is the one that `inception_crop` draws, widened to multiples of 2, 4 or 8 pixels. It
    is at least twice `size` after it was scaled; smaller windows are as those of `inception_crop`.
    """
    return _inception_crop(size, area_min, area_max, antialias, scaled=True)


def _inception_crop(
    size: Size | None, area_min: float, area_max: float, antialias: bool, *, scaled: bool
) -> HostOp:
    size, resized = image_hw(size, "size"), _bilinear(antialias)
    is_number = all(type(area) in (int, float) for area in (area_min, area_max))
    if not (is_number and 0 < area_min <= area_max <= 1):
        raise ValueError(f"needs 0 < area_min <= area_max <= 1, not {area_min!r}, {area_max!r}")

    def window(shape, key):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            seed=key,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(area_min, area_max),
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        return begin[0], begin[1], extent[0], extent[1]

    def crop_jpeg(encoded, key):
        shape = tf.image.extract_jpeg_shape(encoded)
        found = window(shape, key)
        if not scaled:
            return jpeg.decode_window(encoded, shape, found)
        return jpeg.scaled_for(
            size, found[2:], lambda ratio: jpeg.decode_window(encoded, shape, found, ratio)
        )

    def crop_pixels(image, key):
        return tf.image.crop_to_bounding_box(image, *window(tf.shape(image), key))

    def apply(image, key):
        if image.dtype == tf.string:
            image = tf.cond(
                tf.io.is_jpeg(image),
                lambda: crop_jpeg(image, key),
                lambda: crop_pixels(to_pixels(image), key),
            )
        else:
            image = crop_pixels(image, key)
        return resized(image, size)

    return HostOp(apply, gives=size)


def resize(size: Size | None = None, antialias: bool = False, *, crop: float = 1.0) -> HostOp:
    """Resize to `size` / `crop`, rounded, bilinearly; `antialias` acts only on shrinking sides.

    `crop` is the fraction of each side that a later crop of `size` keeps.
    """
    size, resized = _before_crop(size, crop), _bilinear(antialias)
    return HostOp(lambda image, key: resized(image, size), gives=size)


def resize_small(size: Size | None = None, antialias: bool = False, *, crop: float = 1.0) -> HostOp:
    """Resize bilinearly to the smallest image that covers `size` / `crop`, keeping the aspect.

    An int `size` gives the shorter side. The longer side is rounded to the nearest pixel.
    `antialias` and `crop`: see `resize`.
    """
    size, resized = _before_crop(size, crop), _bilinear(antialias)

    def apply(image, key):
        sides = tf.shape(image)[:2]
        # The larger of the two scales size[i] / sides[i] covers both sides.
        i = tf.cast(size[1] * sides[0] > size[0] * sides[1], tf.int32)
        wanted, side = tf.gather(size, i), tf.gather(sides, i)
        return resized(image, (sides * wanted + side // 2) // side)

    return HostOp(apply, gives=size)


def central_crop(size: Size | None = None, *, pad: bool = False) -> HostOp:
    """Crop the central `size` of the image; `pad` first adds a black border to smaller images."""
    return _crop(size, pad, lambda spare, key: spare // 2)


def torchvision_resize(
    size: Size | None = None, filter: str = "bilinear", cover: bool = False, *, crop: float = 1.0
) -> HostOp:
    """Resize as torchvision's Resize does a PIL image, by Pillow's `filter`: bilinear or bicubic.

    An int `size` gives the shorter side, and the longer one is rounded down; (H, W) gives both
    sides. With `cover`, (H, W) keeps the aspect and the result is the smallest image that covers
    it, as in timm's ResizeKeepRatio; sides are rounded to nearest, halves to even. `crop`, for
    (H, W): see `resize`.

    95 % of the pixels equal Pillow's, the others differ by at most 2 of 255. Widths are resized
    first, as in torchvision's tensors; from version 13 on, Pillow resizes heights first if they
    shrink much more.
    """
    if filter not in ("bilinear", "bicubic"):
        raise ValueError(f"filter must be 'bilinear' or 'bicubic', not {filter!r}")
    if type(cover) is not bool:
        raise ValueError(f"cover must be True or False, not {cover!r}")
    shorter, (height, width) = type(size) is int, _before_crop(size, crop)

    def choose(sides):
        if cover:
            sides = tf.cast(sides, tf.float64)
            ratio = tf.minimum(sides[0] / height, sides[1] / width)
            return tf.cast(tf.round(sides / ratio), tf.int32)
        return sides * height // tf.reduce_min(sides) if shorter else tf.constant([height, width])

    def resized(image, size):
        values = tf.image.resize(image, size, filter, antialias=True)
        return tf.saturate_cast(tf.floor(values + 0.5), tf.uint8)  # halves up, as Pillow

    def apply(image, key):
        sides = tf.shape(image)[:2]
        size = choose(sides)
        # Pillow rounds and clips between the two passes; sharp edges show the difference.
        return resized(resized(image, tf.stack([sides[0], size[1]])), size)

    return HostOp(apply, gives=(height, width))


def torchvision_crop(size: Size | None = None) -> HostOp:
    """Crop the centre as torchvision's CenterCrop does, for an image that covers `size`.

    A margin that ends in half a pixel is rounded to even; `central_crop` rounds it down, as
    transformers does.
    """
    height, width = image_hw(size, "size")

    def apply(image, key):
        spare = tf.shape(image)[:2] - (height, width)
        begin = spare // 2 + tf.cast(spare % 4 == 3, tf.int32)
        shape = (height, width, image.shape[-1])
        window = tf.slice(image, tf.concat([begin, [0]], 0), shape)
        return tf.ensure_shape(window, shape)

    return HostOp(apply, gives=(height, width), needs=(height, width))


def random_crop(size: Size | None = None, *, pad: bool = False) -> HostOp:
    """Crop a random window of `size`, uniform over all positions; `pad`: see `central_crop`."""

    def draw(spare, key):
        share = tf.random.stateless_uniform([2], key, alg="philox")
        return tf.cast(share * tf.cast(spare + 1, tf.float32), tf.int32)

    return _crop(size, pad, draw)


def pad_crop(padding: int) -> HostOp:
    """Add `padding` black pixels on every side, then crop a random window of the original size.

    Source: He et al. 2015 (arXiv:1512.03385), section 4.2, with padding 4.
    """
    if not _is_count(padding):
        raise ValueError(f"padding must be an integer from 1 to {LARGEST_SIDE}, not {padding!r}")

    def apply(image, key):
        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        begin = tf.random.stateless_uniform(
            [2], key, maxval=2 * padding + 1, dtype=tf.int32, alg="philox"
        )
        window = tf.slice(padded, tf.concat([begin, [0]], 0), tf.shape(image))
        return tf.ensure_shape(window, image.shape)

    return HostOp(apply)


def randaugment(layers: int, magnitude: float, magnitude_std: float = 0.0) -> HostOp:
    """Apply `layers` operations in sequence, each drawn uniformly from the 16 in `augment`.

    `magnitude` is on the paper's scale, whose maximum is 10; most operations grow further beyond it
    (see augment.py). With `magnitude_std` each operation draws its magnitude from a normal
    distribution around `magnitude`, cut off at 0.

    Source: Cubuk et al. 2019 (arXiv:1909.13719), section 3. The paper has 14 operations, one of
    them the identity. The release that AugReg used (arXiv:2106.10270) replaces the identity by
    Invert, SolarizeAdd and Cutout; so does this op.
    """
    if not _is_count(layers):
        raise ValueError(f"layers must be an integer from 1 to {LARGEST_SIDE}, not {layers!r}")
    for name, value in (("magnitude", magnitude), ("magnitude_std", magnitude_std)):
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, not {value!r}")

    def apply(image, key):
        # The function uses only TensorFlow's control flow; skipping autograph's conversion of
        # Python's builds the graph in a fraction of the time.
        as_it_is = tf.autograph.experimental.do_not_convert(random_operations)
        return as_it_is(image, key, layers, magnitude, magnitude_std)

    return HostOp(apply)


def autoaugment() -> HostOp:
    """Apply one of 25 pairs of operations, the policy "v0" for ImageNet in `augment`.

    The operations and their magnitudes are those of `randaugment`, except that the translation is
    2.5 times as long.

    Source: Cubuk et al. 2018 (arXiv:1805.09501), with the policy of EfficientNet's release.
    """

    def apply(image, key):
        as_it_is = tf.autograph.experimental.do_not_convert(autoaugment_pair)  # as in randaugment
        return as_it_is(image, key)

    return HostOp(apply)


HOST_OPS: dict[str, Callable[..., HostOp]] = {
    "decode": decode,
    "scaled_decode": scaled_decode,
    "inception_crop": inception_crop,
    "scaled_inception_crop": scaled_inception_crop,
    "resize": resize,
    "resize_small": resize_small,
    "torchvision_resize": torchvision_resize,
    "central_crop": central_crop,
    "torchvision_crop": torchvision_crop,
    "random_crop": random_crop,
    "pad_crop": pad_crop,
    "randaugment": randaugment,
    "autoaugment": autoaugment,
}
RESIZES_BEFORE_CROP = ("resize", "resize_small")  # with the argument `crop`
# Each op that scales JPEGs while it decodes them -> the op that does the same at their full size.
FULL_SIZE = {"scaled_decode": "decode", "scaled_inception_crop": "inception_crop"}
TAKES_ENCODED = ("decode", "inception_crop", *FULL_SIZE)
# Ops that keep a part of the image.
CUTS = (
    "central_crop",
    "random_crop",
    "torchvision_crop",
    "inception_crop",
    "scaled_inception_crop",
)


def to_pixels(image: tf.Tensor, channels: int = 3) -> tf.Tensor:
    """Decode JPEG, PNG or BMP bytes to uint8 (h, w, channels); pixels are returned unchanged.

    `channels` is 1, 3 or 4; a JPEG has no fourth channel, so decoding it to 4 fails. A BMP has 3
    channels, as made by `pictures.as_known_format`.
    """
    if image.dtype != tf.string:
        return image

    def decode_jpeg():
        if channels == 4:
            return tf.io.decode_png("", channels=4)  # fails when it is called
        return jpeg.decode(image, channels)

    def decode_bmp():
        return with_channels(tf.io.decode_bmp(image, channels=3), channels)

    def decode_others():
        is_bmp = tf.strings.substr(image, 0, 2) == b"BM"
        return tf.cond(is_bmp, decode_bmp, lambda: tf.io.decode_png(image, channels=channels))

    return tf.cond(tf.io.is_jpeg(image), decode_jpeg, decode_others)


def with_channels(image: tf.Tensor, channels: int) -> tf.Tensor:
    """uint8 pixels (..., 3) as grey (..., 1) or opaque (..., 4), or grey as (..., channels).

    Grey is 0.299 R + 0.587 G + 0.114 B, as Pillow and JPEG have it (ITU-R BT.601).
    """
    found = image.shape[-1]
    if found == channels:
        return image
    if found == 1:
        return tf.repeat(image, channels, axis=-1)
    if (found, channels) == (3, 4):
        return tf.concat([image, tf.fill(tf.shape(image[..., :1]), np.uint8(255))], -1)
    assert (found, channels) == (3, 1)  # `make_source` refuses others
    grey = tf.tensordot(tf.cast(image, tf.float32), [0.299, 0.587, 0.114], 1)
    return tf.saturate_cast(tf.round(grey), tf.uint8)[..., None]


def _bilinear(antialias: bool) -> Callable[[tf.Tensor, Any], tf.Tensor]:
    """A function resized(image, size): uint8 (h, w, 3) -> uint8 (*size, 3), rounded to nearest."""
    if type(antialias) is not bool:
        raise ValueError(f"antialias must be True or False, not {antialias!r}")

    def bilinear(image, size, antialias):
        return tf.image.resize(image, size, "bilinear", antialias=antialias)

    def resized(image, size):
        if antialias:
            values = tf.cond(
                tf.reduce_any(tf.shape(image)[:2] > size),
                lambda: bilinear(image, size, antialias=True),
                lambda: bilinear(image, size, antialias=False),
            )
        else:
            values = bilinear(image, size, antialias=False)
        return tf.saturate_cast(tf.round(values), tf.uint8)

    return resized


def _crop(size: Size | None, pad: bool, choose_begin: Callable) -> HostOp:
    """Crop a window of `size` with the upper left corner choose_begin(spare (2,), key), int32 (2,).

    Without `pad`, an image that is too small raises a TensorFlow error when it is cropped.
    """
    height, width = image_hw(size, "size")
    if type(pad) is not bool:
        raise ValueError(f"pad must be True or False, not {pad!r}")

    def apply(image, key):
        if pad:
            sides = tf.maximum(tf.shape(image)[:2], (height, width))
            image = tf.image.resize_with_crop_or_pad(image, sides[0], sides[1])
        begin = choose_begin(tf.shape(image)[:2] - (height, width), key)
        shape = (height, width, image.shape[-1])
        window = tf.slice(image, tf.concat([begin, [0]], 0), shape)
        return tf.ensure_shape(window, shape)

    return HostOp(apply, gives=(height, width), needs=None if pad else (height, width))


def _before_crop(size: Size | None, crop: float) -> tuple[int, int]:
    """(height, width) of an image whose sides, times `crop`, give `size`."""
    if type(crop) not in (int, float) or not 0.01 <= crop <= 1:
        raise ValueError(f"crop must be a number from 0.01 to 1, not {crop!r}")
    height, width = image_hw(size, "size")
    return round(height / crop), round(width / crop)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= LARGEST_SIDE
