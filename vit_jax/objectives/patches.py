"""Shared by the objectives that hide patches: random choices by row, and pixels as patches.

Axes: B images, N patches in raster order, P values of a patch (row, column, channel).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images
from vit_jax.models.contract import Model, about
from vit_jax.objectives.contract import Collapse

COLLAPSE = Collapse("Lower optimizer.peak_lr, lengthen schedule.warmup, or train for longer")


class Reconstruction(NamedTuple):
    """Images with hidden patches, and their reconstructions, in the model's value range.

    loss_B: the loss of each image, (B,).
    hidden, restored: (B, H, W, channels), or `Pictures`; `restored` has its own pixels where
      nothing was hidden.
    """

    loss_B: jax.Array
    hidden: Images
    restored: Images


def check_patches(model: nn.Module, name: str) -> Model:
    """`model`, whose tokens are the patches of its images.

    Raises:
      InputError: they are not.
    """
    model = about(model)
    if not model.embeds_patches:
        kind = type(model).__name__
        raise InputError(f"objective.name={name!r}: does not train a {kind}; choose a ViT")
    if model.image_size is None or model.grid[0] * model.grid[1] < 2:
        raise InputError(f"objective.name={name!r}: needs images of at least two patches")
    return model


def dropout_options(dropout_key: jax.Array | None) -> dict[str, Any]:
    """The options of `model.apply` in training; None leaves out the dropout."""
    options: dict[str, Any] = {"train": dropout_key is not None}
    return options if dropout_key is None else options | {"rngs": {"dropout": dropout_key}}


def as_pixels(values: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Values (..., channels) of the model's range as pixels, whole numbers from 0 to 255."""
    shape = (1,) * (values.ndim - 1) + (-1,)
    mean_C, std_C = (jnp.reshape(jnp.asarray(x, jnp.float32), shape) for x in (mean, std))
    return jnp.clip(jnp.round((values * std_C + mean_C) * 255), 0, 255)
