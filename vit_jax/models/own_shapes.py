"""Pictures in their own shape: positions by coordinates, and means over the patches of each.

Axes: B pictures, N patches of one with padding, O rows or columns of a table, S patches of the grid
of a table, D width.
Source: Tschannen et al. 2025 (arXiv:2502.14786), section 2.4.2.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.pictures import Pictures

# Kernels of the distance by which a grid is resampled.
FILTERS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "bilinear": lambda x: jnp.maximum(1 - x, 0),
    "bicubic": lambda x: jnp.where(  # a = -1/2
        x < 1,
        (1.5 * x - 2.5) * x**2 + 1,
        jnp.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0),
    ),
}


def resample(
    table_SD: jax.Array, grid: tuple[int, int], pictures: Pictures, filter: str
) -> jax.Array:
    """A table of a `grid`, resampled with antialiasing to the grid of each picture: (B, N, D).

    The weights of a patch are a product of its row's and its column's, so that one product with the
    table gives all patches.
    """
    by_axis = []
    for axis, place_BN in enumerate(pictures.places):
        stretch_B11 = grid[axis] / pictures.grid[:, axis, None, None]
        old_11O = np.arange(grid[axis])[None, None] + 0.5
        far_BNO = (place_BN[..., None] + 0.5) * stretch_B11 - old_11O
        weights_BNO = FILTERS[filter](jnp.abs(far_BNO) / jnp.maximum(stretch_B11, 1))
        total_BN1 = weights_BNO.sum(axis=2, keepdims=True)
        by_axis.append(weights_BNO / jnp.where(total_BN1 == 0, 1, total_BN1))  # 0: of padding
    weights_BNS = by_axis[0][..., :, None] * by_axis[1][..., None, :]
    return weights_BNS.reshape(*weights_BNS.shape[:2], -1) @ table_SD


def squash(pictures: Pictures, side: int) -> jax.Array:
    """Pictures as images (B, side, side, channels), linearly with antialiasing, like images."""
    by_axis = []
    for axis, place_BN in enumerate(pictures.places):
        size, of_grid_B111 = pictures.shape[2 + axis], pictures.grid[:, axis, None, None, None]
        stretch_B111, place_BN11 = of_grid_B111 * size / side, place_BN[..., None, None]
        pixel_BNp1 = place_BN11 * size + np.arange(size)[None, None, :, None] + 0.5
        far_BNpS = pixel_BNp1 - (np.arange(side)[None, None, None] + 0.5) * stretch_B111
        weights_BNpS = FILTERS["bilinear"](jnp.abs(far_BNpS) / jnp.maximum(stretch_B111, 1))
        by_axis.append(jnp.where(place_BN11 < of_grid_B111, weights_BNpS, 0))
    summed, totals = (
        jnp.einsum("bnpqc,bnpy,bnqx->byxc", values, *by_axis, precision="highest")
        for values in (pictures.patches, jnp.ones((*pictures.shape[:-1], 1)))
    )
    return summed / totals


def mean_of_first(x_BND: jax.Array, counts_B: jax.Array | None) -> jax.Array:
    """The mean (B, D) over the first `counts_B` tokens of each row; None: over all."""
    if counts_B is None:
        return x_BND.mean(axis=1)
    counts_BN1 = (np.arange(x_BND.shape[1])[None] < counts_B[:, None])[..., None]
    total_BD = jnp.where(counts_BN1, x_BND, 0).sum(axis=1)
    return total_BD / counts_B[:, None].astype(total_BD.dtype)


def look_up(table_OD: np.ndarray, place_BN: jax.Array) -> jax.Array:
    """The entry of each patch's row or column, (B, N, D); of padding beyond it the last one."""
    return jnp.asarray(table_OD)[jnp.minimum(place_BN, len(table_OD) - 1)]
