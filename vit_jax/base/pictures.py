"""Pictures in their own shape, cut into patches: the other form of `image` in a batch."""

from typing import Any, NamedTuple

import jax
import numpy as np
from einops import rearrange


class Pictures(NamedTuple):
    """B pictures of at most N patches of p x q pixels; a tree of two arrays.

    patches: (B, N, p, q, channels), in raster order; those after the last one of a picture are
      padding, and what they hold does not matter.
    grid: int32 (B, 2), the rows and columns of each picture's patches, each at least 1.
    """

    patches: Any
    grid: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, N, p, q, channels)."""
        return tuple(self.patches.shape)

    @property
    def dtype(self) -> Any:
        """Of the pixels."""
        return self.patches.dtype

    @property
    def counts(self) -> Any:
        """The number of patches of each picture, (B,)."""
        return self.grid[:, 0] * self.grid[:, 1]

    @property
    def places(self) -> tuple[Any, Any]:
        """The row and the column of each patch, int32 (B, N); of padding, beyond the last row."""
        numbers, columns = np.arange(self.shape[1])[None], self.grid[:, 1:]
        return numbers // columns, numbers % columns


Images = jax.Array | Pictures


def counts_of(images: Images) -> jax.Array | None:
    """The number of patches of each picture in its own shape, (B,); None for images."""
    return images.counts if isinstance(images, Pictures) else None


def cut_out(images: Any) -> list[np.ndarray]:
    """The images of a batch on the host, one by one, each (height, width, channels).

    Pictures keep their shape. `images`: (B, H, W, channels), or `Pictures`.
    """
    if not isinstance(images, Pictures):
        return [*images]
    return [
        rearrange(of_one[: rows * columns], "(r c) p q x -> (r p) (c q) x", r=rows)
        for of_one, (rows, columns) in zip(images.patches, images.grid.tolist(), strict=True)
    ]
