"""Device ops on colours, as self-supervised learning uses them; see device_ops.py.

Images are pixels from 0 to 255, (H, W, 3) each; results are float32, clipped but not rounded
between ops, where Pillow rounds to whole numbers.

Sources: Chen et al. 2020 (arXiv:2002.05709), appendix A, for jitter and blur; Grill et al. 2020
(arXiv:2006.07733), appendix B, for solarisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as Pillow's (ITU-R BT.601)
_BLUR_REACH = 4  # pixels on each side; DINOv2's kernel of 9


def color_jitter(
    probability: float, brightness: float, contrast: float, saturation: float, hue: float
) -> Callable:
    """Change the colours, in each image with `probability`, in a random order of the four changes.

    `brightness`, `contrast` and `saturation` b draw a factor from 1 - b to 1 + b, at least 0, of
    the image against black, its mean grey, or its grey image. `hue` h, at most 0.5, turns the hue
    by -h to h of the colour circle.
    """
    _need_probability(probability)
    strengths = (brightness, contrast, saturation, hue)
    if not all(_is_number(s) and s >= 0 for s in strengths) or hue > 0.5:
        raise ValueError(f"needs numbers of at least 0, and hue at most 0.5, not {strengths}")

    def change(image, key):
        factor_key, order_key, chosen_key = jax.random.split(key, 3)
        draws = jax.random.uniform(factor_key, (4,), minval=-1.0)
        factors = [jnp.maximum(1 + s * draws[i], 0) for i, s in enumerate(strengths[:3])]
        changes = [
            lambda x: x * factors[0],
            lambda x: _blend(to_grey(x).mean(), x, factors[1]),
            lambda x: _blend(to_grey(x), x, factors[2]),
            lambda x: turn_hue(x, hue * draws[3]),
        ]
        changed = image
        for which in jax.random.permutation(order_key, 4):
            changed = jnp.clip(jax.lax.switch(which, changes, changed), 0, 255)
        return jnp.where(jax.random.uniform(chosen_key) < probability, changed, image)

    return _of_each(change)


def greyscale(probability: float) -> Callable:
    """Make images grey, each with `probability`."""
    _need_probability(probability)

    def change(image, key):
        grey = jnp.broadcast_to(to_grey(image), image.shape)
        return jnp.where(jax.random.uniform(key) < probability, grey, image)

    return _of_each(change)


def blur(probability: float, sigma_min: float = 0.1, sigma_max: float = 2.0) -> Callable:
    """Blur images, each with `probability`, by a Gaussian of `sigma_min` to `sigma_max` pixels.

    The kernel has 9 x 9 pixels; the image is mirrored at its borders. It needs 5 pixels a side.
    """
    _need_probability(probability)
    if not (_is_number(sigma_min) and _is_number(sigma_max) and 0 < sigma_min <= sigma_max):
        raise ValueError(f"needs 0 < sigma_min <= sigma_max, not {sigma_min!r}, {sigma_max!r}")

    def change(image, key):
        sigma_key, chosen_key = jax.random.split(key)
        sigma = jax.random.uniform(sigma_key, minval=sigma_min, maxval=sigma_max)
        offsets = jnp.arange(-_BLUR_REACH, _BLUR_REACH + 1)
        weights = jax.nn.softmax(-0.5 * (offsets / sigma) ** 2)
        blurred = image
        for axis in (0, 1):
            side = blurred.shape[axis]
            padding = [(_BLUR_REACH, _BLUR_REACH) if i == axis else (0, 0) for i in range(3)]
            padded = jnp.pad(blurred, padding, mode="reflect")
            parts = [
                weights[i] * jax.lax.slice_in_dim(padded, i, i + side, axis=axis)
                for i in range(len(offsets))
            ]
            blurred = sum(parts[1:], parts[0])
        return jnp.where(jax.random.uniform(chosen_key) < probability, blurred, image)

    return _of_each(change)


def solarize(probability: float, threshold: int = 128) -> Callable:
    """Invert the values from `threshold` on, in each image with `probability`."""
    _need_probability(probability)
    if not (_is_number(threshold) and 0 <= threshold <= 256):
        raise ValueError(f"threshold must be a number from 0 to 256, not {threshold!r}")

    def change(image, key):
        inverted = jnp.where(image >= threshold, 255 - image, image)
        return jnp.where(jax.random.uniform(key) < probability, inverted, image)

    return _of_each(change)


def to_grey(image: jax.Array) -> jax.Array:
    """0.299 R + 0.587 G + 0.114 B: (..., 3) -> (..., 1)."""
    weights = jnp.reshape(jnp.asarray(GREY), (1,) * (image.ndim - 1) + (3,))
    return (image * weights).sum(-1, keepdims=True)


def turn_hue(image: jax.Array, turn: jax.Array) -> jax.Array:
    """Turn the hue by `turn`, a share of the colour circle; value and saturation stay.

    Shapes: (..., 3) -> (..., 3).
    """
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    value, low = image.max(-1), image.min(-1)
    span = value - low
    divisor = jnp.where(span > 0, span, 1.0)
    of_red = (green - blue) / divisor
    of_others = jnp.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = jnp.where(value == red, of_red, of_others) + 6 * turn  # in sixths of the circle

    def channel(n):
        k = jnp.mod(n + hue, 6)
        return value - span * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)

    return jnp.stack([channel(5), channel(3), channel(1)], axis=-1)


COLOUR_OPS: dict[str, Callable[..., Any]] = {
    "color_jitter": color_jitter,
    "greyscale": greyscale,
    "blur": blur,
    "solarize": solarize,
}


def _of_each(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable:
    """The device op that maps change(image (H, W, 3), key) -> image over the batch."""

    def apply(batch, keys, pairs):
        images = batch["image"].astype(jnp.float32)
        return batch | {"image": jax.vmap(change)(images, keys)}

    return apply


def _blend(other, image, factor):
    """factor * image + (1 - factor) * other."""
    return other + factor * (image - other)


def _need_probability(value: object) -> None:
    if not (_is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        raise ValueError(f"probability must be a number from 0 to 1, not {value!r}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
