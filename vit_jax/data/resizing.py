"""Resizing of pixels as Pillow does: antialiased, halves rounded up."""

from __future__ import annotations

import functools
import operator

from vit_jax.data.host_tf import tf

FILTERS = ("nearest", "bilinear", "bicubic")  # with radius 0, 1 and 2


def enlarged_rows(image: tf.Tensor, height: tf.Tensor, rows: tf.Tensor, filter: str) -> tf.Tensor:
    """`rows` of `tf.image.resize(..., filter, antialias=True)` to a larger height, float32.

    It repeats the operations of TensorFlow's ScaleAndTranslate.
    """
    radius, last = FILTERS.index(filter), tf.shape(image)[0] - 1
    scale = tf.cast(height, tf.float32) / tf.cast(last + 1, tf.float32)
    at = (tf.cast(rows, tf.float32) + 0.5) * (1.0 / scale)
    if filter == "nearest":
        return tf.cast(tf.gather(image, tf.cast(at, tf.int32)), tf.float32)
    begin, end = tf.math.ceil(at - radius - 0.5), tf.math.floor(at + radius - 0.5)
    begin, end = (tf.clip_by_value(tf.cast(edge, tf.int32), 0, last) for edge in (begin, end))
    sources = [begin + i for i in range(2 * radius + 1)]
    far = [tf.abs(tf.cast(y, tf.float32) + 0.5 - at) for y in sources]
    weights = [
        tf.where(y <= end, _WEIGHTS[filter](x), 0.0) for y, x in zip(sources, far, strict=True)
    ]
    norm = 1.0 / functools.reduce(operator.add, weights)
    parts = [
        (weight * norm)[:, None, None] * tf.cast(tf.gather(image, tf.minimum(y, last)), tf.float32)
        for y, weight in zip(sources, weights, strict=True)
    ]
    return functools.reduce(operator.add, parts)


def _cubic(x: tf.Tensor) -> tf.Tensor:
    near, far = (1.5 * x - 2.5) * x * x + 1.0, ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tf.where(x < 1.0, near, tf.where(x < 2.0, far, 0.0))


# Weight of a pixel by its distance, by Keys 1981 if bicubic.
_WEIGHTS = {"bilinear": lambda x: tf.maximum(1.0 - x, 0.0), "bicubic": _cubic}


def resize_as_pillow(image: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """uint8 (h, w, C) -> uint8 (*size, C), bilinearly and antialiased; see `TorchvisionResize`."""
    wide = resize_rounded(image, tf.stack([tf.shape(image)[0], size[1]]), "bilinear")
    return resize_rounded(wide, size, "bilinear")


def resize_rounded(image: tf.Tensor, size: tf.Tensor, filter: str) -> tf.Tensor:
    """uint8 (h, w, C) -> uint8 (*size, C), both sides at once, rounded as Pillow rounds."""
    return halves_up(tf.image.resize(image, size, filter, antialias=True))


def halves_up(values: tf.Tensor) -> tf.Tensor:
    return tf.saturate_cast(tf.floor(tf.cast(values, tf.float32) + 0.5), tf.uint8)  # as Pillow
