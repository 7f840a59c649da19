"""Centred kernel alignment: how alike two layers represent the same images.

Axes: B images, L and M layers, F features of an image.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

MIN_IMAGES = 4  # of a batch, for the unbiased estimate


def gram_matrix(x: jax.Array) -> jax.Array:
    """The inner products of the images' features, float32 (B, B), for features (B, ...).

    The mean over the images is taken off first, for precision.
    """
    x_BF = x.reshape(x.shape[0], -1).astype(jnp.float32)
    x_BF -= x_BF.mean(axis=0, keepdims=True)
    return jnp.matmul(x_BF, x_BF.T, precision=jax.lax.Precision.HIGHEST)


def _centred(grams_LBB: np.ndarray) -> np.ndarray:
    """Rows whose inner products are unbiased estimates of HSIC, float64 (L, B B).

    Source: Song et al. 2012, Feature Selection via Dependence Maximization, Eq. 5: the terms are
    collected in U-centred matrices, of which the diagonal is 0.
    """
    grams = np.array(grams_LBB, np.float64)
    num = grams.shape[-1]
    diagonal = np.arange(num)
    grams[:, diagonal, diagonal] = 0
    sums_LB = grams.sum(axis=-1)
    total_L = sums_LB.sum(axis=-1)
    grams -= (sums_LB[:, :, None] + sums_LB[:, None]) / (num - 2)
    grams += (total_L / ((num - 1) * (num - 2)))[:, None, None]
    grams[:, diagonal, diagonal] = 0
    return grams.reshape(len(grams), -1) / np.sqrt(num * (num - 3))


def alignment(
    batches: Sequence[np.ndarray], others: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """The centred kernel alignment (CKA) of each pair of layers, float64 (L, M).

    1 for representations that are equal up to rotation, shift and scale; about 0 for independent
    ones, with the sign of the noise. HSIC is averaged over the batches before it is divided.

    Args:
      batches: the `gram_matrix` of each layer, (L, B, B), for every batch of images.
      others: those of another model for the same images, (M, B, B); None: of the same model.

    Raises:
      ValueError: for a batch of fewer than 4 images.

    Source: Kornblith et al. 2019 (arXiv:1905.00414); by batches, with the unbiased estimate:
      Nguyen et al. 2020 (arXiv:2010.15327), Eqs. 3-5.
    """
    pairs = list(zip(batches, batches if others is None else others, strict=True))
    if any(ours.shape[-1] < MIN_IMAGES for ours, _ in pairs):
        raise ValueError(f"a batch of fewer than {MIN_IMAGES} images has no unbiased estimate")
    between: np.ndarray = np.zeros(())
    own_L: np.ndarray = np.zeros(())
    own_M: np.ndarray = np.zeros(())
    for ours_LBB, theirs_MBB in pairs:
        ours, theirs = _centred(ours_LBB), _centred(theirs_MBB)
        between = between + ours @ theirs.T
        own_L = own_L + np.square(ours).sum(axis=1)
        own_M = own_M + np.square(theirs).sum(axis=1)
    scale_LM = np.sqrt(own_L[:, None] * own_M[None])
    return np.divide(between, scale_LM, out=np.full_like(scale_LM, np.nan), where=scale_LM > 0)
