"""Pictures in their own shape: the grid of patches of each, cut out on the host.

The rule and the pixels are NaFlex's, of SigLIP 2: a picture gets the largest scale by which its
grid has at most N patches, and each side is stretched to whole patches.

Source: Tschannen et al. 2025 (arXiv:2502.14786), section 2.4.2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from vit_jax.base.pictures import Images, Pictures
from vit_jax.data import order
from vit_jax.data.host_tf import tf
from vit_jax.data.resizing import resize_as_pillow

_LARGEST_SCALE = 100  # at most so many times the pixels of a picture's side


class PatchRule(NamedTuple):
    """How a picture becomes patches.

    patch_size: (height, width) in pixels.
    most: N, the largest number of patches, and the length of the array.
    pack: the largest numbers of the pictures of a row, `data.pack`; (): all have N.
    """

    patch_size: tuple[int, int]
    most: int
    pack: tuple[int, ...] = ()

    def most_at(self, key: tf.Tensor) -> tf.Tensor:
        """The largest number of patches of the picture with the random key (seed, position)."""
        if not self.pack:
            return tf.constant(self.most, tf.int64)
        place = order.place_in_row(key[1], len(self.pack), key[0])
        return tf.gather(tf.constant(self.pack, tf.int64), place)

    def grid_of(self, sides: tf.Tensor, most: tf.Tensor | int | None = None) -> tf.Tensor:
        """Rows and columns of the patches of a picture of `sides` (height, width): int32 (2,).

        It has at most `most` patches; None: N.

        The scale s grows until ceil(height s / p) ceil(width s / q) would exceed N. It stops where
        one side is whole patches, so that the candidates are k rows or k columns for k up to N.
        """
        sides = tf.cast(sides, tf.int64)
        patch = tf.constant(self.patch_size, tf.int64)
        most = tf.cast(self.most if most is None else most, tf.int64)
        k = tf.range(1, most + 1)
        found = []
        for axis in (0, 1):  # s makes whole patches where s = k patch[axis] / sides[axis]
            other = -(-(sides[1 - axis] * patch[axis] * k) // (sides[axis] * patch[1 - axis]))
            number = tf.reduce_sum(tf.cast(k * other <= most, tf.int64))
            pair = tf.stack([number, other[tf.maximum(number, 1) - 1]])
            found.append(
                (number * patch[axis] * sides[1 - axis], pair if axis == 0 else pair[::-1])
            )
        (scale, by_rows), (other_scale, by_columns) = found
        grid = tf.where(scale >= other_scale, by_rows, by_columns)
        return tf.cast(tf.minimum(grid, -(-sides * _LARGEST_SCALE // patch)), tf.int32)

    def cut(self, image: tf.Tensor, key: tf.Tensor) -> dict[str, tf.Tensor]:
        """The picture uint8 (h, w, C) as `image` uint8 (N, p, q, C) and `grid` int32 (2,).

        `key`: of the picture, see `most_at`.
        """
        (p, q), channels = self.patch_size, image.shape[-1]
        grid = self.grid_of(tf.shape(image)[:2], self.most_at(key))
        pixels = resize_as_pillow(image, grid * self.patch_size)
        cells = tf.reshape(pixels, [grid[0], p, grid[1], q, channels])
        patches = tf.reshape(tf.transpose(cells, [0, 2, 1, 3, 4]), [-1, p, q, channels])
        padding = [[0, self.most - tf.shape(patches)[0]], [0, 0], [0, 0], [0, 0]]
        patches = tf.ensure_shape(tf.pad(patches, padding), [self.most, p, q, channels])
        return {"image": patches, "grid": grid}


def mirror(images: Images, axis: int) -> Images:
    """Images (B, H, W, C), or pictures, upside down (axis 1) or left to right (axis 2)."""
    if not isinstance(images, Pictures):
        return jnp.flip(images, axis)
    (row, column), (rows, columns) = images.places, images.grid.T[:, :, None]
    at = row * columns + columns - 1 - column if axis == 2 else (rows - 1 - row) * columns + column
    at = jnp.where(row < rows, at, 0)
    patches = jnp.take_along_axis(images.patches, at[:, :, None, None, None], axis=1)
    return images._replace(patches=jnp.flip(patches, axis + 1))
