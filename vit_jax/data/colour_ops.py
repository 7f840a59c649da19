"""Preprocessing on the device that changes the colours of each image, or blurs it.

Results are float32, from 0 to 255. They are not rounded between ops; Pillow rounds them. Ops on
colours need 3 channels.

Axes: H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.base.tree import Batch
from vit_jax.config.parts import key
from vit_jax.data.ops import PROBABILITY, DeviceOp, Pairs

GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as Pillow's (ITU-R BT.601)
_BLUR_REACH = 4  # pixels on each side; DINOv2's kernel of 9
_POSITIVE, _FROM_0 = "(0, inf)", "[0, inf)"


class ColourOp(DeviceOp):
    """Changes each image by itself."""

    probability: float = key(..., PROBABILITY, within="[0, 1]")

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        """The next image: float32 (H, W, 3) -> float32 (H, W, 3)."""
        raise NotImplementedError

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        images = batch["image"].astype(jnp.float32)
        return batch | {"image": jax.vmap(self.change)(images, keys)}


class ColorJitter(ColourOp):
    """Change the colours, in each image with `probability`, in a random order of the four changes.

    `brightness`, `contrast` and `saturation` b draw a factor from 1 - b to 1 + b, at least 0, of
    the image against black, its mean grey, or its grey image. `hue` h, at most 0.5, turns the hue
    by -h to h of the colour circle.

    Source: Chen et al. 2020 (arXiv:2002.05709), appendix A.
    """

    of_colours = True
    brightness: float = key(..., "strength", within=_FROM_0)
    contrast: float = key(..., "strength", within=_FROM_0)
    saturation: float = key(..., "strength", within=_FROM_0)
    hue: float = key(..., "share of the colour circle", within="[0, 0.5]")

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        factor_key, order_key, chosen_key = jax.random.split(key, 3)
        draws = jax.random.uniform(factor_key, (4,), minval=-1.0)
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = jnp.stack([jnp.maximum(1 + s * draws[i], 0) for i, s in enumerate(strengths)])
        order = jax.random.permutation(order_key, 4)
        turn = jnp.argmax(order == 3)  # the place of the hue, which costs most and is computed once
        planes = _planes(image)
        for place in range(3):
            planes = _blend(planes, order[place], factors, place < turn)
        planes = [jnp.clip(x, 0, 255) for x in turn_hue(planes, self.hue * draws[3])]
        for place in range(1, 4):
            planes = _blend(planes, order[place], factors, place > turn)
        changed = jnp.stack(planes, axis=-1)
        return jnp.where(jax.random.uniform(chosen_key) < self.probability, changed, image)


class Greyscale(ColourOp):
    """Make images grey, each with `probability`."""

    of_colours = True

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        grey = jnp.broadcast_to(to_grey(_planes(image))[..., None], image.shape)
        return jnp.where(jax.random.uniform(key) < self.probability, grey, image)


class Blur(ColourOp):
    """Blur images, each with `probability`, by a Gaussian of `sigma_min` to `sigma_max` pixels.

    The kernel has 9 x 9 pixels; the image is mirrored at its borders. It needs 5 pixels a side.

    Source: Chen et al. 2020 (arXiv:2002.05709), appendix A.
    """

    sigma_min: float = key(0.1, "smallest deviation, in pixels", within=_POSITIVE)
    sigma_max: float = key(2.0, "largest deviation, in pixels", within=_POSITIVE)

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        sigma_key, chosen_key = jax.random.split(key)
        sigma = jax.random.uniform(sigma_key, minval=self.sigma_min, maxval=self.sigma_max)
        rows, columns = (_blur_matrix(side, sigma) for side in image.shape[:2])
        blurred = jnp.einsum("ih,hwc->iwc", rows, image, precision="highest")
        blurred = jnp.einsum("jw,iwc->ijc", columns, blurred, precision="highest")
        return jnp.where(jax.random.uniform(chosen_key) < self.probability, blurred, image)


class Solarize(ColourOp):
    """Invert the values from `threshold` on, in each image with `probability`.

    Source: Grill et al. 2020 (arXiv:2006.07733), appendix B.
    """

    threshold: float = key(128, "the least value that is inverted", within="[0, 256]")

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        inverted = jnp.where(image >= self.threshold, 255 - image, image)
        return jnp.where(jax.random.uniform(key) < self.probability, inverted, image)


class ThreeAugment(ColourOp):
    """Make an image grey, or solarise it, or blur it by 0.1 to 2 pixels: a third of them each.

    Source: Touvron et al. 2022 (arXiv:2204.07118), section 3.3; its colour jitter is another op.
    """

    of_colours = True
    probability: float = key(1.0, PROBABILITY, within="[0, 1]")

    def change(self, image: jax.Array, key: jax.Array) -> jax.Array:
        choice_key, own_key, chosen_key = jax.random.split(key, 3)
        ops = (
            Greyscale(probability=1.0),
            Solarize(probability=1.0, threshold=128),
            Blur(probability=1.0, sigma_min=0.1, sigma_max=2.0),
        )
        which = jax.random.randint(choice_key, (), 0, len(ops))
        changed = jax.lax.switch(which, [op.change for op in ops], image, own_key)
        return jnp.where(jax.random.uniform(chosen_key) < self.probability, changed, image)


def _planes(image: jax.Array) -> list[jax.Array]:
    """(..., 3) -> three of (...): TPUs and CPUs are slow with a last axis of 3."""
    return [image[..., channel] for channel in range(3)]


def _blend(
    planes: Sequence[jax.Array], which: jax.Array, factors: jax.Array, chosen: jax.Array
) -> list[jax.Array]:
    """`planes` against black (`which` is 0), their mean grey (1) or grey image (2), if `chosen`."""
    grey = to_grey(planes)
    other = jnp.where(which == 0, 0, jnp.where(which == 1, grey.mean(), grey))
    changed = [jnp.clip(other + factors[which] * (x - other), 0, 255) for x in planes]
    return [jnp.where(chosen, new, x) for new, x in zip(changed, planes, strict=True)]


def to_grey(planes: Sequence[jax.Array]) -> jax.Array:
    """0.299 R + 0.587 G + 0.114 B: three of (...) -> (...)."""
    red, green, blue = (weight * plane for weight, plane in zip(GREY, planes, strict=True))
    return red + green + blue


def turn_hue(planes: Sequence[jax.Array], turn: jax.Array) -> list[jax.Array]:
    """Turn the hue by `turn`, a share of the colour circle; value and saturation stay.

    Shapes: red, green and blue, each (...) -> the same.
    """
    red, green, blue = planes
    value = jnp.maximum(jnp.maximum(red, green), blue)
    span = value - jnp.minimum(jnp.minimum(red, green), blue)
    divisor = jnp.where(span > 0, span, 1.0)
    of_red = (green - blue) / divisor
    of_others = jnp.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = jnp.where(value == red, of_red, of_others) + 6 * turn  # in sixths of the circle

    def channel(n: int) -> jax.Array:
        k = jnp.mod(n + hue, 6)
        return value - span * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)

    return [channel(5), channel(3), channel(1)]


def _blur_matrix(side: int, sigma: jax.Array) -> jax.Array:
    """(side, side): its product with a line of pixels, mirrored at both ends, blurs the line."""
    i, j = jnp.arange(side)[:, None], jnp.arange(side)[None]

    def weights(distance: jax.Array) -> jax.Array:
        return jnp.where(distance <= _BLUR_REACH, jnp.exp(-0.5 * (distance / sigma) ** 2), 0)

    mirrored = jnp.where(j > 0, weights(i + j), 0)  # an end pixel is the mirror
    mirrored += jnp.where(j < side - 1, weights(2 * (side - 1) - i - j), 0)
    matrix = weights(abs(i - j)) + mirrored
    return matrix / matrix.sum(axis=1, keepdims=True)
