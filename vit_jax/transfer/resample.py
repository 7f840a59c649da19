"""Resampling of position embeddings from one patch grid to another.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2: "2D interpolation of the
pre-trained position embeddings, according to their location in the original image".
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.errors import InputError, nearest


def _linear(places: np.ndarray, num: int, stretch: float) -> np.ndarray:
    """Between the two nearest entries."""
    del stretch
    return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(num)))


def _cubic_widened(places: np.ndarray, num: int, stretch: float) -> np.ndarray:
    """Cubic (a = -0.5), widened where entries get fewer."""
    x = np.abs(places[:, None] - np.arange(num)) / max(stretch, 1.0)
    near = 1.5 * x**3 - 2.5 * x**2 + 1.0
    far = -0.5 * x**3 + 2.5 * x**2 - 4.0 * x + 2.0
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def _cubic_clamped(places: np.ndarray, num: int, stretch: float) -> np.ndarray:
    """Cubic (a = -0.75), the entries at the edges repeated."""
    del stretch
    first = np.floor(places).astype(int) - 1
    weights = np.zeros((len(places), num))
    for i in range(4):
        x = np.abs(places - (first + i))
        near = 1.25 * x**3 - 2.25 * x**2 + 1.0
        far = -0.75 * x**3 + 3.75 * x**2 - 6.0 * x + 3.0
        taken = np.clip(first + i, 0, num - 1)
        np.add.at(weights, (np.arange(len(places)), taken), np.where(x <= 1, near, far))
    return weights


class ResizeConvention(NamedTuple):
    """How what lies on one axis of an image is taken from another number of patches.

    weights: (places among the old entries, their number, old patches a new one) -> the share of
      each old entry in what is at each place, (places, old entries).
    align_corners: whether the first and the last patch of both lie in one place; or the image's
      edges do.
    """

    weights: Callable[[np.ndarray, int, float], np.ndarray]
    align_corners: bool

    def stretch(self, old: int, new: int) -> float:
        """How many old patches lie between two new ones."""
        return (old - 1) / max(new - 1, 1) if self.align_corners else old / new

    def of_patches(self, old: int, new: int) -> np.ndarray:
        """The share of each old patch in each new one. Shapes: -> (new, old)."""
        stretch = self.stretch(old, new)
        first = 0.0 if self.align_corners else (stretch - 1) / 2
        return self.weights(first + stretch * np.arange(new), old, stretch)

    def of_offsets(self, old: int, new: int) -> np.ndarray:
        """The same of offsets between patches, from 1 - new to new - 1.

        Shapes: -> (2 new - 1, 2 old - 1).
        """
        stretch = self.stretch(old, new)
        return self.weights(old - 1 + stretch * np.arange(1 - new, new), 2 * old - 1, stretch)


# The conventions of the published .npz files' library, of Hugging Face's transformers, and of timm,
# which is this project's own.
CONVENTIONS = {
    "corner_aligned": ResizeConvention(_linear, align_corners=True),
    "half_pixel": ResizeConvention(_cubic_clamped, align_corners=False),
    "antialiased": ResizeConvention(_cubic_widened, align_corners=False),
}


def check_convention(name: str | None, key: str) -> None:
    """Raises InputError if `name`, the value of `key`, is no convention and not None."""
    if name is not None and name not in CONVENTIONS:
        raise InputError(f"{key}={name!r}: {nearest(name, list(CONVENTIONS))}")


def resample_grid(
    pos_embedding: np.ndarray,
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    prefix: int,
    convention: str,
) -> np.ndarray:
    """A position embedding for another grid; the entries of prefix tokens are untouched.

    Shapes: (1, prefix + old[0] * old[1], D) -> (1, prefix + new[0] * new[1], D), float32.
    """
    tokens, grid = pos_embedding[0, :prefix], pos_embedding[0, prefix:]
    of_patches = CONVENTIONS[convention].of_patches
    rows, columns = (of_patches(o, n) for o, n in zip(old, new, strict=True))
    grid = grid.reshape(*old, -1).astype(np.float64)
    grid = np.einsum("yh,xw,hwd->yxd", rows, columns, grid).reshape(new[0] * new[1], -1)
    return np.concatenate([tokens, grid])[None].astype(np.float32)


def resample_patches(
    tables: np.ndarray, old: tuple[int, int], new: tuple[int, int], *, convention: str
) -> np.ndarray:
    """Tables of patches alone for another grid.

    Shapes: (P, old[0] * old[1], D) -> (P, new[0] * new[1], D), float32.
    """
    sizes = {"prefix": 0, "convention": convention}
    return np.concatenate([resample_grid(table[None], old, new, **sizes) for table in tables])


def resample_axis(table: np.ndarray, old: int, new: int, *, convention: str) -> np.ndarray:
    """A table of the rows, or of the columns, for another number of them.

    Shapes: (1, old, D) -> (1, new, D), float32.
    """
    weights = CONVENTIONS[convention].of_patches(old, new)
    return np.einsum("no,bod->bnd", weights, table.astype(np.float64)).astype(np.float32)


def resample_offsets(
    offsets: np.ndarray, old: tuple[int, int], new: tuple[int, int], *, convention: str
) -> np.ndarray:
    """Vectors of the offsets between patches, in raster order, for another grid.

    An offset in raster order is that of the pairs of patches that are dy rows and dx columns apart,
    dy * columns + dx; but for those of dx = 0 it has two such (dy, dx), one the other with a row
    more and a row's length of columns less. The vectors of the (dy, dx) of the old grid are
    interpolated at those of the new one, by location in the image. A new offset gets the mean over
    its pairs of patches.

    Shapes: (2 old[0] old[1] - 1, K) -> (2 new[0] new[1] - 1, K), float32.
    """
    places, _ = _offsets_of(old)
    of_offsets = CONVENTIONS[convention].of_offsets
    rows, columns = (of_offsets(o, n) for o, n in zip(old, new, strict=True))
    by_place = offsets.astype(np.float64)[places]
    by_place = np.einsum("yh,xw,hwk->yxk", rows, columns, by_place)
    places, num_pairs = _offsets_of(new)
    total = np.zeros((2 * new[0] * new[1] - 1, offsets.shape[1]))
    np.add.at(total, places, num_pairs[..., None] * by_place)
    pairs = np.bincount(places.ravel(), num_pairs.ravel(), len(total))
    return (total / pairs[:, None]).astype(np.float32)


def _offsets_of(grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Of (dy, dx), from the least on: the place among the raster offsets, the number of pairs.

    Shapes: -> two of (2 grid[0] - 1, 2 grid[1] - 1).
    """
    rows, columns = grid
    dy, dx = np.mgrid[1 - rows : rows, 1 - columns : columns]
    return dy * columns + dx + rows * columns - 1, (rows - abs(dy)) * (columns - abs(dx))
