"""KoLeo: spreads features over the sphere.

Source: Sablayrolles et al. 2018 (arXiv:1806.03198), section 3.2, as in Oquab et al. 2023
(arXiv:2304.07193), section 4.
"""

import jax
import jax.numpy as jnp

_EPS = 1e-8


def koleo(x_BD: jax.Array, mask_B: jax.Array, group: int) -> jax.Array:
    """-log of the distance of each normalised feature to the nearest other one of its group.

    Neighbours are the rows of a group of consecutive rows of the global batch, so that the loss
    does not depend on the number of devices. Gradients flow through both of a pair.

    Args:
      x_BD: features.
      mask_B: 1, or 0 for rows that are nobody's neighbour.
      group: rows of a group; divides B.

    Returns:
      (B,), float32; 0 where `mask_B` is 0 or a row has no neighbour.
    """
    x_BD = x_BD.astype(jnp.float32)
    norm_B1 = jnp.sqrt(jnp.square(x_BD).sum(axis=1, keepdims=True) + _EPS**2)
    x_RGD = (x_BD / norm_B1).reshape(-1, group, x_BD.shape[1])
    mask_RG = mask_B.reshape(-1, group)
    cosines_RGG = jnp.einsum("rgd,rhd->rgh", x_RGD, x_RGD)
    others_RGG = (mask_RG[:, None, :] > 0) & ~jnp.eye(group, dtype=bool)[None]
    cosines_RGG = jax.lax.stop_gradient(jnp.where(others_RGG, cosines_RGG, -2.0))
    found_RG1, which_RG1 = jax.lax.top_k(cosines_RGG, 1)
    y_RGD = jnp.take_along_axis(x_RGD, which_RG1, axis=1)
    distance_RG = jnp.sqrt(jnp.square(x_RGD - y_RGD + _EPS).sum(axis=2))
    counts_RG = (mask_RG > 0) & (found_RG1[:, :, 0] > -1.5)
    return jnp.where(counts_RG, -jnp.log(distance_RG + _EPS), 0.0).reshape(-1)
