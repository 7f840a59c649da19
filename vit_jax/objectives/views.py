"""A model's features of several views of each picture.

Axes: B pictures, V views, D features.
"""

import jax
import jax.numpy as jnp

from vit_jax.models.contract import Model
from vit_jax.objectives.other_sizes import at_size
from vit_jax.tree import Params


def features_of_views(model: Model, params: Params, views: jax.Array, rng: jax.Array) -> jax.Array:
    """The features of views (B, V, h, w, channels), float32 (B, V, D), in training.

    For views of another size than the model's images, its positions are resampled.

    Args:
      rng: key of the random stream `dropout`.
    """
    images = views.reshape(-1, *views.shape[2:])
    height, width = views.shape[2:4]
    model, params = at_size(model, params, (height, width))
    x = model.apply(
        {"params": params}, images, train=True, method="features", rngs={"dropout": rng}
    )
    assert isinstance(x, jax.Array)
    return x.astype(jnp.float32).reshape(*views.shape[:2], -1)
