"""RandAugment's and AutoAugment's operations in TensorFlow, on uint8 pixels (h, w, 3).

Every pixel equals PIL's for the same argument: pointwise operations follow its tables, blends its
truncation, geometric operations its nearest neighbour in 16-bit fixed point. Pixels from outside
the image are grey. The operations are pure; random values are passed in as arguments.

For speed: tf.where, tf.gather of bytes and broadcasting over three channels cost several times
as much as arithmetic on bytes. Choices are therefore products with 0 or 1, and rows have the shape
(3 w,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from vit_jax.data.host_tf import tf

GREY = 128
_MAX_MAGNITUDE = 10  # the magnitude of the arguments below; they grow further beyond it
_FIXED_POINT = 16  # fractional bits of PIL's coordinates


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its brightest 255."""
    low, high = (
        tf.cast(reduce(image, [0, 1]), tf.float32) for reduce in (tf.reduce_min, tf.reduce_max)
    )
    varied = high > low
    scale = tf.where(varied, 255 / tf.maximum(high - low, 1), 1.0)
    low = tf.where(varied, low, 0.0)
    scale, low = (tf.tile(value, tf.shape(image)[1:2]) for value in (scale, low))
    # The truncated values are multiples of 1 / (high - low); 1e-3 absorbs float32's rounding.
    stretched = (tf.cast(_rows(image), tf.float32) - low) * scale + 1e-3
    return tf.reshape(tf.cast(stretched, tf.uint8), tf.shape(image))


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Flatten the histogram of each channel, as far as a table of 256 values can."""
    # Channel c is shifted by 256 c, so one histogram and one table hold all three channels.
    channels = tf.tile([0, 256, 512], tf.shape(image)[1:2])
    values = tf.cast(_rows(image), tf.int32) + channels
    histogram = tf.math.bincount(values, minlength=768, maxlength=768)
    histogram = tf.reshape(histogram, [3, 256])
    brightest = tf.cast(tf.reduce_max(image, [0, 1]), tf.int32)[:, None]
    others = tf.reduce_sum(histogram, 1, keepdims=True) - tf.gather(
        histogram, brightest, axis=1, batch_dims=1
    )
    step = others // 255
    darker = tf.cumsum(histogram, axis=1, exclusive=True)
    flat = (darker + step // 2) // tf.maximum(step, 1)
    tables = tf.where(step > 0, tf.minimum(flat, 255), tf.range(256)[None])
    equalized = tf.gather(tf.reshape(tf.cast(tables, tf.uint8), [-1]), values)
    return tf.reshape(equalized, tf.shape(image))


def rotate(image: tf.Tensor, degrees: float | tf.Tensor) -> tf.Tensor:
    """Rotate counter-clockwise about the centre."""
    radians = tf.cast(degrees, tf.float64) * (math.pi / 180)
    cos, sin = tf.cos(radians), tf.sin(radians)
    y, x = (tf.cast(side, tf.float64) / 2 for side in _sides(image))
    return _affine(image, (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))


def posterize(image: tf.Tensor, bits: int | tf.Tensor) -> tf.Tensor:
    """Keep the upper `bits` (1 to 8) of each value; the other bits become 0."""
    kept = tf.bitwise.left_shift(255, tf.cast(8 - bits, tf.int32)) % 256
    return tf.bitwise.bitwise_and(image, tf.cast(kept, tf.uint8))


def solarize(image: tf.Tensor, threshold: int | tf.Tensor) -> tf.Tensor:
    """Invert values of at least `threshold` (0 to 256); 256 inverts none."""
    inverted = tf.cast(image >= tf.cast(tf.minimum(threshold, 255), tf.uint8), tf.uint8)
    inverted *= tf.cast(tf.where(threshold < 256, 255, 0), tf.uint8)
    return tf.bitwise.bitwise_xor(image, inverted)


def solarize_add(image: tf.Tensor, addition: int | tf.Tensor) -> tf.Tensor:
    """Add `addition` (0 to 255) to values below 128; the sum is at most 255."""
    room = tf.minimum(255 - image, tf.cast(addition, tf.uint8))
    return image + tf.cast(image < 128, tf.uint8) * room


def contrast(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Change the contrast: factor 0 gives the image's mean grey everywhere, 1 the image.

    The reference release (see OPERATIONS) has `published_contrast` in its place.
    """
    luma = tf.cast(_luma(image, copies=1), tf.int64)
    mean = tf.reduce_sum(luma) / tf.size(luma, tf.int64)
    return _blend(tf.cast(tf.floor(mean + 0.5), tf.float32), image, factor)


