"""Frozen features of whole splits, on every host: what evaluators that learn from them begin with.

Axes: B images of a batch, N images of a split, D features.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.data import Source, read_labels
from vit_jax.errors import InputError
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import OutputFn
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch


class NothingToMeasureError(InputError):
    """There is nothing to measure on: found in what was gathered, so by every process alike."""


class Features(NamedTuple):
    """Of the images of a split that could be decoded, in the split's order.

    x_ND: float32 features; label_N: int32; id_N: int32 record ids.
    """

    x_ND: np.ndarray
    label_N: np.ndarray
    id_N: np.ndarray


class FeatureGatherer:
    """Computes features on the devices, batch by batch, and gathers them on every process.

    Args:
      features_fn: (state, uint8 images (B, H, W, 3)) -> (B, D).
      gathered: the sharding by which every process holds the whole of an array.
    """

    def __init__(self, features_fn: OutputFn, gathered: jax.sharding.Sharding):
        def compute(state, batch):
            x_BD = features_fn(state, batch["image"]).astype(jnp.float32)
            return x_BD, batch["label"], batch["id"], batch["mask"]

        self._compute = jax.jit(compute, out_shardings=gathered)

    def __call__(self, state: TrainState, batches: Iterable[Batch], split_key: str) -> Features:
        """The features of the images of `batches` that could be decoded.

        Raises:
          NothingToMeasureError: naming `split_key`, the split's key, if there are none.
        """
        parts = []
        for x_BD, label_B, id_B, mask_B in fetch(self._compute(state, b) for b in batches):
            kept = mask_B > 0
            parts.append((x_BD[kept], label_B[kept], id_B[kept]))
        need_images(sum(len(ids) for _, _, ids in parts), split_key)
        return Features(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def need_images(number: int, split_key: str) -> None:
    """Raises NothingToMeasureError if a split has no images to learn from or to measure on."""
    if number == 0:
        raise NothingToMeasureError(
            f"{split_key}: none of the images that the evaluation needs of it can be read; "
            "the warnings above name the records: repair them, or choose another split"
        )


def gather_by_record(read: Callable[[int, int], np.ndarray], num_examples: int) -> np.ndarray:
    """int32 (num_examples,) of a whole split, of which every process reads its share.

    Args:
      read: (start, stop) -> int32 (stop - start,) of these records.
      num_examples: of the split.
    """
    share = -(-num_examples // jax.process_count())
    start = min(jax.process_index() * share, num_examples)
    mine = read(start, min(start + share, num_examples))
    mine = np.pad(mine, (0, share - len(mine)))
    return multihost_utils.process_allgather(mine, tiled=True)[:num_examples]


def gather_labels(source: Source) -> np.ndarray:
    """The labels of a whole split, int32 (n,); -1 where one cannot be read."""

    def read(start, stop):
        return read_labels(source, start, stop)

    return gather_by_record(read, source.num_examples)
