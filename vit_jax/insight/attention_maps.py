"""Numbers that describe attention weights: distance, entropy, maps over the image, rollout.

Axes: B images, H heads, N tokens (P prefix tokens, then S patches in raster order).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.pictures import Pictures
from vit_jax.models.contract import Model

_EXACT = jax.lax.Precision.HIGHEST  # accelerators multiply with fewer bits otherwise


def patch_distances(of: tuple[int, int] | Pictures, stride: tuple[int, int]) -> Any:
    """The distances between the centres of all patches in pixels, float32 (S, S).

    `of`: rows and columns of patches, or pictures: (B, S, S); `stride`: height and width of a patch
    in pixels.
    """
    places = of.places if isinstance(of, Pictures) else np.mgrid[: of[0], : of[1]].reshape(2, -1)
    sides = zip(places, stride, strict=True)
    y, x = ((place[..., :, None] - place[..., None, :]) * float(side) for place, side in sides)
    return ((y**2 + x**2) ** 0.5).astype(np.float32)


def mean_distance(weights_BHNN: jax.Array, distances: Any) -> jax.Array:
    """The mean attention distance of each image and head in pixels, (B, H).

    The distance of a query is the mean of its distances to all patches, weighted by its attention
    to them; the distance of a head is the mean over all patches as queries. Prefix tokens have no
    place: they count neither as queries nor as keys. `distances`: (S, S), or of each image.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.7 and figure 11.
    """
    num_patches = distances.shape[-1]
    num_prefix = weights_BHNN.shape[-1] - num_patches
    weights_BHSS = weights_BHNN[:, :, num_prefix:, num_prefix:]
    distances_B1SS = distances.reshape(-1, 1, num_patches, num_patches)
    total_BHS = (weights_BHSS * distances_B1SS).sum(axis=-1)
    weight_BHS = jnp.maximum(weights_BHSS.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
    return (total_BHS / weight_BHS).mean(axis=-1)


def mean_entropy(weights_BHNN: jax.Array) -> jax.Array:
    """The entropy of the attention of a query in bits, as its mean over all queries, (B, H).

    It is 0 for attention to one token and log2(N) for uniform attention.
    """
    nats_BHN = jax.scipy.special.entr(weights_BHNN).sum(axis=-1)
    return nats_BHN.mean(axis=-1) / np.log(2)


def prefix_share(weights_BHNN: jax.Array, num_prefix: int) -> jax.Array:
    """The share of the patches' attention that prefix tokens receive, (B, H)."""
    return weights_BHNN[:, :, num_prefix:, :num_prefix].sum(axis=-1).mean(axis=-1)


def rollout_step(weights_BHNN: jax.Array, before_BNN: jax.Array | None) -> jax.Array:
    """Attention rollout up to a layer, (B, N, N), from that up to the layer before.

    Row n gives the share of each input token in output token n: A R, where A is the mean over the
    heads, averaged with the identity for the residual connection. `before_BNN` is None in the
    first layer.

    Source: Abnar & Zuidema 2020 (arXiv:2005.00928), section 3, Eq. 1.
    """
    mean_BNN = weights_BHNN.mean(axis=1)
    with_residual_BNN = 0.5 * mean_BNN + 0.5 * jnp.eye(mean_BNN.shape[-1])[None]
    if before_BNN is None:
        return with_residual_BNN
    return jnp.matmul(with_residual_BNN, before_BNN, precision=_EXACT)


def token_shares(model: Model) -> np.ndarray:
    """The share of each output token in the representation that the head classifies, (N,).

    With the class token 1 for it; a DeiT with two heads halves it with the distillation token. A
    mean over the patches gives each the same share; so does attention pooling here, whose own
    weights depend on the image. The model must have an image size.
    """
    num_patches = model.grid[0] * model.grid[1]
    pooled, prefix = model.num_pooled_tokens, model.num_prefix_tokens
    shares_N = np.zeros(prefix + num_patches, np.float32)
    shares_N[slice(pooled) if pooled else slice(prefix, None)] = 1 / (pooled or num_patches)
    return shares_N


def name_of_shares(model: Model) -> str:
    """Words for the tokens of `token_shares`."""
    names = ("mean of the patches", "class token", "class and distillation token")
    return names[model.num_pooled_tokens]


def over_patches(weights: jax.Array, shares_N: np.ndarray, grid: tuple[int, int]) -> jax.Array:
    """The attention (..., N, N) of the tokens that count, as maps (..., rows, columns).

    What prefix tokens receive is left out. Pictures have shares (B, N), each its own.
    """
    if shares_N.ndim == 2:
        return jax.vmap(functools.partial(over_patches, grid=grid))(weights, shares_N)
    num_prefix = len(shares_N) - grid[0] * grid[1]
    received = jnp.einsum("n,...nm->...m", shares_N, weights, precision=_EXACT)[..., num_prefix:]
    return received.reshape(*received.shape[:-1], *grid)
