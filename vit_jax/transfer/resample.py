"""Resampling of position embeddings from one patch grid to another.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.2: "2D interpolation of the
pre-trained position embeddings, according to their location in the original image".
"""

import numpy as np

from vit_jax.errors import InputError, nearest


def _corner_aligned(old: int, new: int) -> np.ndarray:
    """Bilinear, the first and last entries kept in place. Shapes: -> (new, old)."""
    places = np.linspace(0, old - 1, new)[:, None]
    return np.maximum(0.0, 1.0 - np.abs(places - np.arange(old)))


def _antialiased(old: int, new: int) -> np.ndarray:
    """Bicubic (a = -0.5) about pixel centres, widened where it shrinks. Shapes: -> (new, old)."""
    stretch = max(old / new, 1.0)
    places = (np.arange(new)[:, None] + 0.5) * old / new - 0.5
    x = np.abs(places - np.arange(old)) / stretch
    near = 1.5 * x**3 - 2.5 * x**2 + 1.0
    far = -0.5 * x**3 + 2.5 * x**2 - 4.0 * x + 2.0
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def _half_pixel(old: int, new: int) -> np.ndarray:
    """Bicubic (a = -0.75) about pixel centres, the edges repeated. Shapes: -> (new, old)."""
    places = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(places).astype(int) - 1
    weights = np.zeros((new, old))
    for i in range(4):
        x = np.abs(places - (first + i))
        near = 1.25 * x**3 - 2.25 * x**2 + 1.0
        far = -0.75 * x**3 + 3.75 * x**2 - 6.0 * x + 3.0
        taken = np.clip(first + i, 0, old - 1)
        np.add.at(weights, (np.arange(new), taken), np.where(x <= 1, near, far))
    return weights


# The conventions of the published .npz files' library, of Hugging Face's transformers, and of timm,
# which is this project's own.
CONVENTIONS = {
    "corner_aligned": _corner_aligned,
    "half_pixel": _half_pixel,
    "antialiased": _antialiased,
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
    rows, columns = (CONVENTIONS[convention](o, n) for o, n in zip(old, new, strict=True))
    grid = grid.reshape(*old, -1).astype(np.float64)
    grid = np.einsum("yh,xw,hwd->yxd", rows, columns, grid).reshape(new[0] * new[1], -1)
    return np.concatenate([tokens, grid])[None].astype(np.float32)
