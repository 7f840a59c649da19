"""From a source to global batches on the devices.

    positions -> record ids and keys -> read -> host ops -> local batches -> global jax.Arrays
    (order.py)            (loading.py: a Source, tf.data)   (NumPy)

A batch is a dict of arrays; B is the global batch size, b the number of this process's rows:

    image  uint8 (B, H, W, 3), or `Pictures` in their own shape, with their `grid` on the host;
           left out where a batch has only views (preprocessing.py)
    label  int32 (B,)     meaningless where mask is 0
    mask   float32 (B,)   0 for padding in evaluation and for corrupt records
    id     int32 (B,)     the record's index in its split; -1 for padding

and in training, if captions are read (captions.py),

    text       int32 (B, T)   token ids
    text_mask  float32 (B,)   0 for records without a usable caption

or, if features of the images are kept, instead of `image`

    features   float16 (B, D)
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.base import tree
from vit_jax.base.pictures import Pictures
from vit_jax.data import order
from vit_jax.data.batch import BatchSpec
from vit_jax.data.captions import with_texts
from vit_jax.data.contract import Source
from vit_jax.data.host_tf import tf
from vit_jax.data.loading import Batch, local_batches

_BATCHES_IN_FLIGHT = 2


def train_batches(
    source: Source,
    spec: BatchSpec,
    *,
    steps: range,
    seed: int,
    sharding: jax.sharding.Sharding,
    **options: Any,
) -> Generator[tree.Batch, None, None]:
    """Global batches of `steps`; see `host_batches`, also for `options`.

    `sharding` applies to every leaf; it splits the first dimension over the mesh's batch axes.
    """
    rows = order.local_rows(sharding, spec.size)
    batches = host_batches(source, spec, steps=steps, seed=seed, rows=rows, **options)
    return _put_ahead(batches, len(steps), sharding, spec.size)


def eval_batches(
    source: Source,
    spec: BatchSpec,
    *,
    sharding: jax.sharding.Sharding,
    record_ids: np.ndarray | None = None,
    **options: Any,
) -> Generator[tree.Batch, None, None]:
    """Global batches of one pass over the split; see `host_eval_batches`."""
    rows = order.local_rows(sharding, spec.size)
    batches = host_eval_batches(source, spec, rows=rows, record_ids=record_ids, **options)
    num_records = source.num_examples if record_ids is None else len(record_ids)
    return _put_ahead(batches, math.ceil(num_records / spec.size), sharding, spec.size)


def host_batches(
    source: Source,
    spec: BatchSpec,
    *,
    steps: range,
    seed: int,
    rows: np.ndarray,
    data_order: order.Order | None = None,
    firsts: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """The rows `rows` of each training batch of `steps`, in NumPy.

    The contents of a row depend only on (seed, step, row), not on `rows` or the first step. No
    earlier batch is read to reach the first step. `data_order` None means `record`. `firsts` are
    the positions of the first image of each step; None: all steps before have as many rows.

    Raises: InputError, before the first batch, if the ops do not give images of their size.
    """
    if firsts is None:
        firsts = range(steps.start * spec.size, steps.stop * spec.size, spec.size)
    local_rows, of_steps = tf.constant(rows, tf.int64), tf.constant(firsts, tf.int64)
    data_order = data_order or order.record_order(source.num_examples, seed)

    rule = spec.crops["image"].rule if "image" in spec.crops else None
    pack = rule.pack if rule is not None else ()

    def turned(positions: Any) -> Any:
        if not pack:
            return positions
        return order.turn_rows(tf.convert_to_tensor(positions), len(pack), seed)

    def arrange(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        positions = turned(of_steps[step - steps.start] + local_rows)
        return data_order(positions), order.keys(positions, seed)

    batches = local_batches(source, spec.crops, steps, arrange, len(rows))
    if spec.features is not None:
        batches = _with_features(batches, source)
    positions = (np.asarray(turned(first + rows)) for first in firsts)
    return batches if spec.text is None else with_texts(batches, source, positions, seed)


def _with_features(batches: Iterator[Batch], source: Source) -> Iterator[Batch]:
    """`batches` with the features that `source` keeps; rows without any have mask 0."""
    assert source.features is not None  # `kept_features` has computed them
    for batch in batches:
        x_BD = source.features[batch["id"]]
        known_B = np.isfinite(x_BD).all(axis=1)
        x_BD = np.where(known_B[:, None], x_BD, 0)
        yield batch | {"features": x_BD, "mask": batch["mask"] * known_B}


def host_eval_batches(
    source: Source,
    spec: BatchSpec,
    *,
    rows: np.ndarray,
    record_ids: np.ndarray | None = None,
    refuse_small: bool = False,
) -> Iterator[Batch]:
    """The rows `rows` of each batch of one pass over the split, in order, in NumPy.

    `record_ids`, int64 (n,), selects the records to read and their order; None reads all.

    Over all rows, every example comes once. Padding fills the last batch, so the number of batches
    is the same on every process.

    Raises: InputError, before the first batch, if the ops do not give images of their size; with
      `refuse_small` also at the first image smaller than a crop; otherwise such images are masked.
    """
    local_rows = tf.constant(rows, tf.int64)
    num_records = source.num_examples if record_ids is None else len(record_ids)
    chosen = None if record_ids is None else tf.constant(record_ids, tf.int64)

    def arrange(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        positions = ids = step * spec.size + local_rows
        if chosen is not None:
            ids = tf.gather(chosen, positions % num_records)
        return tf.where(positions < num_records, ids, -1), order.keys(positions, seed=0)

    steps = range(math.ceil(num_records / spec.size))
    refused = spec.crops["image"].key if refuse_small else None
    return local_batches(source, spec.crops, steps, arrange, len(rows), refused)


def to_global(batch: Batch, sharding: jax.sharding.Sharding, global_batch_size: int) -> tree.Batch:
    """Make global arrays from this process's rows, which `order.local_rows` lists.

    Args:
      batch: leaves (b, ...).
      sharding: sharding of each global leaf.
      global_batch_size: B, the first dimension of each global leaf.
    """
    arrays: dict[str, Any] = {
        key: jax.make_array_from_process_local_data(
            sharding, leaf, (global_batch_size, *leaf.shape[1:])
        )
        for key, leaf in batch.items()
    }
    if "grid" in arrays:
        arrays["image"] = Pictures(arrays["image"], arrays.pop("grid"))
    return arrays


def _put_ahead(
    batches: Iterator[Batch],
    num_steps: int,
    sharding: jax.sharding.Sharding,
    global_batch_size: int,
) -> Generator[tree.Batch, None, None]:
    """`num_steps` global batches; the next ones are transferred to the devices while one is used.

    It requests no batch after the last one: that would wait for tf.data's threads to end while
    steps are still to run.
    """
    arrays = (to_global(batch, sharding, global_batch_size) for batch in batches)
    ahead = collections.deque(itertools.islice(arrays, min(_BATCHES_IN_FLIGHT, num_steps)))
    for step in range(num_steps):
        yield ahead.popleft()
        if step + len(ahead) + 1 < num_steps:
            ahead.append(next(arrays))
