"""The order of data is a permutation per epoch and a pure function of (seed, position)."""

import types

import jax
import numpy as np
import pytest

from vit_jax.data import order
from vit_jax.data.host_tf import tf


def record_ids(first, stop, num_records, seed=0):
    return order.record_ids(tf.range(first, stop, dtype=tf.int64), num_records, seed).numpy()


@pytest.mark.parametrize("num_records", [1, 2, 3, 360, 1437])
def test_every_epoch_is_a_permutation(num_records):
    for epoch in (0, 1, 10**9):
        ids = record_ids(epoch * num_records, (epoch + 1) * num_records, num_records)
        np.testing.assert_array_equal(np.sort(ids), np.arange(num_records))


def test_epochs_and_seeds_are_uncorrelated():
    orders = [record_ids(epoch * 5000, (epoch + 1) * 5000, 5000) for epoch in range(8)]
    orders += [record_ids(0, 5000, 5000, seed) for seed in (1, 2, 2**32 - 1)]
    correlation = np.corrcoef([np.arange(5000), *orders])
    assert np.abs(correlation - np.eye(len(correlation))).max() < 0.06  # 4 standard errors


def test_record_depends_on_its_own_position_only():
    np.testing.assert_array_equal(record_ids(0, 100, 37)[50:60], record_ids(50, 60, 37))


def test_keys_are_distinct():
    keys = [
        tuple(order.fold_in(key, index).numpy())
        for seed in (0, 1, 2**32 - 1)
        for key in order.keys(tf.constant([0, 1, 2**40], tf.int64), seed)
        for index in (0, 1, 2)
    ]
    assert len(set(keys)) == 27


def test_local_rows_are_all_rows_of_a_process_that_owns_all_devices():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    np.testing.assert_array_equal(order.local_rows(sharding, 12), np.arange(12))


def test_local_rows_are_sorted_and_listed_once():
    by_device = {0: (slice(6, 9),), 1: (slice(0, 3),), 2: (slice(6, 9),), 3: (slice(0, 3),)}
    sharding = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: by_device)
    np.testing.assert_array_equal(order.local_rows(sharding, 12), [0, 1, 2, 6, 7, 8])
