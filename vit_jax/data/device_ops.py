"""Preprocessing on the device: jnp ops on a whole batch, inside the jitted step.

Images are pixels from 0 to 255 throughout, float32 after mixing and after the ops of colour_ops.py.

Axes: B images, H height, W width, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures
from vit_jax.base.tree import Batch
from vit_jax.config.parts import key
from vit_jax.data.native import mirror
from vit_jax.data.ops import PROBABILITY, DeviceOp, Pairs

_FIRST_VIEW = 2**16  # number of the keys of views, beyond the ops' keys
_ERASED_ASPECT = 0.3  # minimum of height / width; the maximum is 1 / 0.3
_POSITIVE = "(0, inf)"
_BETA = "parameter of Beta(alpha, alpha)"

DeviceTransform = Callable[[Batch, jax.Array], Batch]


class Flip(DeviceOp):
    """Flip images left to right, each with probability 1/2."""

    axis: ClassVar[int] = 2
    takes_patches = True

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        images: Any = batch["image"]
        flipped = jax.vmap(jax.random.bernoulli)(keys)
        flipped = flipped[:, None, None, None]
        mirrored: Any = mirror(images, self.axis)
        if isinstance(images, Pictures):
            chosen = jnp.where(flipped[..., None], mirrored.patches, images.patches)
            images = images._replace(patches=chosen)
        else:
            images = jnp.where(flipped, mirrored, images)
        return batch | {"image": images}


class VerticalFlip(Flip):
    """Flip images upside down, each with probability 1/2."""

    axis = 1


class Rotate90(DeviceOp):
    """Turn images by 0, 90, 180 or 270 degrees, each with probability 1/4.

    Images that are not square are turned by 0 or 180 degrees, each with probability 1/2.
    """

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        images = batch["image"]
        turns = jax.vmap(lambda key: jax.random.randint(key, (), 0, 4))(keys)[:, None, None, None]
        if images.shape[1] == images.shape[2]:
            images = jnp.where(turns % 2 == 1, jnp.rot90(images, axes=(1, 2)), images)
        return batch | {"image": jnp.where(turns >= 2, jnp.flip(images, (1, 2)), images)}


class Erase(DeviceOp):
    """Fill a random rectangle with noise, in each image with `probability`.

    The area is `area_min` to `area_max` of the image. The aspect is log-uniform in 0.3 to 1 / 0.3,
    limited to rectangles that fit, and the position is uniform over those inside the image. Each
    value of the noise is uniform over 0 to 255.

    Source: Zhong et al. 2017 (arXiv:1708.04896), algorithm 1, which instead draws aspect and
    position again until the rectangle fits.
    """

    probability: float = key(..., PROBABILITY, within="[0, 1]")
    area_min: float = key(0.02, "smallest share of the image", within="(0, 1]")
    area_max: float = key(0.4, "largest share of the image", within="(0, 1]")

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        images = batch["image"]
        box, noise = jax.vmap(lambda key: self._draw(key, *images.shape[1:]))(keys)
        return batch | {"image": jnp.where(box[..., None], noise.astype(images.dtype), images)}

    def _draw(
        self, key: jax.Array, height: int, width: int, channels: int
    ) -> tuple[jax.Array, jax.Array]:
        """(whether each pixel is erased, bool (H, W); its noise, uint8 (H, W, channels))."""
        box_key, noise_key = jax.random.split(key)
        chosen, area, aspect, top, left = jax.random.uniform(box_key, (5,))
        area = (self.area_min + area * (self.area_max - self.area_min)) * height * width
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
        return box & (chosen < self.probability), noise


class Mixing(DeviceOp):
    """MixUp or CutMix; of both, one is drawn per pair."""

    mixes = True

    def alphas(self) -> tuple[float | None, float | None]:
        """MixUp's and CutMix's alpha; None: without."""
        raise NotImplementedError

    def __call__(self, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
        images, labels, mask = batch["image"], batch["label"], batch["mask"]
        _, height, width, _ = images.shape
        sides = jnp.array([[height, width]], jnp.float32)
        cuts, share, centre = jax.tree.map(pairs.firsts, jax.vmap(self._draw)(keys))
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

    def _draw(self, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(whether the pair is cut, its lambda, the centre of the box (2,))."""
        mixup, cutmix = self.alphas()
        alphas = [alpha for alpha in (mixup, cutmix) if alpha is not None]
        beta_key, choice_key, centre_key = jax.random.split(key, 3)
        choice = jax.random.randint(choice_key, (), 0, len(alphas))
        share = symmetric_beta(beta_key, jnp.asarray(alphas, jnp.float32)[choice])
        cuts = (choice == len(alphas) - 1) & (cutmix is not None)
        return cuts, share, jax.random.uniform(centre_key, (2,))


class MixUp(Mixing):
    """Mix images and labels of pairs: lambda * own + (1 - lambda) * partner's.

    lambda ~ Beta(alpha, alpha) is drawn once per pair, and both rows use the larger of lambda and
    1 - lambda. A pair thus yields the same two mixtures as in the paper, and a row's own label
    always has the larger weight.

    Source: Zhang et al. 2017 (arXiv:1710.09412), equation 2.
    """

    alpha: float = key(..., _BETA, within=_POSITIVE)

    def alphas(self) -> tuple[float | None, float | None]:
        return self.alpha, None


