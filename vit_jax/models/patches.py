"""Images as patches, their embedding at other sizes, and the choice of some of them by row.

Axes: B images, N patches in raster order, M of them, D width, P values of a patch (row, column,
channel).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange


def extract_patches(images: jax.Array, patch_size: tuple[int, int]) -> jax.Array:
    """Cut images into flattened patches, in raster order; a patch is (row, column, channel).

    Shapes: (B, H, W, C) -> (B, HW / (p q), p q C) for patches of p x q pixels.
    """
    p, q = patch_size
    return rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=q)


def as_images(
    patches_BNP: jax.Array, grid: tuple[int, int], patch_size: tuple[int, int]
) -> jax.Array:
    """Patches (B, N, P) as images (B, H, W, channels): the inverse of `extract_patches`."""
    (rows, columns), (p, q) = grid, patch_size
    return rearrange(patches_BNP, "b (h w) (p q c) -> b (h p) (w q) c", h=rows, w=columns, p=p, q=q)


def resize_kernel(kernel_PD: Any, old: tuple[int, int], new: tuple[int, int]) -> jax.Array:
    """The embedding of patches of `old` pixels (height, width) for patches of `new` pixels.

    A patch that is resized bilinearly without antialiasing keeps its token where `new` is larger;
    where it is smaller, the token is the nearest by least squares. Float32.
    Source: Beyer et al. 2022 (arXiv:2212.08013), section 3.2, "PI-resize".
    """
    kernel_pqCD = rearrange(kernel_PD, "(p q c) d -> p q c d", p=old[0], q=old[1])
    rows, columns = (_pseudo_inverse(*sides) for sides in zip(old, new, strict=True))
    resized = jnp.einsum("yp,xq,pqcd->yxcd", rows, columns, kernel_pqCD, precision="highest")
    return rearrange(resized, "y x c d -> (y x c) d")


def _pseudo_inverse(old: int, new: int) -> np.ndarray:
    """The transposed pseudo-inverse (new, old) of bilinear resizing from `old` to `new` pixels."""
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    resizing = np.maximum(1 - np.abs(places[:, None] - np.arange(old)), 0)
    return np.linalg.pinv(resizing).T.astype(np.float32)


def row_keys(rng: jax.Array, num_rows: int) -> jax.Array:
    """A key for each row of the global batch, the same on every mesh."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, jnp.arange(num_rows))


def random_order(keys_B: jax.Array, num: int) -> jax.Array:
    """A random order of `num` patches for each row, int32 (B, num)."""
    noise_BN = jax.vmap(lambda key: jax.random.uniform(key, (num,)))(keys_B)
    return jnp.argsort(noise_BN, axis=1)


def _order_own_first(keys_B: jax.Array, counts_B: jax.Array, num: int) -> jax.Array:
    """`random_order` of the first `counts_B` of `num` patches; the others, padding, come last."""
    noise_BN = jax.vmap(lambda key: jax.random.uniform(key, (num,)))(keys_B)
    return jnp.argsort(noise_BN + (jnp.arange(num)[None] >= counts_B[:, None]), axis=1)


def random_parts(
    keys_B: jax.Array, counts_B: jax.Array, first_B: jax.Array, num: int, first: int
) -> jax.Array:
    """A random order of `num` patches in two parts, int32 (B, num); each part ends with padding.

    The first part has `first` places.

    Args:
      keys_B: of the rows.
      counts_B: how many patches of each row are no padding.
      first_B: how many of these are in the first part; the second part has the others.
    """
    rank_1N, count_B1, first_B1 = jnp.arange(num)[None], counts_B[:, None], first_B[:, None]
    padding_BN = rank_1N - count_B1 + first_B1  # places behind the own patches of the first part
    place_BN = jnp.where(padding_BN < first, padding_BN, rank_1N)
    place_BN = jnp.where(rank_1N < count_B1, first + rank_1N - first_B1, place_BN)
    place_BN = jnp.where(rank_1N < first_B1, rank_1N, place_BN)
    order_BN = _order_own_first(keys_B, counts_B, num)
    return jnp.take_along_axis(order_BN, jnp.argsort(place_BN, axis=1), axis=1)


def take(x_BND: jax.Array, which_BM: jax.Array) -> jax.Array:
    """The patches `which_BM` of each row: (B, M, D)."""
    return jnp.take_along_axis(x_BND, which_BM[:, :, None], axis=1)


def take_once(x_BN: jax.Array, which_BM: jax.Array) -> jax.Array:
    """The entries `which_BM` of each row, none of them twice: (B, N, ...) -> (B, M, ...).

    Its gradient adds nothing up; GPUs add in no fixed order.
    """

    def of_row(x_N: jax.Array, which_M: jax.Array) -> jax.Array:
        return x_N.at[which_M].get(mode="promise_in_bounds", unique_indices=True)

    return jax.vmap(of_row)(x_BN, which_BM)


def take_after(prefix: int, x_BND: jax.Array, which_BM: jax.Array) -> jax.Array:
    """The first `prefix` tokens, then the patches `which_BM`: (B or 1, prefix + N, D)."""
    x_BND = jnp.broadcast_to(x_BND, (len(which_BM), *x_BND.shape[1:]))
    return jnp.concatenate([x_BND[:, :prefix], take_once(x_BND[:, prefix:], which_BM)], axis=1)


def draw_patches(rng: jax.Array, rows: int, num: int, share: float) -> jax.Array:
    """A share of `num` patches, drawn for each row: raster indices, rising, int32 (rows, M)."""
    order_BN = random_order(row_keys(rng, rows), num)
    return jnp.sort(order_BN[:, : count_kept(num, share)], axis=1)


def draw_among(rng: jax.Array, counts_B: jax.Array, num: int, share: float) -> jax.Array:
    """`draw_patches` among the first `counts_B` of `num` patches of each row: int32 (rows, M).

    A row keeps `count_kept_of` its own patches; the entries behind them are padding.
    """
    order_BN = _order_own_first(row_keys(rng, len(counts_B)), counts_B, num)
    order_BM = order_BN[:, : count_kept(num, share)]
    kept_BM = jnp.arange(order_BM.shape[1])[None] < count_kept_of(counts_B, num, share)[:, None]
    return jnp.sort(jnp.where(kept_BM, order_BM, order_BM + num), axis=1) % num


def count_kept_of(counts_B: jax.Array, num: int, share: float) -> jax.Array:
    """`count_kept` of the patches of each row, which are `num` at most."""
    kept_B = jnp.round(counts_B * share).astype(jnp.int32)
    return jnp.clip(kept_B, 1, count_kept(num, share))


def count_kept(num: int, share: float) -> int:
    """M: how many of `num` patches are kept, at least one."""
    return max(round(num * share), 1)


def put_back(x_BMD: jax.Array, kept_BM: jax.Array, num: int) -> jax.Array:
    """The patches at their places `kept_BM` among `num`, zeros elsewhere: -> (B, N, D)."""

    def put(x_MD: jax.Array, kept_M: jax.Array) -> jax.Array:
        zeros_ND = jnp.zeros((num, x_MD.shape[-1]), x_MD.dtype)
        return zeros_ND.at[kept_M].set(x_MD, mode="promise_in_bounds", unique_indices=True)

    return jax.vmap(put)(x_BMD, kept_BM)
