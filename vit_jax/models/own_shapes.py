"""Pictures in their own shape: the fields of a model that takes them, and positions by coordinates.

Axes: B pictures, N patches of one with padding, O rows or columns of a table, S patches of the grid
of a table, D width.
Source: Tschannen et al. 2025 (arXiv:2502.14786), section 2.4.2.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.linen import nowrap

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.config import key
from vit_jax.models.fields import FROM_1

Images = jax.Array | Pictures

# Kernels of the distance by which a grid is resampled.
FILTERS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "bilinear": lambda x: jnp.maximum(1 - x, 0),
    "bicubic": lambda x: jnp.where(  # a = -1/2
        x < 1,
        (1.5 * x - 2.5) * x**2 + 1,
        jnp.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0),
    ),
}


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PictureFields:
    """The fields of a model that also takes `Pictures`.

    Its learned positions have the grid of `image_size`, and each picture gets them resampled to its
    own grid.
    """

    max_tokens: int | None = key(
        None, "patches of a picture in its own shape, at most; None: images have image_size",
        within=FROM_1,
    )  # fmt: skip
    pos_filter: str = key(
        "bilinear", "how pictures in their own shape resample positions", choices=tuple(FILTERS)
    )

    @nowrap
    def find_picture_faults(self) -> list[str]:
        """The fields, with `max_tokens`, by which the model takes images of one size only."""
        model: Any = self  # the other fields of a ViT
        if self.max_tokens is None:
            return []
        kind, at = model.position_class, model.positions_at
        faults = (
            []
            if model.embeds_patches and not model.needs_grid
            else [
                f"name: a {type(self).__name__} takes images of one size, not pictures of "
                "data.max_tokens; choose a ViT, or set data.image_size instead"
            ]
        )
        if at == "layers" or not (kind.takes_pictures or kind.acts_on == "nothing"):
            faults.append(
                f"pos_embed={model.pos_embed!r}, pos_embed_at={at!r}: pictures of "
                "data.max_tokens need learned_1d, sincos_2d or none, in one place, or rotary"
            )
        return faults

    @nowrap
    def flat_patches(
        self, pictures: Pictures, patch_size: tuple[int, int], channels: int
    ) -> jax.Array:
        """The patches (B, N, p q channels), as `patches.extract_patches` orders their values."""
        found, needed = pictures.patches.shape[2:], (*patch_size, channels)
        if found != needed:
            raise InputError(f"pictures in patches of {found}: this model needs {needed}")
        return rearrange(pictures.patches, "b n p q c -> b n (p q c)")


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