def published_contrast(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """`contrast` with a grey that averages the histogram's counts, not the values, by mistake.

    It is the number of pixels / 256, at most 255: 196 for every image of 224 x 224.
    """
    height, width = _sides(image)
    grey = tf.minimum(height * width // 256, 255)
    return _blend(tf.cast(grey, tf.float32), image, factor)


def sharpness(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Change the sharpness: factor 0 gives the smoothed image, 1 the image; the border stays.

    The smoothing kernel is 3 x 3: 5 in the centre, 1 elsewhere, divided by 13.
    """

    def sharpen() -> tf.Tensor:
        rows = _rows(image)
        values = tf.cast(rows, tf.float32)
        sums = values[:-2] + values[1:-1] + values[2:]
        sums = sums[:, :-6] + sums[:, 3:-3] + sums[:, 6:]
        smooth = tf.floor((sums + 4 * values[1:-1, 3:-3]) * (1 / 13) + 0.5)
        inner = _blend(smooth, rows[1:-1, 3:-3], factor)
        middle = tf.concat([rows[1:-1, :3], inner, rows[1:-1, -3:]], 1)
        return tf.reshape(tf.concat([rows[:1], middle, rows[-1:]], 0), tf.shape(image))

    if any(side is not None and side < 3 for side in image.shape[:2]):
        return image  # the image consists of border
    has_inner = tf.reduce_min(tf.shape(image)[:2]) >= 3
    return tf.cond(has_inner, sharpen, lambda: image)


def translate(image: tf.Tensor, x: float | tf.Tensor, y: float | tf.Tensor) -> tf.Tensor:
    """Move the image left by `x` of the width and up by `y` of the height, rounded to pixels."""
    height, width = (tf.cast(side, tf.float32) for side in _sides(image))
    return _affine(image, (1.0, 0.0, tf.round(x * width)), (0.0, 1.0, tf.round(y * height)))


def cutout(image: tf.Tensor, share: float | tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    """Draw a grey square that extends `share` of the shorter side from its centre to each side.

    Args:
      centre: float (2,), row and column as fractions of height and width, in [0, 1).

    Source: DeVries & Taylor 2017 (arXiv:1708.04552).
    """
    sides = tf.stack(_sides(image))
    reach = tf.cast(share * tf.cast(tf.reduce_min(sides), tf.float32), tf.int32)
    row, column = tf.unstack(tf.cast(centre * tf.cast(sides, tf.float32), tf.int32))
    y, x = tf.range(sides[0])[:, None], tf.repeat(tf.range(sides[1]), 3)[None]
    cut_y, cut_x = (
        tf.cast((at >= middle - reach) & (at < middle + reach), tf.uint8)
        for at, middle in ((y, row), (x, column))
    )
    cut = cut_y * cut_x
    return tf.reshape(_rows(image) * (1 - cut) + GREY * cut, tf.shape(image))


# name: (image, magnitude / 10, sign, centre) -> image. The scale follows the reference release of
# RandAugment, which AugReg used. Its 100 px of translation and 40 px of cutout are fractions of
# 224 px here, to fit images of other sizes. As in that release, a larger magnitude makes Posterize
# keep more bits and Solarize invert fewer values: Solarize changes nothing from 10 on, Posterize
# nothing from 20 on. At least one bit is kept. Color and Brightness blend with the grey image and
# with black; ShearX moves row y left by slope * y, ShearY column x up by slope * x.
OPERATIONS = {
    "AutoContrast": lambda image, m, sign, centre: autocontrast(image),
    "Equalize": lambda image, m, sign, centre: equalize(image),
    "Invert": lambda image, m, sign, centre: 255 - image,
    "Rotate": lambda image, m, sign, centre: rotate(image, sign * 30.0 * m),
    "Posterize": lambda image, m, sign, centre: posterize(image, _whole(4 * m, 1, 8)),
    "Solarize": lambda image, m, sign, centre: solarize(image, _whole(256 * m, 0, 256)),
    "SolarizeAdd": lambda image, m, sign, centre: solarize_add(image, _whole(110 * m, 0, 255)),
    "Color": lambda image, m, sign, centre: _blend(_luma(image, copies=3), image, 0.1 + 1.8 * m),
    "Contrast": lambda image, m, sign, centre: contrast(image, 0.1 + 1.8 * m),
    "Brightness": lambda image, m, sign, centre: _blend(0.0, image, 0.1 + 1.8 * m),
    "Sharpness": lambda image, m, sign, centre: sharpness(image, 0.1 + 1.8 * m),
    "ShearX": lambda image, m, sign, centre: _affine(image, x_row=(1.0, sign * 0.3 * m, 0.0)),
    "ShearY": lambda image, m, sign, centre: _affine(image, y_row=(sign * 0.3 * m, 1.0, 0.0)),
    "TranslateX": lambda image, m, sign, centre: translate(image, sign * (100 / 224) * m, 0.0),
    "TranslateY": lambda image, m, sign, centre: translate(image, 0.0, sign * (100 / 224) * m),
    "Cutout": lambda image, m, sign, centre: cutout(image, (40 / 224) * m, centre),
}
PUBLISHED = {
    "Contrast": lambda image, m, sign, centre: published_contrast(image, 0.1 + 1.8 * m),
}


def operate(
    name: str,
    image: tf.Tensor,
    magnitude: float | tf.Tensor,
    sign: float | tf.Tensor = 1.0,
    centre: tf.Tensor = (0.5, 0.5),
    published_contrast: bool = False,
) -> tf.Tensor:
    """Apply one operation of RandAugment.

    Args:
      name: a key of OPERATIONS.
      image: uint8 (h, w, 3).
      magnitude: at least 0, on RandAugment's scale; the paper's maximum is 10.
      sign: 1 or -1, the direction of the geometric operations.
      centre: centre of Cutout; see `cutout`.
      published_contrast: whether Contrast is `published_contrast`.

    Source: Cubuk et al. 2019 (arXiv:1909.13719).
    """
    m = tf.cast(magnitude, tf.float32) / _MAX_MAGNITUDE
    operations = OPERATIONS | (PUBLISHED if published_contrast else {})
    changed = operations[name](image, m, tf.cast(sign, tf.float32), tf.cast(centre, tf.float32))
    return tf.ensure_shape(changed, image.shape)


def random_operations(
    image: tf.Tensor,
    key: tf.Tensor,
    layers: int,
    magnitude: float,
    magnitude_std: float,
    published_contrast: bool = False,
) -> tf.Tensor:
    """Apply `layers` operations in sequence, each drawn uniformly from OPERATIONS.

    Args:
      image: uint8 (h, w, 3).
      key: int64 (2,); determines all random draws.
      layers, magnitude, magnitude_std, published_contrast: see `host_ops.randaugment`.
    """

    def layer(image: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
        sign = tf.where(draw[1] < 0.5, 1.0, -1.0)
        strength = magnitude
        if magnitude_std:
            strength = tf.maximum(magnitude + magnitude_std * tf.math.ndtri(draw[4]), 0.0)
        branches = [
            functools.partial(operate, name, image, strength, sign, draw[2:4], published_contrast)
            for name in OPERATIONS
        ]
        index = tf.cast(draw[0] * len(OPERATIONS), tf.int32)
        return tf.ensure_shape(tf.switch_case(index, branches), image.shape)

    draws = tf.random.stateless_uniform([layers, 5], key, alg="philox")
    # A loop keeps a single copy of the branches in the graph.
    return tf.ensure_shape(tf.foldl(layer, draws, image), image.shape)


# AutoAugment's policy for ImageNet as EfficientNet's release has it ("v0"): each pair of operations
# with the probability and the magnitude of both. At probability 0 an operation is never applied.
# The translation is 2.5 times as long there as RandAugment's; its magnitude is 2.5 x 9.
# Source: github.com/tensorflow/tpu, models/official/efficientnet/autoaugment.py. The paper's own
# table 9 (arXiv:1805.09501) is another policy from the same search.
AUTOAUGMENT_V0 = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 22.5)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)


def autoaugment_pair(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Apply a pair of AUTOAUGMENT_V0, drawn uniformly: each operation with its probability.

    Args:
      image: uint8 (h, w, 3).
      key: int64 (2,); determines all random draws.
    """
    names = sorted({name for pair in AUTOAUGMENT_V0 for name, _, _ in pair})
    # (25, 2, 3): number of the operation, probability, magnitude.
    rows = [[(names.index(name), *how) for name, *how in pair] for pair in AUTOAUGMENT_V0]
    table = tf.constant(rows, tf.float32)

    def one_of_pair(image: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        operation, rate, magnitude, draw, direction = tf.unstack(steps)
        sign = tf.where(direction < 0.5, 1.0, -1.0)
        branches = [functools.partial(operate, name, image, magnitude, sign) for name in names]
        branches.append(functools.partial(tf.identity, image))
        index = tf.where(draw < rate, tf.cast(operation, tf.int32), len(names))
        return tf.ensure_shape(tf.switch_case(index, branches), image.shape)

    draws = tf.random.stateless_uniform([5], key, alg="philox")
    pair = tf.gather(table, tf.cast(draws[0] * len(AUTOAUGMENT_V0), tf.int32))
    steps = tf.concat([pair, tf.reshape(draws[1:], (2, 2))], axis=1)
    # A loop keeps a single copy of the branches in the graph.
    return tf.ensure_shape(tf.foldl(one_of_pair, steps, image), image.shape)


def _sides(image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    shape = tf.shape(image)
    return shape[0], shape[1]


def _whole(value: tf.Tensor, least: int, most: int) -> tf.Tensor:
    return tf.clip_by_value(tf.cast(value, tf.int32), least, most)


def _rows(image: tf.Tensor) -> tf.Tensor:
    """(h, w, 3) -> (h, 3 w)."""
    return tf.reshape(image, [tf.shape(image)[0], -1])


def _luma(image: tf.Tensor, copies: int) -> tf.Tensor:
    """The grey image, float32 (h, w, copies) of whole numbers, by PIL's weights and rounding.

    float32 holds all intermediate values exactly.
    """
    weights = tf.constant([[19595.0], [38470.0], [7471.0]]) / 65536
    pixels = tf.reshape(tf.cast(image, tf.float32), [-1, 3])
    luma = tf.floor(tf.matmul(pixels, tf.tile(weights, [1, copies])) + 0.5)
    return tf.reshape(luma, [*_sides(image), copies])


def _blend(degenerate: float | tf.Tensor, image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """degenerate + factor * (image - degenerate), clipped to [0, 255] and truncated."""
    blended = degenerate + factor * (tf.cast(image, tf.float32) - degenerate)
    return tf.saturate_cast(blended, tf.uint8)


def _affine(
    image: tf.Tensor,
    x_row: Sequence[float | tf.Tensor] = (1.0, 0.0, 0.0),
    y_row: Sequence[float | tf.Tensor] = (0.0, 1.0, 0.0),
) -> tf.Tensor:
    """Set pixel (x, y) to the pixel at (a (x + 1/2) + b (y + 1/2) + c, ...), rounded down.

    `x_row` and `y_row` hold (a, b, c). As in PIL, the computation is in fixed point; this decides
    ties.
    """
    height, width = _sides(image)
    y, x = tf.range(height)[:, None], tf.range(width)[None]

    def source(row: Sequence[float | tf.Tensor], side: tf.Tensor) -> tf.Tensor:
        a, b, c = (tf.cast(value, tf.float64) for value in row)
        a, b, c = (
            tf.cast(tf.floor(value * 2**_FIXED_POINT + 0.5), tf.int32)
            for value in (a, b, c + a * 0.5 + b * 0.5)
        )
        at = tf.bitwise.right_shift((a * x + c) + b * y, _FIXED_POINT)
        return tf.clip_by_value(at, -1, side) + 1  # index into the framed image

    framed = tf.pad(image, [[1, 1], [1, 1], [0, 0]], constant_values=GREY)
    index = source(y_row, height) * (width + 2) + source(x_row, width)
    return tf.gather(tf.reshape(framed, [-1, 3]), index)
