"""Tables of small images, written as PNG files during training.

Axes: K rows, M columns, H height, W width, C channels.
"""

import io
from collections.abc import Iterable

import numpy as np
from PIL import Image

from vit_jax.base.files import write_whole
from vit_jax.evaluators.inputs import EvalInputs

_SMALLEST_SIDE, _LARGEST_SIDE = 96, 1024  # pixels of an image in the table
_GAP = 4


def as_table(rows: Iterable[Iterable[np.ndarray]]) -> Image.Image:
    """K rows of M uint8 images (H, W, C) as a table with white lines between them.

    A row is as high as its highest image, and a column as wide as its widest. Small images are
    enlarged, all by one factor.
    """
    tiles = [[_as_tile(image) for image in row] for row in rows]
    heights = [max(tile.height for tile in row) for row in tiles]
    widths = [max(tile.width for tile in column) for column in zip(*tiles, strict=True)]
    sides = max(heights), max(widths)
    scale = max(1, min(-(-_SMALLEST_SIDE // min(sides)), _LARGEST_SIDE // max(sides)))
    y, x = (np.cumsum([_GAP, *(scale * n + _GAP for n in sizes)]) for sizes in (heights, widths))
    table = Image.new(tiles[0][0].mode, (int(x[-1]), int(y[-1])), "white")
    for top, row in zip(y, tiles, strict=False):
        for left, tile in zip(x, row, strict=False):
            size = scale * tile.width, scale * tile.height
            table.paste(tile.resize(size, Image.Resampling.NEAREST), (int(left), int(top)))
    return table


def _as_tile(image_HWC: np.ndarray) -> Image.Image:
    """An image of 3 or 4 channels, or the first of other numbers; large ones are made smaller."""
    tile = Image.fromarray(image_HWC if image_HWC.shape[2] in (3, 4) else image_HWC[:, :, 0])
    tile.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
    return tile


class TableWriter:
    """Writes WORKDIR/FOLDER/NAME_STEP.png once a step, of the weights evaluated first."""

    def __init__(self, inputs: EvalInputs, folder: str):
        self._folder = inputs.folder and inputs.folder / folder
        self._name, self._step = inputs.name, -1

    def begin(self, step: int) -> bool:
        """Whether to write a table of `step`: there is a workdir, and it is the first call."""
        is_first, self._step = step != self._step, step
        return is_first and self._folder is not None

    def write(self, rows: Iterable[Iterable[np.ndarray]]) -> None:
        """Write `as_table` of the images, whole or not at all, for the step that began."""
        assert self._folder is not None
        content = io.BytesIO()
        as_table(rows).save(content, "png")
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{self._name}_{self._step:08d}.png", content.getvalue())
