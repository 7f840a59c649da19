"""Tables of small images, written as PNG files during training.

Axes: K rows, M columns, H height, W width, C channels.
"""

import io
from collections.abc import Iterable

import numpy as np
from einops import rearrange
from PIL import Image

from vit_jax.base.files import write_whole
from vit_jax.evaluators.inputs import EvalInputs

_SMALLEST_SIDE, _GAP = 96, 4  # pixels of the table; small images are enlarged


def as_table(images_KMHWC: np.ndarray) -> Image.Image:
    """The uint8 images as a table with K rows of M images, with white lines between them."""
    *_, height, width, channels = images_KMHWC.shape
    scale = max(1, -(-_SMALLEST_SIDE // min(height, width)))
    large = images_KMHWC.repeat(scale, axis=2).repeat(scale, axis=3)
    large = np.pad(large, [(0, 0), (0, 0), (_GAP, 0), (_GAP, 0), (0, 0)], constant_values=255)
    table = rearrange(large, "k m h w c -> (k h) (m w) c")
    table = np.pad(table, [(0, _GAP), (0, _GAP), (0, 0)], constant_values=255)
    return Image.fromarray(table if channels in (3, 4) else table[:, :, 0])


def on_canvas(rows: Iterable[Iterable[np.ndarray]]) -> np.ndarray:
    """K rows of M uint8 images (h, w, C) as (K, M, H, W, C); smaller ones have white around."""
    rows = [[*row] for row in rows]
    height, width = np.max([image.shape[:2] for row in rows for image in row], axis=0)

    def pad(image: np.ndarray) -> np.ndarray:
        free = (0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)
        return np.pad(image, free, constant_values=255)

    return np.array([[pad(image) for image in row] for row in rows])


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
        """Write `as_table` of `on_canvas`, whole or not at all, for the step that began."""
        assert self._folder is not None
        content = io.BytesIO()
        as_table(on_canvas(rows)).save(content, "png")
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{self._name}_{self._step:08d}.png", content.getvalue())
