"""Position embeddings of the patch tokens."""

import numpy as np

POS_EMBEDS = ("learned_1d", "sincos_2d", "none")


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """Fixed sine-cosine embedding of a grid's positions, in raster order.

    For the column x and the row y of a patch: [sin(x w), cos(x w), sin(y w), cos(y w)] with the
    width/4 frequencies w_i = 10000^(-i / (width/4 - 1)).

    Shapes: -> (grid[0] * grid[1], width), float32; 4 divides the width, which is at least 8.
    Source: Beyer et al. 2022 (arXiv:2205.01580), after Chen et al. 2021 (arXiv:2104.02057).
    """
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    x = columns.reshape(-1, 1) * frequencies
    y = rows.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)
