"""Gram anchoring: a student's patches stay as similar to each other as an older teacher's.

Axes: B images, N patches, D width, R groups of images.
Source: Siméoni et al. 2025 (arXiv:2508.10104), section 4.2.
"""

import jax
import jax.numpy as jnp

NEGATIVES = ("kept", "removed", "removed_from_teacher")
_EPS = 1e-12


def gram_distance(
    x_BND: jax.Array, y_BND: jax.Array, group: int = 1, negatives: str = "kept"
) -> jax.Array:
    """Mean square of X X' - Y Y' over the patches of a group of images, all of length 1.

    Args:
      x_BND: patches of the student.
      y_BND: patches of the teacher.
      group: number of consecutive images of the global batch whose patches are compared with each
        other; 1: patches of one image; divides B.
      negatives: what becomes of negative similarities: "kept"; "removed": both models' become 0;
        "removed_from_teacher": only the teacher's do.

    Returns:
      (R,), float32.
    """
    x_RGG, y_RGG = _similarities(x_BND, group), _similarities(y_BND, group)
    if negatives == "removed":
        x_RGG = jnp.maximum(x_RGG, 0)
    if negatives != "kept":
        y_RGG = jnp.maximum(y_RGG, 0)
    return jnp.square(x_RGG - y_RGG).mean(axis=(1, 2))


def _similarities(x_BND: jax.Array, group: int) -> jax.Array:
    """The cosines of all pairs of patches of a group, (R, group N, group N)."""
    x_RND = x_BND.astype(jnp.float32).reshape(-1, group * x_BND.shape[1], x_BND.shape[2])
    norms_RN1 = jnp.sqrt(jnp.square(x_RND).sum(axis=2, keepdims=True) + _EPS)
    x_RND /= norms_RN1
    return jnp.einsum("rnd,rmd->rnm", x_RND, x_RND)
