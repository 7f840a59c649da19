"""A ViT at another image size than its own, with its learned positions resampled; and its patches.

All are resampled by bicubic interpolation without antialiasing (a = -1/2, where the published codes
of DINO and DINOv3 have -3/4).
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.tree import Params
from vit_jax.models.contract import Model


def check_size(model: Model, size: tuple[int, int], key: str) -> None:
    """Raise InputError if the positions of `model` cannot be resampled to images of `size`."""
    if any(side % patch for side, patch in zip(size, model.token_stride, strict=True)):
        raise InputError(f"{key}={size}: needs multiples of the patch size {model.token_stride}")
    in_layers = model.pos_embed == "relative" or model.positions_at == "layers"
    if size != model.image_size and in_layers:
        raise InputError(
            f"{key}={size}: model.pos_embed={model.pos_embed!r} in every layer is not resampled; "
            "choose learned_1d, learned_2d or sincos_2d at the stem, or the model's size"
        )


def at_size(model: Model, params: Params, size: tuple[int, int]) -> tuple[Model, Params]:
    """`model` for images of `size` (height, width), and `params` with positions that fit it.

    Prefix tokens keep their positions. The result is a linear function of the tables, through which
    gradients flow.
    """
    if size == model.image_size or "pos_embedding" not in params:
        return model.clone(image_size=size), params
    resized = model.clone(image_size=size)
    (rows, columns), wanted = model.grid, resized.grid
    table: Any = params["pos_embedding"]
    if isinstance(table, jax.Array):
        prefix = table.shape[1] - rows * columns
        grid = table[:, prefix:].reshape(1, rows, columns, -1)
        grid = _resize(grid, (1, *wanted, table.shape[2])).reshape(1, -1, table.shape[2])
        return resized, {**params, "pos_embedding": jnp.concatenate([table[:, :prefix], grid], 1)}
    tables = dict(table)
    for name, number in zip(("rows", "columns"), wanted, strict=True):
        tables[name] = _resize(tables[name], (1, number, tables[name].shape[2]))
    return resized, {**params, "pos_embedding": tables}


def resize_tokens(x_BND: jax.Array, grid: tuple[int, int], wanted: tuple[int, int]) -> jax.Array:
    """The patches (B, N, D) of the `grid` (rows, columns), resampled to the grid `wanted`."""
    if grid == wanted:
        return x_BND
    x_BHWD = x_BND.reshape(len(x_BND), *grid, -1)
    resized = _resize(x_BHWD, (len(x_BND), *wanted, x_BND.shape[2]))
    return resized.reshape(len(x_BND), -1, x_BND.shape[2])


def _resize(table, shape):
    return jax.image.resize(table, shape, "cubic", antialias=False)
