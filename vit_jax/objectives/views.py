"""A model's features of several views of each picture.

Axes: B pictures, V views, D features.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import InputError
from vit_jax.models.fields import has_batch_statistics, with_known
from vit_jax.tree import ModelState, Params


def features_of_views(
    model: nn.Module, params: Params, model_state: ModelState, views: jax.Array, rng: jax.Array
) -> jax.Array:
    """The features of views (B, V, h, w, channels), float32 (B, V, D), in training.

    Views of another size than the model's images get its positions, resampled.

    Args:
      rng: key of the random stream `dropout`.
    """
    size = views.shape[2:4]
    images = views.reshape(-1, *views.shape[2:])
    variables = {"params": resize_positions(model, params, size), **model_state}
    model = with_known(model, image_size=size)
    x: Any = model.apply(variables, images, train=True, method="features", rngs={"dropout": rng})
    return x.astype(jnp.float32).reshape(*views.shape[:2], -1)


def resize_positions(model: nn.Module, params: Params, size: tuple[int, int]) -> Params:
    """`params` with the learned positions resampled bicubically to images of `size`."""
    own = getattr(model, "image_size", None)
    if own is None or tuple(own) == size or "pos_embedding" not in params:
        return params
    (rows, columns), (p, q) = model.grid, model.token_stride
    table_1ND = params["pos_embedding"]
    prefix = table_1ND.shape[1] - rows * columns
    width = table_1ND.shape[-1]
    grid = table_1ND[:, prefix:].reshape(1, rows, columns, width)
    new = (size[0] // p, size[1] // q)
    grid = jax.image.resize(grid, (1, *new, width), "bicubic", antialias=False)
    table_1ND = jnp.concatenate([table_1ND[:, :prefix], grid.reshape(1, -1, width)], axis=1)
    return {**params, "pos_embedding": table_1ND}


def check_views_fit(model: nn.Module, name: str) -> None:
    """Raise InputError if the objective called `name` cannot take views of other sizes."""
    if has_batch_statistics(model):
        raise InputError(
            f"objective.name={name!r}: needs a model without batch statistics; choose a ViT"
        )
    places, kind = getattr(model, "positions_at", "stem"), getattr(model, "pos_embed", "none")
    if kind in ("learned_2d", "relative") or (kind == "learned_1d" and places == "layers"):
        raise InputError(
            f"model.pos_embed={kind!r}: objective.name={name!r} cannot resample these positions "
            "for views of another size; set --config.model.pos_embed=sincos_2d, or learned_1d at "
            "the stem"
        )
