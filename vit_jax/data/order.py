"""The order of data: a pure function of (seed, position).

A position is the place of an example in the endless training stream: row j of step s of a run
with global batch size B has position s * B + j. What stands there depends on the seed and on the
position alone, never on the number of hosts, on threads or on what was read before. So a run
resumes at any step, on any number of hosts, with the same bytes and without reading ahead.

Positions are int64 tensors.
"""

from __future__ import annotations

import jax
import numpy as np

from vit_jax.data.host_tf import tf

_SHUFFLE_ROUNDS = 16  # with 4, TensorFlow's default, successive epochs correlate by 0.65


def record_ids(positions: tf.Tensor, num_records: int, seed: int) -> tf.Tensor:
    """Which record stands at each position: every epoch is a permutation of its own.

    Args:
      positions: int64 (b,).
      num_records: size of the split; epoch = position // num_records.
      seed: 0 <= seed < 2**32.

    Returns:
      int64 (b,), each in [0, num_records).
    """
    epochs = positions // num_records
    seeds = tf.stack([tf.fill(tf.shape(epochs), tf.cast(seed, tf.int64)), epochs, 0 * epochs], -1)
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % num_records,
        seed=seeds,
        max_index=tf.cast(num_records - 1, tf.int64),
        rounds=_SHUFFLE_ROUNDS,
    )


def keys(positions: tf.Tensor, seed: int) -> tf.Tensor:
    """Seeds for TensorFlow's stateless ops, one a position: the pair (seed, position) itself.

    The ops hash the pair, so it need not look random; as a pair, no two can be equal.

    Args:
      positions: int64 (b,).
      seed: 0 <= seed < 2**32.

    Returns:
      int64 (b, 2).
    """
    return tf.stack([tf.fill(tf.shape(positions), tf.cast(seed, tf.int64)), positions], -1)


def fold_in(key: tf.Tensor, index: int) -> tf.Tensor:
    """The key of the `index`-th op at one position: int64 (2,) -> (2,).

    The seed fills the low 32 bits of the pair's first number and the index the bits above, so
    here too no two keys are equal.
    """
    return key + tf.constant([index << 32, 0], tf.int64)


def local_rows(sharding: jax.sharding.Sharding, global_batch_size: int) -> np.ndarray:
    """Rows of the global batch that this process's devices hold: int64 (b,), sorted.

    Devices along a tensor axis hold the same rows; each row is listed once.

    Args:
      sharding: of a batch's leaves; its first dimension is the batch.
      global_batch_size: B.
    """
    indices = sharding.addressable_devices_indices_map((global_batch_size,)).values()
    rows = [np.arange(global_batch_size)[rows] for (rows,) in indices]
    return np.unique(np.concatenate(rows))
