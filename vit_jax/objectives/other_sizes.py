"""A ViT at another image or patch size than its own: its positions and its embedding resized.

For other images, positions are resampled by bicubic interpolation without antialiasing (a = -1/2,
where the published codes of DINO and DINOv3 have -3/4); for other patches by bilinear interpolation
with it, as Beyer et al. 2022 (arXiv:2212.08013) do.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.tree import Batch, Params, PyTree
from vit_jax.models.contract import Model, about
from vit_jax.models.patches import resize_kernel
from vit_jax.models.position import Resize
from vit_jax.objectives.contract import Objective, ObjectiveOutput


def check_resizable(model: nn.Module, name: str) -> Model:
    """`model`, which objective `name` gives views of several sizes.

    Raises:
      InputError: it takes images of one size.
    """
    model = about(model)
    if not model.takes_other_sizes:
        kind = type(model).__name__
        raise InputError(
            f"objective.name={name!r}: does not train a {kind}; choose a ViT, a ViTC or a hybrid"
        )
    return model


def check_size(
    model: Model, size: tuple[int, int], key: str, patch_size: tuple[int, int] | None = None
) -> None:
    """Raise InputError if `model` cannot be resized to images of `size` in patches of that size."""
    patch_size = patch_size or model.token_stride
    if any(side % patch for side, patch in zip(size, patch_size, strict=True)):
        raise InputError(f"{key}={size}: needs multiples of the patch size {patch_size}")
    if (size, patch_size) == (model.image_size, model.token_stride):
        return
    if model.has_positions_in_layers:
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
    return resized, _positions_of(resized, model, params, _RESIZE)


def at_patch_size(model: Model, params: Params, patch_size: tuple[int, int]) -> Params:
    """`params` of `model` with an embedding of patches of `patch_size`, and positions for them.

    It is a linear function of both, through which gradients flow.
    """
    if patch_size == model.token_stride or "embedding" not in params:
        return params
    params = _positions_of(model.clone(patch_size=patch_size), model, params, _RESIZE_SMOOTHLY)
    embedding: Any = params["embedding"]
    kernel = resize_kernel(embedding["kernel"], model.token_stride, patch_size)
    return {**params, "embedding": {**embedding, "kernel": kernel}}


def _positions_of(resized: Model, model: Model, params: Params, resize: Resize) -> Params:
    """`params` of `model` with the positions for the grid of `resized`."""
    if "pos_embedding" not in params or resized.grid == model.grid:
        return params
    positions = model.positions(model.image_size)
    tables = positions.resampled(params["pos_embedding"], resized.grid, resize)
    return {**params, "pos_embedding": tables}


def as_resized(objective: Objective, resized: Model, model: Model) -> Objective:
    """`objective`, of images and patches as `resized` takes them, for the parameters of `model`.

    Each step resizes the embedding of patches, and resamples the positions, of the parameters and
    of the running average; views of other sizes resample the result.
    """

    def fit(params: Params) -> Params:
        params = at_patch_size(model, params, resized.token_stride)
        return at_size(model, params, resized.image_size)[1]

    def loss(
        params: Params, state: Any, batch: Batch, frozen: PyTree, rng: jax.Array
    ) -> ObjectiveOutput:
        state = state.replace(ema=fit(state.ema))
        return objective.loss(fit(params), state, batch, frozen, rng)

    return dataclasses.replace(objective, loss=loss)


def resize_tokens(
    x_BND: jax.Array, grid: tuple[int, int], wanted: tuple[int, int], resize: Callable | None = None
) -> jax.Array:
    """The patches (B, N, D) of the `grid` (rows, columns), resampled to the grid `wanted`."""
    if grid == wanted:
        return x_BND
    x_BHWD = x_BND.reshape(len(x_BND), *grid, -1)
    resized = (resize or _cubic)(x_BHWD, (len(x_BND), *wanted, x_BND.shape[2]))
    return resized.reshape(len(x_BND), -1, x_BND.shape[2])


def _resize_by(resize: Callable) -> Resize:
    def of_grid(table: jax.Array, old: tuple[int, int], new: tuple[int, int]) -> jax.Array:
        prefix = table.shape[1] - math.prod(old)
        patches = resize_tokens(table[:, prefix:], old, new, resize)
        return jnp.concatenate([table[:, :prefix], patches], axis=1)

    return Resize(
        grid=of_grid,
        axis=lambda table, _, new: resize(table, (1, new, table.shape[2])),
        offsets=lambda *_: None,  # `check_size` refuses relative positions
    )


_cubic = partial(jax.image.resize, method="cubic", antialias=False)
_RESIZE = _resize_by(_cubic)
_RESIZE_SMOOTHLY = _resize_by(partial(jax.image.resize, method="linear", antialias=True))
