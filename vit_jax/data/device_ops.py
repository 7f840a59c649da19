"""Preprocessing on the device: jnp ops on a whole batch, inside the jitted step.

An op is called as op(batch, keys) with the batch, a dict of `image` uint8 (B, H, W, 3), `label`,
`mask` and `id` (each (B,)), and a JAX key for each row, so that what it draws for a row is the same
however the batch is sharded. It gives the batch. Wrong arguments raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Batch = dict[str, jax.Array]
DeviceOp = Callable[[Batch, jax.Array], Batch]


def flip() -> DeviceOp:
    """Left and right exchanged, in half of the images."""

    def apply(batch, keys):
        images = batch["image"]
        flipped = jax.vmap(jax.random.bernoulli)(keys)
        images = jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)
        return batch | {"image": images}

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
    device_ops: Sequence[DeviceOp],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    num_classes: int,
) -> Callable[[Batch, jax.Array], Batch]:
    """The device's share of preprocessing, for training.

    Args:
      device_ops: from `parse_ops`; op i draws from fold_in(row key, i).
      mean: per channel, of pixels in [0, 1].
      std: likewise.
      num_classes: of the labels, where an op mixes them.

    Returns:
      transform(batch, row_keys (B,)) -> batch; pure. Images uint8 (B, H, W, 3) become float32 in
      the value range. Labels stay int32 (B,), or become float32 (B, C) where an op mixes them.
    """

    def transform(batch, row_keys):
        for i, op in enumerate(device_ops):
            batch = op(batch, jax.vmap(jax.random.fold_in, (0, None))(row_keys, i))
        return batch | {"image": to_value_range(batch["image"], mean, std)}

    return transform
