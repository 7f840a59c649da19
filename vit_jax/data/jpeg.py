"""Decoding of JPEGs and of windows of them, at their size or at a half, a quarter or an eighth.

libjpeg makes a smaller picture from the low frequencies of each block of 8 x 8 pixels. This costs
less than decoding, and nearly equals the mean of every `ratio` x `ratio` pixels.
"""

from __future__ import annotations

from collections.abc import Callable

from vit_jax.data.host_tf import tf

RATIOS = (1, 2, 4, 8)
_DCT_METHOD = "INTEGER_ACCURATE"  # as PIL; TensorFlow's default is off by up to 10 and no faster
_MARGIN = 2  # extra columns decoded on each side; without them chroma differs at the edges

_SPARE = 2  # as `reducing_gap` of Pillow


def decode(encoded: tf.Tensor, channels: int = 3, ratio: int = 1) -> tf.Tensor:
    """JPEG bytes of (h, w) pixels -> uint8 (ceil(h / ratio), ceil(w / ratio), channels)."""
    return tf.io.decode_jpeg(encoded, channels=channels, ratio=ratio, dct_method=_DCT_METHOD)


def decode_window(encoded: tf.Tensor, shape: tf.Tensor, window: tuple, ratio: int = 1) -> tf.Tensor:
    """The pixels of a window of a JPEG, uint8 (height, width, 3); decodes only the window.

    Args:
      encoded: JPEG bytes.
      shape: (h, w, channels) of the picture.
      window: (top, left, height, width) in the picture's own pixels.
      ratio: of RATIOS; the result is the smallest window of the smaller picture that covers
        `window`, so it shows up to `ratio` - 1 more pixels of the picture on each side.
    """
    top, left, height, width = window
    if ratio > 1:
        bottom, right = -(-(top + height) // ratio), -(-(left + width) // ratio)
        top, left = top // ratio, left // ratio
        height, width = bottom - top, right - left
    first = tf.maximum(left - _MARGIN, 0)
    last = tf.minimum(left + width + _MARGIN, -(-shape[1] // ratio))
    wider = tf.image.decode_and_crop_jpeg(
        encoded,
        [top, first, height, last - first],
        channels=3,
        ratio=ratio,
        dct_method=_DCT_METHOD,
    )
    return wider[:, left - first : left - first + width]


def scaled_for(
    size: tuple[int, int], sides: tuple, decoded: Callable[[int], tf.Tensor]
) -> tf.Tensor:
    """decoded(ratio) at the largest ratio that leaves `sides` (h, w) at least twice `size`.

    At twice its size or more, a picture resized to `size` shows little trace of the scaling.
    """
    height, width = (_SPARE * side for side in size)
    fits = [(sides[0] // ratio >= height) & (sides[1] // ratio >= width) for ratio in RATIOS[1:]]
    index = tf.reduce_sum(tf.cast(tf.stack(fits), tf.int32))
    return tf.switch_case(index, [lambda ratio=ratio: decoded(ratio) for ratio in RATIOS])
