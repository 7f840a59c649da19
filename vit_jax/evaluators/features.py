"""Frozen features of whole splits, gathered on every host, for evaluators that learn from them.

Axes: B images of a batch, N images of a split, D features.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.base.errors import SharedInputError
from vit_jax.base.tree import Batch
from vit_jax.config import Evaluator, key
from vit_jax.data import Source, read_labels
from vit_jax.evaluators.inputs import EvalInputs, fetch
from vit_jax.experiment.state import TrainState

_STD_FLOOR = 1e-5  # of a feature that hardly varies


class NothingToMeasureError(SharedInputError):
    """There is nothing to measure on; follows from gathered data, so every process raises it."""


class Features(NamedTuple):
    """Features of the decodable images of a split, in the split's order.

    x_ND: float32 features; label_N: int32; id_N: int32 record ids.
    """

    x_ND: np.ndarray
    label_N: np.ndarray
    id_N: np.ndarray


class FeatureEvaluator(Evaluator):
    """An evaluator that learns the classes of one split from features, and tests on another.

    The classes may differ from those trained on.
    """

    train_split: str = key(..., "split to learn from; every host holds its features")
    test_split: str = key(..., "split to test on")

    learns_classes = True
    output = "features"


# (state, key of a split, ids of its records or None for all) -> Features.
Gather = Callable[..., Features]


def make_gather(inputs: EvalInputs, method: str = "features") -> Gather:
    """gather(state, split_key, record_ids=None) -> `Features`, the outputs of the model's `method`.

    The devices compute them batch by batch; every process gathers all. If no image of the split can
    be read, `gather` raises a NothingToMeasureError that names `split_key`.
    """

    @inputs.jit
    def compute(
        state: TrainState, batch: Batch
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        x_BD = inputs.apply(state, batch["image"], method).astype(jnp.float32)
        return x_BD, batch["label"], batch["id"], batch["mask"]

    def gather(state: TrainState, split_key: str, record_ids: np.ndarray | None = None) -> Features:
        parts = []
        batches = inputs.batches(split_key, record_ids)
        for x_BD, label_B, id_B, mask_B in fetch(compute(state, batch) for batch in batches):
            kept = mask_B > 0
            parts.append((x_BD[kept], label_B[kept], id_B[kept]))
        need_images(sum(len(ids) for _, _, ids in parts), split_key)
        return Features(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    return gather


def fit_whitening(x_ND: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Shifts and scales features so that `x_ND` gets mean 0 and standard deviation 1.

    The function returned maps (M, D) to float64 (M, D).
    """
    mean_D = x_ND.mean(axis=0, dtype=np.float64)
    std_D = x_ND.std(axis=0, dtype=np.float64) + _STD_FLOOR

    def whiten(x_MD: np.ndarray) -> np.ndarray:
        return (x_MD - mean_D) / std_D

    return whiten


def principal_components(rows: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The first principal components of `rows` and their shares of the variance.

    Shapes: (n, d), number -> (k, d), (k,); k is `number`, or fewer where the rows span fewer
    directions. Each component has length 1; its value of largest magnitude is positive.
    """
    centred = np.asarray(rows, np.float64)
    centred = centred - centred.mean(axis=0, keepdims=True)
    _, sizes, components = np.linalg.svd(centred, full_matrices=False)
    variance = np.square(sizes)
    spanned = int((sizes > sizes[0] * max(rows.shape) * np.finfo(np.float32).eps).sum())
    kept = slice(0, min(number, spanned))
    components = components[kept]
    peaks = np.take_along_axis(components, np.abs(components).argmax(1, keepdims=True), axis=1)
    return components * np.sign(peaks), variance[kept] / max(variance.sum(), 1e-30)


def need_images(number: int, split_key: str) -> None:
    """Raise NothingToMeasureError if `number`, the count of usable images of a split, is 0."""
    if number == 0:
        raise NothingToMeasureError(
            f"{split_key}: none of the images needed for the evaluation can be read; the warnings "
            "above name the records: repair them, or choose another split"
        )


def gather_by_record(read: Callable[[int, int], np.ndarray], num_examples: int) -> np.ndarray:
    """int32 (num_examples,) for a whole split; every process reads its share.

    Args:
      read: (start, stop) -> int32 (stop - start,) for these records.
      num_examples: size of the split.
    """
    share = -(-num_examples // jax.process_count())
    start = min(jax.process_index() * share, num_examples)
    mine = read(start, min(start + share, num_examples))
    mine = np.pad(mine, (0, share - len(mine)))
    return multihost_utils.process_allgather(mine, tiled=True)[:num_examples]


def gather_labels(source: Source) -> np.ndarray:
    """Labels of a whole split, int32 (n,); -1 for labels that cannot be read."""
    return gather_by_record(functools.partial(read_labels, source), source.num_examples)
