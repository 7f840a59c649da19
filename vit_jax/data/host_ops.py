"""Preprocessing on the host: each op is made from literal arguments, and maps an image to another.

An op is called as op(image, key) inside a tf.data map, with uint8 pixels (h, w, 3), or, if it is
in TAKES_ENCODED, with JPEG or PNG bytes; it gives uint8 pixels. `key` is an int64 (2,) seed for
TensorFlow's stateless ops. What is computed in floating point is rounded and clipped back.
`size` is an int or (H, W); left out, it is data.image_size. Wrong arguments raise ValueError.

A resize before a crop follows data.image_size too: "resize_small(crop=0.875)|central_crop" resizes
to 256 for images of 224 pixels and to 439 for those of 384. A crop of an image that is smaller than
its `size` is a fault, unless `pad=True` asks for black borders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeGuard

from vit_jax.data.augment import random_operations
from vit_jax.data.host_tf import tf

Size = int | tuple[int, int]
_DCT_METHOD = "INTEGER_ACCURATE"  # as PIL's; TensorFlow's default is off by up to 10, no faster
_JPEG_MARGIN = 2  # columns on either side of a window, without which chroma differs at its edges


@dataclasses.dataclass(frozen=True)
class HostOp:
    """An op with its arguments: op(image, key) gives the next image.

    gives: the least (height, width) of the images that it gives; None: it keeps their size.
    needs: the least (height, width) of the images that it takes; None: it takes any.
    """

    apply: Callable[[Any, Any], Any]
    gives: tuple[int, int] | None = None
    needs: tuple[int, int] | None = None

    def __call__(self, image, key):
        return self.apply(image, key)


def decode() -> HostOp:
    """JPEG or PNG bytes to pixels; grey, CMYK, alpha, palette and 16 bit become RGB of 8 bit."""
    return HostOp(lambda image, key: to_pixels(image))


def inception_crop(
    size: Size | None = None,
    area_min: float = 0.05,
    area_max: float = 1.0,
    antialias: bool = False,
) -> HostOp:
    """A random window, resized to `size`: `area_min` to `area_max` of the image, 3:4 to 4:3.

    Of a JPEG only the window is decoded; every pixel is as if all of it had been.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6.
    """
    size, resized = _height_width(size), _bilinear(antialias)
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
        top, left, height, width = window(shape, key)
        first = tf.maximum(left - _JPEG_MARGIN, 0)
        last = tf.minimum(left + width + _JPEG_MARGIN, shape[1])
        wider = tf.image.decode_and_crop_jpeg(
            encoded, [top, first, height, last - first], channels=3, dct_method=_DCT_METHOD
        )
        return wider[:, left - first : left - first + width]

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
    """Both sides to `size` / `crop`, rounded, bilinear; `antialias` acts only on shrinking sides.

    `crop` is the share of each side that a crop of `size` keeps afterwards.
    """
    size, resized = _before_crop(size, crop), _bilinear(antialias)
    return HostOp(lambda image, key: resized(image, size), gives=size)


def resize_small(size: Size | None = None, antialias: bool = False, *, crop: float = 1.0) -> HostOp:
    """To the smallest that covers `size` / `crop`, in proportion (to the nearest pixel), bilinear.

    With an int that is the shorter side. `antialias` and `crop` are as of `resize`.
    """
    size, resized = _before_crop(size, crop), _bilinear(antialias)

    def apply(image, key):
        sides = tf.shape(image)[:2]
        # The side that has further to go gives the scale, size[i] / sides[i].
        i = tf.cast(size[1] * sides[0] > size[0] * sides[1], tf.int32)
        wanted, side = tf.gather(size, i), tf.gather(sides, i)
        return resized(image, (sides * wanted + side // 2) // side)

    return HostOp(apply, gives=size)


def central_crop(size: Size | None = None, *, pad: bool = False) -> HostOp:
    """The middle `size` of the image; `pad` puts black on both sides of a smaller one first."""
    return _crop(size, pad, lambda spare, key: spare // 2)


def torchvision_resize(
    size: Size | None = None, filter: str = "bilinear", cover: bool = False
) -> HostOp:
    """As torchvision's Resize of a PIL image: Pillow's `filter`, bilinear or bicubic.

    An int is the shorter side, and the longer one is rounded down; (H, W) are both sides. `cover`
    keeps the proportion for (H, W) too, to the smallest image that covers it, as timm's
    ResizeKeepRatio: sides are rounded to nearest, halves to even.

    Within 2 of 255 of Pillow's pixels, and the same for 95 % of them. Widths are resized first, as
    in torchvision's tensors; Pillow from 13 on begins with heights that shrink much more.
    """
    if filter not in ("bilinear", "bicubic"):
        raise ValueError(f"filter must be 'bilinear' or 'bicubic', not {filter!r}")
    if type(cover) is not bool:
        raise ValueError(f"cover must be True or False, not {cover!r}")
    shorter, (height, width) = type(size) is int, _height_width(size)

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
        # Pillow rounds and clips between the two passes, which a sharp edge shows.
        return resized(resized(image, tf.stack([sides[0], size[1]])), size)

    return HostOp(apply, gives=(height, width))


def torchvision_crop(size: Size | None = None) -> HostOp:
    """As torchvision's CenterCrop of an image that covers `size`: half a pixel is rounded to even.

    `central_crop` rounds it down, as transformers does.
    """
    height, width = _height_width(size)

    def apply(image, key):
        spare = tf.shape(image)[:2] - (height, width)
        begin = spare // 2 + tf.cast(spare % 4 == 3, tf.int32)
        window = tf.slice(image, tf.concat([begin, [0]], 0), (height, width, 3))
        return tf.ensure_shape(window, (height, width, 3))

    return HostOp(apply, gives=(height, width), needs=(height, width))


def random_crop(size: Size | None = None, *, pad: bool = False) -> HostOp:
    """A random window of `size`, each as likely; `pad` is as of `central_crop`."""

    def draw(spare, key):
        share = tf.random.stateless_uniform([2], key, alg="philox")
        return tf.cast(share * tf.cast(spare + 1, tf.float32), tf.int32)

    return _crop(size, pad, draw)


def pad_crop(padding: int) -> HostOp:
    """`padding` black pixels on every side, then a random window of the former size.

    Source: He et al. 2015 (arXiv:1512.03385), section 4.2, with padding 4.
    """
    if not _is_count(padding):
        raise ValueError(f"padding must be a positive integer, not {padding!r}")

    def apply(image, key):
        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        begin = tf.random.stateless_uniform(
            [2], key, maxval=2 * padding + 1, dtype=tf.int32, alg="philox"
        )
        window = tf.slice(padded, tf.concat([begin, [0]], 0), tf.shape(image))
        return tf.ensure_shape(window, image.shape)

    return HostOp(apply)


def randaugment(layers: int, magnitude: float, magnitude_std: float = 0.0) -> HostOp:
    """`layers` operations in turn, each drawn anew from the 16 of augment.OPERATIONS, all alike.

    `magnitude` is on the scale whose end is 10 in the paper; beyond, most operations grow on (see
    augment.py). With `magnitude_std` each operation draws its own about it, of at least 0.

    Source: Cubuk et al. 2019 (arXiv:1909.13719), section 3. It leaves the image as it is as one of
    14 operations; the release that AugReg used (arXiv:2106.10270) has Invert, SolarizeAdd and
    Cutout in place of that one, and so has this.
    """
    if not _is_count(layers):
        raise ValueError(f"layers must be a positive integer, not {layers!r}")
    for name, value in (("magnitude", magnitude), ("magnitude_std", magnitude_std)):
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, not {value!r}")

    def apply(image, key):
        # All of it is TensorFlow's functions already; without the search for Python's control flow
        # its graph is made in a fraction of the time.
        as_it_is = tf.autograph.experimental.do_not_convert(random_operations)
        return as_it_is(image, key, layers, magnitude, magnitude_std)

    return HostOp(apply)


HOST_OPS: dict[str, Callable[..., HostOp]] = {
    "decode": decode,
    "inception_crop": inception_crop,
    "resize": resize,
    "resize_small": resize_small,
    "torchvision_resize": torchvision_resize,
    "central_crop": central_crop,
    "torchvision_crop": torchvision_crop,
    "random_crop": random_crop,
    "pad_crop": pad_crop,
    "randaugment": randaugment,
}
TAKES_ENCODED = ("decode", "inception_crop")
CROPS = ("central_crop", "random_crop")  # with the argument `pad`


def to_pixels(image: tf.Tensor) -> tf.Tensor:
    """uint8 (h, w, 3) of JPEG or PNG bytes; pixels are left as they are."""
    if image.dtype != tf.string:
        return image
    return tf.cond(
        tf.io.is_jpeg(image),
        lambda: tf.io.decode_jpeg(image, channels=3, dct_method=_DCT_METHOD),
        lambda: tf.io.decode_png(image, channels=3),
    )


def _bilinear(antialias: bool) -> Callable[[tf.Tensor, Any], tf.Tensor]:
    """resized(image, size): uint8 (h, w, 3) -> uint8 (*size, 3), rounded to nearest."""
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
    """A window of `size`; choose_begin(spare (2,), key) is its upper left corner, int32 (2,).

    An image that is too small raises a TensorFlow error when it comes, if `pad` is False.
    """
    height, width = _height_width(size)
    if type(pad) is not bool:
        raise ValueError(f"pad must be True or False, not {pad!r}")

    def apply(image, key):
        if pad:
            sides = tf.maximum(tf.shape(image)[:2], (height, width))
            image = tf.image.resize_with_crop_or_pad(image, sides[0], sides[1])
        begin = choose_begin(tf.shape(image)[:2] - (height, width), key)
        window = tf.slice(image, tf.concat([begin, [0]], 0), (height, width, 3))
        return tf.ensure_shape(window, (height, width, 3))

    return HostOp(apply, gives=(height, width), needs=None if pad else (height, width))


def _before_crop(size: Size | None, crop: float) -> tuple[int, int]:
    """(height, width) of which a window of `size` is the share `crop` of each side."""
    if type(crop) not in (int, float) or not 0 < crop <= 1:
        raise ValueError(f"crop must be a share above 0, at most 1, not {crop!r}")
    height, width = _height_width(size)
    return round(height / crop), round(width / crop)


def _height_width(size: Size | None) -> tuple[int, int]:
    height, width = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    if not (_is_count(height) and _is_count(width)):
        raise ValueError(f"size must be a positive integer or (H, W), not {size!r}")
    return height, width


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
