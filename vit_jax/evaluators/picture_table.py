"""Tables of small images as PNG files.

Axes: K rows, M columns, H height, W width, C channels.
"""

import io

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.errors import collect_faults
from vit_jax.files import write_whole

_SMALLEST_SIDE, _GAP = 96, 4  # pixels of the picture; small images are enlarged


def as_picture(images_KMHWC: np.ndarray) -> Image.Image:
    """The uint8 images as a table with K rows of M images, with white lines between them."""
    rows, columns, height, width, channels = images_KMHWC.shape
    scale = max(1, -(-_SMALLEST_SIDE // min(height, width)))
    cell = np.array([height, width]) * scale + _GAP
    table = np.full((rows * cell[0] + _GAP, columns * cell[1] + _GAP, channels), 255, np.uint8)
    for row in range(rows):
        for column in range(columns):
            large = images_KMHWC[row, column].repeat(scale, axis=0).repeat(scale, axis=1)
            top, left = row * cell[0] + _GAP, column * cell[1] + _GAP
            table[top : top + large.shape[0], left : left + large.shape[1]] = large
    return Image.fromarray(table if channels in (3, 4) else table[:, :, 0])


def write_picture(path: epath.Path, images_KMHWC: np.ndarray) -> None:
    """Write `as_picture` of the images to `path`, whole or not at all; makes its folder."""
    content = io.BytesIO()
    as_picture(images_KMHWC).save(content, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())


def check_num_pictures(num_pictures: int, least: int = 0) -> None:
    """Raise InputError, naming the key, if it is below `least`, 0 or 1."""
    if num_pictures < least:
        needed = "at least 1" if least else "at least 0, which draws none"
        collect_faults([f"num_pictures={num_pictures}: must be {needed}"])
