"""Resampling of position embeddings from one patch grid to another, of kernels to other channels.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2: "2D interpolation of the
pre-trained position embeddings, according to their location in the original image".
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from vit_jax.base.errors import InputError, nearest


def _linear(places: np.ndarray, num: int, stretch: float) -> np.ndarray:
    """Linear interpolation between the two nearest entries."""
    return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(num)))


def _widened(
    kernel: Callable[[np.ndarray], np.ndarray], places: np.ndarray, num: int, stretch: float
) -> np.ndarray:
    """Interpolation by a `kernel` of the distance, which widens when downsampling."""
    weights = kernel(np.abs(places[:, None] - np.arange(num)) / max(stretch, 1.0))
    return weights / weights.sum(axis=1, keepdims=True)


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - x)


def _cubic(x: np.ndarray) -> np.ndarray:
    """The cubic kernel with a = -0.5."""
    near = 1.5 * x**3 - 2.5 * x**2 + 1.0
    far = -0.5 * x**3 + 2.5 * x**2 - 4.0 * x + 2.0
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _cubic_clamped(places: np.ndarray, num: int, stretch: float) -> np.ndarray:
    """Cubic interpolation (a = -0.75) that repeats the entries at the edges."""
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
    """A convention for resampling one axis to another number of patches.

    weights: (positions in units of old entries, number of old entries, old patches per new patch)
      -> the weight of each old entry at each position, (positions, old entries).
    align_corners: whether the first and last patches of both grids coincide; otherwise the edges of
      the image do.
    surplus: added to the number of new patches, whose distance it makes a little smaller.
    """

    weights: Callable[[np.ndarray, int, float], np.ndarray]
    align_corners: bool
    surplus: float = 0.0

    def stretch(self, old: int, new: int) -> float:
        """The distance between neighbouring new patches, in old patches."""
        return (old - 1) / max(new - 1, 1) if self.align_corners else old / (new + self.surplus)

    def of_patches(self, old: int, new: int) -> np.ndarray:
        """The weight of each old patch in each new one. Shapes: -> (new, old)."""
        stretch = self.stretch(old, new)
        first = 0.0 if self.align_corners else (stretch - 1) / 2
        return self.weights(first + stretch * np.arange(new), old, stretch)

    def of_offsets(self, old: int, new: int) -> np.ndarray:
        """The weights for offsets between patches, from 1 - new to new - 1.

        Shapes: -> (2 new - 1, 2 old - 1).
        """
        stretch = self.stretch(old, new)
        return self.weights(old - 1 + stretch * np.arange(1 - new, new), 2 * old - 1, stretch)


# The conventions of the reference code (.npz files), of Hugging Face's transformers, of timm, which
# is also this project's, of SigLIP 2 with images of any shape, and of DINOv2's authors.
CONVENTIONS = {
    "corner_aligned": ResizeConvention(_linear, align_corners=True),
    "half_pixel": ResizeConvention(_cubic_clamped, align_corners=False),
    "antialiased": ResizeConvention(partial(_widened, _cubic), align_corners=False),
    "linear_antialiased": ResizeConvention(partial(_widened, _triangle), align_corners=False),
    "half_pixel_surplus": ResizeConvention(_cubic_clamped, align_corners=False, surplus=0.1),
}


def check_convention(name: str | None, key: str) -> None:
    """Raise InputError if `name`, the value of `key`, is neither None nor a convention."""
    if name is not None and name not in CONVENTIONS:
        raise InputError(f"{key}={name!r}: {nearest(name, list(CONVENTIONS))}")


def resample_grid(
    tables: np.ndarray,
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    convention: str,
) -> np.ndarray:
    """Resample position embeddings to another grid; the first entries, of no patch, stay unchanged.

    Shapes: (P, prefix + old[0] * old[1], D) -> (P, prefix + new[0] * new[1], D), float32.
    """
    of_patches = CONVENTIONS[convention].of_patches
    rows, columns = (of_patches(o, n) for o, n in zip(old, new, strict=True))
    prefix, resampled = tables.shape[1] - old[0] * old[1], []
    for table in tables:
        grid = table[prefix:].reshape(*old, -1).astype(np.float64)
        grid = np.einsum("yh,xw,hwd->yxd", rows, columns, grid).reshape(new[0] * new[1], -1)
        resampled.append(np.concatenate([table[:prefix], grid]))
    return np.stack(resampled).astype(np.float32)


def resample_axis(table: np.ndarray, old: int, new: int, *, convention: str) -> np.ndarray:
    """Resample a table of rows or columns to another number of them.

    Shapes: (1, old, D) -> (1, new, D), float32.
    """
    weights = CONVENTIONS[convention].of_patches(old, new)
    return np.einsum("no,bod->bnd", weights, table.astype(np.float64)).astype(np.float32)


def resample_offsets(
    offsets: np.ndarray, old: tuple[int, int], new: tuple[int, int], *, convention: str
) -> np.ndarray:
    """Resample the vectors of offsets between patches, in raster order, to another grid.

    Patches that are dy rows and dx columns apart have the raster offset dy * columns + dx. Unless
    dx = 0, two displacements share an offset: (dy, dx) and (dy + 1, dx - columns), or the reverse.
    The vectors of the old grid's displacements are interpolated at the new grid's displacements, by
    location in the image. Each new offset gets the mean over its pairs of patches.

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
    """The raster offset's index and the number of pairs of patches for each (dy, dx), ascending.

    Shapes: -> two arrays (2 grid[0] - 1, 2 grid[1] - 1).
    """
    rows, columns = grid
    dy, dx = np.mgrid[1 - rows : rows, 1 - columns : columns]
    return dy * columns + dx + rows * columns - 1, (rows - abs(dy)) * (columns - abs(dx))


def adapt_kernel(kernel: np.ndarray, old: int, new: int) -> np.ndarray:
    """The kernel of the first layer for images of `new` channels in place of `old`.

    For one channel the sum over the old ones, which gives a grey image what its copies on all
    channels gave; for others the old ones repeated, in their order, times old / new, as timm does.

    Args:
      kernel: (..., old, D) of a convolution, or (p q old, D) of flattened patches.
    """
    width = kernel.shape[-1]
    by_channel = kernel.reshape(-1, old, width)
    if new == 1:
        adapted = by_channel.sum(axis=1, keepdims=True)
    else:
        adapted = by_channel[:, np.arange(new) % old] * (old / new)
    if kernel.ndim == 2:
        return adapted.reshape(-1, width)
    return adapted.reshape(*kernel.shape[:-2], new, width)
