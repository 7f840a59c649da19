"""Preprocessing on the device: jnp ops on a whole batch, inside the jitted step.

An op is called as op(images, keys) with uint8 images (B, H, W, 3) and a JAX key for each row, so
that what it draws for a row is the same however the batch is sharded. Wrong arguments raise
ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

DeviceOp = Callable[[jax.Array, jax.Array], jax.Array]


def flip() -> DeviceOp:
    """Left and right exchanged, in half of the images."""

    def apply(images, keys):
        flipped = jax.vmap(jax.random.bernoulli)(keys)
        return jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)

    return apply


DEVICE_OPS = {"flip": flip}


def to_value_range(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """(images / 255 - mean) / std per channel: uint8 (..., 3) -> float32 (..., 3).

    With mean and std of 0.5, the papers' own, values lie in [-1, 1].
    """
    per_channel = (1,) * (images.ndim - 1) + (3,)
    mean = jnp.reshape(jnp.asarray(mean, jnp.float32), per_channel)
    std = jnp.reshape(jnp.asarray(std, jnp.float32), per_channel)
    return (images.astype(jnp.float32) / 255 - mean) / std


def make_device_transform(
    device_ops: Sequence[DeviceOp], mean: Sequence[float], std: Sequence[float]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The device's share of preprocessing, for training.

    Args:
      device_ops: from `parse_ops`; op i draws from fold_in(row key, i).
      mean: per channel, of pixels in [0, 1].
      std: likewise.

    Returns:
      transform(images uint8 (B, H, W, 3), row_keys (B,)) -> float32 (B, H, W, 3); pure.
    """

    def transform(images, row_keys):
        for i, op in enumerate(device_ops):
            images = op(images, jax.vmap(jax.random.fold_in, (0, None))(row_keys, i))
        return to_value_range(images, mean, std)

    return transform
