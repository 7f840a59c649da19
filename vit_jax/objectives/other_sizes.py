"""A ViT at another image size than its own, with its learned positions resampled; and its patches.

All are resampled by bicubic interpolation without antialiasing (a = -1/2, where the published codes
of DINO and DINOv3 have -3/4).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.tree import Batch, Params, PyTree
from vit_jax.models.contract import Model
from vit_jax.models.position import Resize
from vit_jax.objectives.contract import Objective, ObjectiveOutput


def check_size(model: Model, size: tuple[int, int], key: str) -> None:
    """Raise InputError if the positions of `model` cannot be resampled to images of `size`."""
    if any(side % patch for side, patch in zip(size, model.token_stride, strict=True)):
        raise InputError(f"{key}={size}: needs multiples of the patch size {model.token_stride}")
    if size != model.image_size and model.has_positions_in_layers:
        raise InputError(
            f"{key}={size}: model.pos_embed={model.pos_embed!r} in every layer is not resampled; "
            "choose learned_1d, learned_2d or sincos_2d at the stem, or the model's size"
        )


def at_size(model: Model, params: Params, size: tuple[int, ...]) -> tuple[Model, Params]:
    """`model` for images of `size` (height, width), and `params` with positions that fit it.

    Prefix tokens keep their positions. The result is a linear function of the tables, through which
    gradients flow.
    """
    resized = model.clone(image_size=size)
    if size == model.image_size or "pos_embedding" not in params:
        return resized, params
    positions = model.positions(model.image_size)
    tables = positions.resampled(params["pos_embedding"], resized.grid, _RESIZE)
    return resized, {**params, "pos_embedding": tables}


def with_larger(objective: Objective, size: tuple[int, int], model: Model) -> Objective:
    """`objective`, of images of `size`, for the parameters of `model`, whose images are larger.

    Each step resamples the positions of the parameters and of the running average to `size`; views
    of other sizes resample the result.
    """

    def loss(
        params: Params, state: Any, batch: Batch, frozen: PyTree, rng: jax.Array
    ) -> ObjectiveOutput:
        _, params = at_size(model, params, size)
        _, ema = at_size(model, state.ema, size)
        return objective.loss(params, state.replace(ema=ema), batch, frozen, rng)

    return dataclasses.replace(objective, loss=loss)


def resize_tokens(x_BND: jax.Array, grid: tuple[int, int], wanted: tuple[int, int]) -> jax.Array:
    """The patches (B, N, D) of the `grid` (rows, columns), resampled to the grid `wanted`."""
    if grid == wanted:
        return x_BND
    x_BHWD = x_BND.reshape(len(x_BND), *grid, -1)
    resized = _resize(x_BHWD, (len(x_BND), *wanted, x_BND.shape[2]))
    return resized.reshape(len(x_BND), -1, x_BND.shape[2])


def _resize(table: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.image.resize(table, shape, "cubic", antialias=False)


def _resize_grid(table: jax.Array, old: tuple[int, int], new: tuple[int, int]) -> jax.Array:
    prefix = table.shape[1] - math.prod(old)
    patches = resize_tokens(table[:, prefix:], old, new)
    return jnp.concatenate([table[:, :prefix], patches], axis=1)


_RESIZE = Resize(
    grid=_resize_grid,
    axis=lambda table, _, new: _resize(table, (1, new, table.shape[2])),
    offsets=lambda *_: None,  # `check_size` refuses relative positions
)
