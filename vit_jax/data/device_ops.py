"""Preprocessing on the device: jnp ops on a whole batch, inside the jitted step.

An op is called as op(batch, keys, pairs) and returns the batch: a dict of `image` uint8
(B, H, W, 3), `label`, `mask` and `id` (each (B,)). `keys` holds a JAX key for each row, so random
draws do not depend on the batch's sharding; `pairs` gives the rows that are mixed with each other.
Images are pixels from 0 to 255 throughout, float32 after mixing; mixing ops take and return labels
float32 (B, C). Wrong arguments raise ValueError.

Axes: B images, H height, W width, C classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from vit_jax.data.colour_ops import COLOUR_OPS
from vit_jax.errors import InputError
from vit_jax.tree import Batch

_FIRST_VIEW = 2**16  # number of the keys of views, beyond those of ops
_ERASED_ASPECT = 0.3  # minimum of height / width; the maximum is 1 / 0.3

DeviceOp = Callable[[Batch, jax.Array, "Pairs"], Batch]
DeviceTransform = Callable[[Batch, jax.Array], Batch]


class ViewsOf(Protocol):
    """Device ops of the views of one kind (views.py): their first number, and the ops of each."""

    @property
    def first(self) -> int: ...

    @property
    def device_ops(self) -> Sequence[Sequence[NamedOp]]: ...


class NamedOp(Protocol):
    """A device op from `parse_ops` with its key in DEVICE_OPS."""

    @property
    def name(self) -> str: ...

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs, /) -> Batch: ...


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of rows that are mixed: within blocks of 2 D rows, row j with row j + D.

    D is `order.pair_distance`. Pairs are fixed; if 2 D divides the number of rows on a device, both
    rows lie on it and mixing moves no data between devices. The shuffled order of the data decides
    which images meet.
    """

    distance: int = 1

    def swapped(self, x: jax.Array) -> jax.Array:
        """The value of each row's partner: (B, ...) -> (B, ...)."""
        return jnp.flip(self._blocks(x), 1).reshape(x.shape)

    def firsts(self, x: jax.Array) -> jax.Array:
        """The value of each pair's first row, for both rows: (B, ...) -> (B, ...)."""
        blocks = self._blocks(x)
        return jnp.broadcast_to(blocks[:, :1], blocks.shape).reshape(x.shape)

    def _blocks(self, x):
        return x.reshape(-1, 2, self.distance, *x.shape[1:])


def flip() -> DeviceOp:
    """Flip images left to right, each with probability 1/2."""

    def apply(batch, keys, pairs):
        images = batch["image"]
        flipped = jax.vmap(jax.random.bernoulli)(keys)
        images = jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)
        return batch | {"image": images}

    return apply


def erase(probability: float, area_min: float = 0.02, area_max: float = 0.4) -> DeviceOp:
    """Fill a random rectangle with noise, in each image with `probability`.

    The area is `area_min` to `area_max` of the image. The aspect is log-uniform in 0.3 to 1 / 0.3,
    limited to rectangles that fit, and the position is uniform over those inside the image. Each
    value of the noise is uniform over 0 to 255.

    Source: Zhong et al. 2017 (arXiv:1708.04896), algorithm 1, which instead draws aspect and
    position again until the rectangle fits.
    """
    if not (_is_number(probability) and 0 <= probability <= 1):
        raise ValueError(f"probability must be a number from 0 to 1, not {probability!r}")
    is_number = _is_number(area_min) and _is_number(area_max)
    if not (is_number and 0 < area_min <= area_max <= 1):
        raise ValueError(f"needs 0 < area_min <= area_max <= 1, not {area_min!r}, {area_max!r}")

    def draw(key, height, width, channels):
        box_key, noise_key = jax.random.split(key)
        chosen, area, aspect, top, left = jax.random.uniform(box_key, (5,))
        area = (area_min + area * (area_max - area_min)) * height * width
        low = jnp.maximum(math.log(_ERASED_ASPECT), jnp.log(area / width**2))
        high = jnp.minimum(-math.log(_ERASED_ASPECT), jnp.log(height**2 / area))
        aspect = jnp.exp(low + aspect * (high - low))
        rows = jnp.clip(jnp.round(jnp.sqrt(area * aspect)), 1, height)
        columns = jnp.clip(jnp.round(jnp.sqrt(area / aspect)), 1, width)
        top, left = jnp.floor(top * (height - rows + 1)), jnp.floor(left * (width - columns + 1))
        box = _box(height, width, (top, left), (top + rows, left + columns))
        bits = jax.random.bits(noise_key, (height, width), jnp.uint32)
        shifts = [8 * (i % 4) for i in range(channels)]
        noise = jnp.stack([bits >> shift for shift in shifts], axis=-1).astype(jnp.uint8)
        return box & (chosen < probability), noise

    def apply(batch, keys, pairs):
        images = batch["image"]
        box, noise = jax.vmap(lambda key: draw(key, *images.shape[1:]))(keys)
        return batch | {"image": jnp.where(box[..., None], noise.astype(images.dtype), images)}

    return apply


