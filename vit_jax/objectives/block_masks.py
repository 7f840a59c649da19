"""Block-wise masks: rectangles of patches that are hidden together.

Axes: B images, G global views of each, U of these that have hidden patches, N patches, M at most
hidden in a view.

Source: Bao et al. 2021 (arXiv:2106.08254), algorithm 1, with the numbers of Oquab et al. 2023
(arXiv:2304.07193).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_SMALLEST = 4  # patches of a block
_LOG_ASPECT = math.log(0.3)  # the aspect is log-uniform in 0.3 to 1 / 0.3
_TRIES = 10  # in a row without a block that fits


def block_mask(key: jax.Array, grid: tuple[int, int], number: jax.Array) -> jax.Array:
    """Hide about `number` patches of a grid in blocks: bool (rows, columns), never more of them.

    A block has 4 patches up to as many as are still to be hidden, and lies anywhere in the grid. A
    block that hides nothing new, or too much, is drawn again, up to 10 times in a row.
    """
    rows, columns = grid
    y, x = jnp.arange(rows)[:, None], jnp.arange(columns)[None]

    def goes_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        mask, tries, _ = state
        return (mask.sum() < number) & (tries < _TRIES)

    def add_block(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mask, tries, i = state
        area, aspect, top, left = jax.random.uniform(jax.random.fold_in(key, i), (4,))
        room = number - mask.sum()
        area = _SMALLEST + area * (room - _SMALLEST)
        aspect = jnp.exp(_LOG_ASPECT * (1 - 2 * aspect))
        height, width = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
        top = jnp.floor(top * (rows - height + 1))
        left = jnp.floor(left * (columns - width + 1))
        block = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        added = (block & ~mask).sum()
        fits = (height < rows) & (width < columns) & (added > 0) & (added <= room)
        return jnp.where(fits, mask | block, mask), jnp.where(fits, 0, tries + 1), i + 1

    start = jnp.zeros(grid, bool), jnp.int32(0), jnp.int32(0)
    return jax.lax.while_loop(goes_on, add_block, start)[0]


class Hidden(NamedTuple):
    """The hidden patches of some of the global views.

    views: which views of an image have any, int32 (B, U), others have none.
    mask: bool (B, U, N), the hidden patches, in raster order.
    which: int32 (B, U, M), their raster indices, then other patches' indices.
    counts: (B, U, M), 1 for a hidden patch, 0 for another.
    """

    views: jax.Array
    mask: jax.Array
    which: jax.Array
    counts: jax.Array

    def in_all_views(self, num_views: int) -> jax.Array:
        """The hidden patches of all views, bool (B G, N); `num_views` is B G."""
        rows, number, num_patches = self.mask.shape
        masks = jnp.zeros((rows, num_views // rows, num_patches), bool)
        for u in range(number):
            is_view = jnp.arange(masks.shape[1])[None] == self.views[:, u, None]
            masks |= is_view[:, :, None] & self.mask[:, u, None]
        return masks.reshape(num_views, -1)


def draw_hidden(
    keys_B: jax.Array,
    grid: tuple[int, int],
    num_views: int,
    masked_views: int,
    shares: tuple[float, float],
) -> Hidden:
    """Draw the views of each image that have hidden patches, and these in blocks.

    Args:
      keys_B: a key for each image.
      grid: rows and columns of patches.
      num_views: G.
      masked_views: U, how many of them have hidden patches.
      shares: the least and the largest share of a view's patches that are hidden; uniform between.
    """
    size = grid[0] * grid[1]
    most = max(int(size * shares[1]), 1)

    def of_image(key: jax.Array) -> Hidden:
        order_key, share_key, mask_key = jax.random.split(key, 3)
        views = jax.random.permutation(order_key, num_views)[:masked_views]
        low, high = shares
        share = jax.random.uniform(share_key, (masked_views,), minval=low, maxval=high)
        numbers = jnp.minimum(jnp.floor(share * size), most).astype(jnp.int32)
        keys = jax.random.split(mask_key, masked_views)
        masks = jax.vmap(lambda key, number: block_mask(key, grid, number))(keys, numbers)
        mask_UN = masks.reshape(masked_views, size)
        which_UM = jnp.argsort(~mask_UN, axis=1, stable=True)[:, :most]
        counts_UM = jnp.arange(most)[None] < mask_UN.sum(axis=1, keepdims=True)
        return Hidden(views, mask_UN, which_UM, counts_UM.astype(jnp.float32))

    return jax.vmap(of_image)(keys_B)
