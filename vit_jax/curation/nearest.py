"""The records of a data set that are most like another set, by their features.

Source: Oquab et al. 2023 (arXiv:2304.07193), section 3, retrieval by samples.
Axes: N records, M targets, D features, K neighbours.
"""

from __future__ import annotations

import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.curation.features import Features

_SIMILARITIES_AT_ONCE = 1 << 24  # 64 MiB of float32


def find_nearest(features: Features, targets: Features, number: int) -> np.ndarray:
    """The sorted ids of the records among the `number` most similar of any target.

    Raises: InputError if no target has features.
    """
    y_MD = np.concatenate([y_MD for _, y_MD in targets.read()])
    if not len(y_MD):
        raise InputError("--near: none of its pictures could be read; choose another set")
    best_MK = np.full((len(y_MD), number), -np.inf, np.float32)
    id_MK = np.full((len(y_MD), number), -1)
    rows = max(_SIMILARITIES_AT_ONCE // len(y_MD), 1)
    for ids, x_ND in features.read():
        for first in range(0, len(ids), rows):
            some = slice(first, first + rows)
            best = np.concatenate([best_MK, y_MD @ x_ND[some].T], axis=1)
            found = np.concatenate([id_MK, np.tile(ids[some], (len(y_MD), 1))], axis=1)
            kept = np.argpartition(-best, number - 1, axis=1)[:, :number]
            best_MK, id_MK = (np.take_along_axis(x, kept, axis=1) for x in (best, found))
    return np.unique(id_MK[id_MK >= 0])