def mixup(alpha: float) -> DeviceOp:
    """Mix images and labels of pairs: lambda * own + (1 - lambda) * partner's.

    lambda ~ Beta(alpha, alpha) is drawn once per pair, and both rows use the larger of lambda and
    1 - lambda. A pair thus yields the same two mixtures as in the paper, and a row's own label
    always has the larger weight.

    Source: Zhang et al. 2017 (arXiv:1710.09412), equation 2.
    """
    return _mixing(alpha, None)


def cutmix(alpha: float) -> DeviceOp:
    """Replace a box of each image by its partner's, and mix the labels by the remaining area.

    The box has the image's shape and 1 - lambda of its area, with lambda ~ Beta(alpha, alpha). Its
    centre is uniform over the image, and it is cut off at the border. Both rows of a pair use the
    same box.

    Source: Yun et al. 2019 (arXiv:1905.04899), equations 1 and 2.
    """
    return _mixing(None, alpha)


def mixup_or_cutmix(mixup: float, cutmix: float) -> DeviceOp:
    """Apply mixup(`mixup`) or cutmix(`cutmix`) to each pair, with equal probability.

    Source: Touvron et al. 2020 (arXiv:2012.12877), section 6, which draws one for a whole batch.
    """
    return _mixing(mixup, cutmix)