class CutMix(Mixing):
    """Replace a box of each image by its partner's, and mix the labels by the remaining area.

    The box has the image's shape and 1 - lambda of its area, with lambda ~ Beta(alpha, alpha). Its
    centre is uniform over the image, and it is cut off at the border. Both rows of a pair use the
    same box.

    Source: Yun et al. 2019 (arXiv:1905.04899), equations 1 and 2.
    """

    alpha: float = key(..., _BETA, within=_POSITIVE)

    def alphas(self) -> tuple[float | None, float | None]:
        return None, self.alpha


class MixUpOrCutMix(Mixing):
    """Apply mixup(`mixup`) or cutmix(`cutmix`) to each pair, with equal probability.

    Source: Touvron et al. 2020 (arXiv:2012.12877), section 6, which draws one for a whole batch.
    """

    mixup: float = key(..., f"{_BETA} of mixup", within=_POSITIVE)
    cutmix: float = key(..., f"{_BETA} of cutmix", within=_POSITIVE)

    def alphas(self) -> tuple[float | None, float | None]:
        return self.mixup, self.cutmix


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


def _box(
    height: int,
    width: int,
    corner: jax.Array | Sequence[jax.Array],
    opposite: jax.Array | Sequence[jax.Array],
) -> jax.Array:
    """The box from `corner` (included) to `opposite` (excluded), each (2,): bool (H, W)."""
    y, x = jnp.arange(height)[:, None], jnp.arange(width)[None]
    rows = (y >= corner[0]) & (y < opposite[0])
    return rows & (x >= corner[1]) & (x < opposite[1])


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """`values`, one for each channel: all of one value, or for one channel their mean."""
    if len(set(values)) == 1:
        return (values[0],) * channels
    return (sum(values) / len(values),) if channels == 1 else tuple(values)


def to_value_range(images: Images, mean: Sequence[float], std: Sequence[float]) -> Any:
    """(images / 255 - mean) / std per channel: pixels (..., 3) -> float32 (..., 3).

    With the papers' mean and std of 0.5, values lie in [-1, 1]. Of `Pictures`, the patches change.
    """
    if isinstance(images, Pictures):
        return images._replace(patches=to_value_range(images.patches, mean, std))
    channels = images.shape[-1]
    means = _along_channels(per_channel(mean, channels), images)
    stds = _along_channels(per_channel(std, channels), images)
    return (images.astype(jnp.float32) / 255 - means) / stds


def _along_channels(values: Sequence[float], images: jax.Array) -> jax.Array:
    return jnp.reshape(jnp.asarray(values, jnp.float32), (1,) * (images.ndim - 1) + (-1,))


def make_device_transform(
    device_ops: Sequence[DeviceOp],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    num_classes: int,
    distance: int = 1,
    views: Mapping[str, Any] | None = None,
) -> DeviceTransform:
    """Make the device part of the preprocessing for training.

    Args:
      device_ops: from `parse_ops`; op i draws from fold_in(row key, i).
      mean: per channel, for pixels in [0, 1].
      std: likewise.
      num_classes: C, the number of classes.
      distance: distance D of mixed rows; see `Pairs`. If an op mixes, 2 D must divide B.
      views: {key of a batch: `preprocessing.Views`}; op i of view v draws from
        fold_in(fold_in(row key, 2^16 + v), i).

    Returns:
      transform(batch, row_keys (B,)) -> batch; pure. Images uint8 (B, H, W, 3), and views uint8
      (B, V, H, W, 3), become float32 in the value range. Labels stay int32 (B,), or become float32
      (B, C) if an op mixes them.
    """
    pairs = Pairs(distance)

    def of_view(image: jax.Array, keys: jax.Array, ops: Sequence[DeviceOp]) -> jax.Array:
        for i, op in enumerate(ops):
            image = _apply(op, {"image": image}, _fold_in(keys, i), pairs)["image"]
        return image.astype(jnp.float32)

    def of_views(images: jax.Array, row_keys: jax.Array, kind: Any) -> jax.Array:
        first = kind.crops.first_view or 0
        keys = jnp.stack(
            [_fold_in(row_keys, _FIRST_VIEW + first + v) for v in range(images.shape[1])], axis=1
        )
        made, begin = [], 0
        for ops, alike in itertools.groupby(kind.device_ops):
            end = begin + len(list(alike))
            # All views with these ops at once: less to compile, and fewer arrays to join.
            some, some_keys = images[:, begin:end], keys[:, begin:end]
            image = of_view(some.reshape(-1, *some.shape[2:]), some_keys.reshape(-1), ops)
            made.append(image.reshape(some.shape))
            begin = end
        return to_value_range(jnp.concatenate(made, axis=1), mean, std)

    def transform(batch: Batch, row_keys: jax.Array) -> Batch:
        for i, op in enumerate(device_ops):
            if op.mixes and batch["label"].ndim == 1:
                batch = batch | {"label": jax.nn.one_hot(batch["label"], num_classes)}
            batch = _apply(op, batch, _fold_in(row_keys, i), pairs)
        made = {name: of_views(batch[name], row_keys, v) for name, v in (views or {}).items()}
        if "image" in batch:
            made["image"] = to_value_range(batch["image"], mean, std)
        return batch | made

    return transform


def _apply(op: DeviceOp, batch: Batch, keys: jax.Array, pairs: Pairs) -> Batch:
    made: Any = op(batch, keys, pairs)
    if not isinstance(made, dict) or batch.keys() - made.keys():
        raise InputError(
            f"{op.text!r} gives {type(made).__name__}; an op of the device gives the whole batch, "
            'such as batch | {"image": images}'
        )
    return made


def _fold_in(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)
