"""Batch normalisation over the global batch.

Axes: B images, H rows, W columns, C channels.
Statistics and parameters are float32; the result has `dtype`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

BATCH_STATS = "batch_stats"  # the collection of variables that holds running averages


class BatchNorm(nn.Module):
    """Normalise each channel, then scale and shift it; running averages serve evaluation.

    In training (`train=True`) the mean and the biased variance are taken over all images in the
    global batch whose `mask` is not 0; under jit the batch may be split over any devices. If the
    collection `batch_stats` is mutable, its `mean` and `var` follow as

        average <- momentum * average + (1 - momentum) * statistic

    unless every image is masked. In evaluation the averages themselves normalise. Without `affine`
    there is no scale and no shift.

    Shapes: (B, H, W, C), mask (B,) or None (every image counts) -> (B, H, W, C).
    Source: Ioffe & Szegedy 2015 (arXiv:1502.03167).
    """

    momentum: float
    epsilon: float
    dtype: Any = jnp.float32
    affine: bool = True

    @nn.compact
    def __call__(
        self, x_BHWC: jax.Array, mask_B: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        channels = x_BHWC.shape[-1]
        scale_C, bias_C = jnp.ones(channels), jnp.zeros(channels)
        if self.affine:
            scale_C = self.param("scale", nn.initializers.ones, (channels,))
            bias_C = self.param("bias", nn.initializers.zeros, (channels,))
        average = self.variable(BATCH_STATS, "mean", jnp.zeros, (channels,))
        average_var = self.variable(BATCH_STATS, "var", jnp.ones, (channels,))
        x_BHWC = x_BHWC.astype(jnp.float32)
        mean_C, var_C = average.value, average_var.value
        if train:
            mean_C, var_C, seen = _statistics(x_BHWC, mask_B)
            if self.is_mutable_collection(BATCH_STATS) and not self.is_initializing():
                for running, now_C in ((average, mean_C), (average_var, var_C)):
                    followed_C = self.momentum * running.value + (1 - self.momentum) * now_C
                    running.value = jnp.where(seen > 0, followed_C, running.value)
        factor_C = scale_C / jnp.sqrt(var_C + self.epsilon)
        y_BHWC = (x_BHWC - _spread(mean_C)) * _spread(factor_C) + _spread(bias_C)
        return y_BHWC.astype(self.dtype)


def _statistics(
    x_BHWC: jax.Array, mask_B: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mean (C,), biased variance (C,), number of images) over the images that count."""
    images, height, width, _ = x_BHWC.shape
    weight_B = jnp.ones(images) if mask_B is None else mask_B.astype(jnp.float32)
    weight_B111 = jnp.reshape(weight_B, (-1, 1, 1, 1))
    seen = weight_B.sum()
    positions = jnp.maximum(seen, 1.0) * height * width
    mean_C = (x_BHWC * weight_B111).sum(axis=(0, 1, 2)) / positions
    squares_BHWC = jnp.square(x_BHWC - _spread(mean_C))
    return mean_C, (squares_BHWC * weight_B111).sum(axis=(0, 1, 2)) / positions, seen


def _spread(values_C: jax.Array) -> jax.Array:
    """(C,) -> (1, 1, 1, C)."""
    return jnp.reshape(values_C, (1, 1, 1, -1))