MIXING_OPS: dict[str, Callable[..., DeviceOp]] = {
    "mixup": mixup,
    "cutmix": cutmix,
    "mixup_or_cutmix": mixup_or_cutmix,
}
DEVICE_OPS: dict[str, Callable[..., DeviceOp]] = {
    "flip": flip,
    "erase": erase,
    **COLOUR_OPS,
    **MIXING_OPS,
}


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One of `values` for each channel; where all are the same, of any number of channels.

    Raises: InputError if there are others.
    """
    if len(values) != channels and len(set(values)) == 1:
        return (values[0],) * channels
    if len(values) != channels:
        raise InputError(f"{tuple(values)}: needs {channels} numbers, one a channel, or all alike")
    return tuple(values)


def to_value_range(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """(images / 255 - mean) / std per channel: pixels (..., 3) -> float32 (..., 3).

    With the papers' mean and std of 0.5, values lie in [-1, 1].
    """
    channels = images.shape[-1]
    shape = (1,) * (images.ndim - 1) + (channels,)
    means = jnp.reshape(jnp.asarray(per_channel(mean, channels), jnp.float32), shape)
    stds = jnp.reshape(jnp.asarray(per_channel(std, channels), jnp.float32), shape)
    return (images.astype(jnp.float32) / 255 - means) / stds


def make_device_transform(
    device_ops: Sequence[NamedOp],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    num_classes: int,
    distance: int = 1,
    views: Mapping[str, ViewsOf] | None = None,
) -> DeviceTransform:
    """Make the device part of the preprocessing for training.

    Args:
      device_ops: from `parse_ops`; op i draws from fold_in(row key, i).
      mean: per channel, for pixels in [0, 1].
      std: likewise.
      num_classes: C, the number of classes.
      distance: distance D of mixed rows; see `Pairs`. If an op mixes, 2 D must divide B.
      views: {key of a batch: views}; op i of view v draws from fold_in(fold_in(row key, 2^16 + v),
        i).

    Returns:
      transform(batch, row_keys (B,)) -> batch; pure. Images uint8 (B, H, W, 3), and views uint8
      (B, V, H, W, 3), become float32 in the value range. Labels stay int32 (B,), or become float32
      (B, C) if an op mixes them.
    """
    pairs = Pairs(distance)

    def of_view(image: jax.Array, keys: jax.Array, ops: Sequence[NamedOp]) -> jax.Array:
        for i, op in enumerate(ops):
            image = op({"image": image}, _fold_in(keys, i), pairs)["image"]
        return image.astype(jnp.float32)

    def of_views(images: jax.Array, row_keys: jax.Array, kind: ViewsOf) -> jax.Array:
        made = [
            of_view(images[:, v], _fold_in(row_keys, _FIRST_VIEW + kind.first + v), ops)
            for v, ops in enumerate(kind.device_ops)
        ]
        return to_value_range(jnp.stack(made, axis=1), mean, std)

    def transform(batch: Batch, row_keys: jax.Array) -> Batch:
        for i, op in enumerate(device_ops):
            if op.name in MIXING_OPS and batch["label"].ndim == 1:
                batch = batch | {"label": jax.nn.one_hot(batch["label"], num_classes)}
            batch = op(batch, _fold_in(row_keys, i), pairs)
        made = {name: of_views(batch[name], row_keys, v) for name, v in (views or {}).items()}
        if "image" in batch:
            made["image"] = to_value_range(batch["image"], mean, std)
        return batch | made

    return transform


def _fold_in(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def symmetric_beta(key: jax.Array, alpha: float | jax.Array) -> jax.Array:
    """One draw from Beta(alpha, alpha), computed from two uniform draws.

    The method has no rejection loop, so devices need not wait for each other. With U and V uniform,
    T = sqrt(2 alpha (U^(-1/alpha) - 1)) cos(2 pi V) has Student's t-distribution with 2 alpha
    degrees of freedom, and 1/2 + T / (2 sqrt(2 alpha + T^2)) has Beta(alpha, alpha).

    Source: Bailey 1994, "Polar generation of random variates with the t-distribution"; Devroye
    1996, "Random variate generation in one line of code".
    """
    u, v = jax.random.uniform(key, (2,), minval=jnp.finfo(jnp.float32).tiny)
    cos = jnp.cos(2 * jnp.pi * v)
    odds = jnp.expm1(-jnp.log(u) / alpha) * cos**2  # T^2 / (2 alpha), infinite at most
    return 0.5 + 0.5 * jnp.sign(cos) * jnp.sqrt(1 / (1 + 1 / odds))


def _mixing(mixup_alpha: float | None, cutmix_alpha: float | None) -> DeviceOp:
    """MixUp or CutMix; given both alphas, one is drawn per pair."""
    alphas = [alpha for alpha in (mixup_alpha, cutmix_alpha) if alpha is not None]
    for alpha in alphas:
        if not (_is_number(alpha) and 0 < alpha < math.inf):
            raise ValueError(f"the parameter of Beta must be a number above 0, not {alpha!r}")

    def draw(key):
        beta_key, choice_key, centre_key = jax.random.split(key, 3)
        choice = jax.random.randint(choice_key, (), 0, len(alphas))
        share = symmetric_beta(beta_key, jnp.asarray(alphas, jnp.float32)[choice])
        cuts = (choice == len(alphas) - 1) & (cutmix_alpha is not None)
        return cuts, share, jax.random.uniform(centre_key, (2,))

    def apply(batch, keys, pairs):
        images, labels, mask = batch["image"], batch["label"], batch["mask"]
        _, height, width, _ = images.shape
        sides = jnp.array([[height, width]], jnp.float32)
        cuts, share, centre = jax.tree.map(pairs.firsts, jax.vmap(draw)(keys))
        both_count = mask * pairs.swapped(mask) > 0  # a masked image is not mixed

        half = jnp.floor(jnp.floor(jnp.sqrt(1 - share)[:, None] * sides) / 2)
        centre = jnp.floor(centre * sides)
        corner, opposite = jnp.maximum(centre - half, 0), jnp.minimum(centre + half, sides)
        box = jax.vmap(_box, (None, None, 0, 0))(height, width, corner, opposite)
        left_over = 1 - jnp.prod(opposite - corner, axis=1) / (height * width)

        share = jnp.where(cuts, left_over, jnp.maximum(share, 1 - share))
        share = jnp.where(both_count, share, 1.0)
        own = jnp.where(cuts[:, None, None], ~box, share[:, None, None])
        own = jnp.where(both_count[:, None, None], own, 1.0)[..., None]
        others = pairs.swapped(images).astype(jnp.float32)
        return batch | {
            "image": own * images.astype(jnp.float32) + (1 - own) * others,
            "label": share[:, None] * labels + (1 - share[:, None]) * pairs.swapped(labels),
        }

    return apply


def _box(height, width, corner, opposite):
    """The box from `corner` (included) to `opposite` (excluded), each (2,): bool (H, W)."""
    y, x = jnp.arange(height)[:, None], jnp.arange(width)[None]
    rows = (y >= corner[0]) & (y < opposite[0])
    return rows & (x >= corner[1]) & (x < opposite[1])


def _is_number(value) -> bool:
    return type(value) in (int, float)
