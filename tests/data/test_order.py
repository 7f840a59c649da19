"""Orders are a permutation per epoch and a pure function of (seed, position)."""

import itertools
import types

import jax
import numpy as np
import pytest

from vit_jax.data import order
from vit_jax.data.host_tf import tf


def record_ids(first, stop, num_records, seed=0):
    return at(order.record_order(num_records, seed), first, stop)


def at(data_order, first, stop):
    return data_order(tf.range(first, stop, dtype=tf.int64)).numpy()


def epoch_of(data_order, num_records, epoch):
    return at(data_order, epoch * num_records, (epoch + 1) * num_records)


def test_spread_records_reach_over_the_whole_split():
    assert order.spread(4, 10).tolist() == [0, 2, 5, 7]
    assert order.spread(8, 3).tolist() == [0, 1, 2]


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


# n, C, V, W: C that divides nothing, n < C, n < W, V = 1, V = W, n a multiple of all, n = 1.
CHUNKS = [
    (1000, 97, 4, 64), (500, 64, 8, 32), (100, 128, 4, 16), (10, 4, 4, 64), (1437, 64, 1, 64),
    (360, 7, 32, 32), (512, 64, 8, 64), (1, 1, 1, 8), (65, 64, 2, 6), (997, 1, 16, 48),
    (127, 64, 8, 8), (30, 64, 30, 30),
]  # fmt: skip


@pytest.mark.parametrize(("n", "chunk_size", "streams", "cycle"), CHUNKS)
def test_every_epoch_of_chunks_is_a_permutation(n, chunk_size, streams, cycle):
    chunks = order.chunk_order(n, 3, chunk_size=chunk_size, streams=streams, cycle=cycle)
    for epoch in (0, 1, 2, 7, 10**12):
        np.testing.assert_array_equal(np.sort(epoch_of(chunks, n, epoch)), np.arange(n))


def test_random_chunk_orders_are_permutations():
    random = np.random.default_rng(0)
    for _ in range(60):
        n, chunk_size, streams, per_cycle = random.integers(1, [700, 100, 20, 9]).tolist()
        how = {"chunk_size": chunk_size, "streams": streams, "cycle": streams * per_cycle}
        chunks, epoch = order.chunk_order(n, 0, **how), int(random.integers(10**6))
        ids = epoch_of(chunks, n, epoch)
        np.testing.assert_array_equal(np.sort(ids), np.arange(n), str((n, how, epoch)))


def chunks_one_by_one(n, chunk_size, streams, cycle, epoch, chunk_slots):
    """What chunk_order says in words, record by record; `chunk_slots` is its row of chunks."""
    row = np.concatenate([np.arange(n)[c * chunk_size :][:chunk_size] for c in chunk_slots])
    stream_of = [p % cycle * streams // cycle for p in range(epoch * n, (epoch + 1) * n)]
    bounds = np.cumsum([0] + [stream_of.count(v) for v in range(streams)])
    parts = [iter(row[a:b]) for a, b in itertools.pairwise(bounds)]
    return [next(parts[v]) for v in stream_of]


@pytest.mark.parametrize(("n", "chunk_size", "streams", "cycle"), CHUNKS[:2] + CHUNKS[5:6])
@pytest.mark.parametrize("epoch", [0, 5])
def test_streams_read_their_parts_of_the_row_of_chunks(n, chunk_size, streams, cycle, epoch):
    how = {"chunk_size": chunk_size, "streams": streams, "cycle": cycle}
    # One stream gives the row of chunks itself.
    row = epoch_of(order.chunk_order(n, 3, chunk_size=chunk_size, streams=1, cycle=1), n, epoch)
    slots = list(dict.fromkeys((row // chunk_size).tolist()))
    np.testing.assert_array_equal(
        epoch_of(order.chunk_order(n, 3, **how), n, epoch),
        chunks_one_by_one(n, **how, epoch=epoch, chunk_slots=slots),
    )


def test_chunks_are_read_whole_and_in_another_order_each_epoch():
    chunks = order.chunk_order(1000, 0, chunk_size=64, streams=1, cycle=1)
    slots = []
    for epoch in range(40):
        ids = epoch_of(chunks, 1000, epoch)
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
        assert np.all(ids[starts] % 64 == 0)
        slots.append(ids[starts] // 64)
        assert np.diff([*starts, 1000]).sum() == 1000
    assert len({tuple(slot) for slot in slots}) == 40
    where_the_tail_is = [1000 - 40 in epoch_of(chunks, 1000, e)[:500] for e in range(40)]
    assert 8 < sum(where_the_tail_is) < 32


def test_a_row_of_a_batch_reads_records_in_succession():
    chunks = order.chunk_order(10_000, 0, chunk_size=64, streams=8, cycle=128)
    batch = at(chunks, 640, 768).reshape(8, 16)
    assert np.mean(np.diff(batch, axis=1) == 1) > 0.95  # but where a chunk ends
    assert len(set(batch[:, 0] // 64)) == 8


def test_chunks_depend_on_the_position_only_however_far():
    chunks = order.chunk_order(10**9 + 7, 0, chunk_size=64, streams=8, cycle=128)
    far = 2**55
    np.testing.assert_array_equal(at(chunks, far, far + 100)[50:], at(chunks, far + 50, far + 100))
    assert chunks(tf.constant([far], tf.int64)).dtype == tf.int64


def brute_mixture(sizes, weights, count):
    """(data set, its own position) of each position, by walking."""
    units = order.weight_units(weights)

    def deal(positions, left):
        if len(left) == 1:
            return [(len(units) - 1, q) for q in positions]
        chosen = [(q + 1) * left[0] // sum(left) > q * left[0] // sum(left) for q in positions]
        rest = iter(deal(range(len(chosen) - sum(chosen)), left[1:]))
        own = iter(range(len(chosen)))
        first = len(units) - len(left)
        return [(first, next(own)) if mine else next(rest) for mine in chosen]

    return deal(range(count), units)


@pytest.mark.parametrize("weights", [[0.3], [1 / 3], [0.999], [0.25, 0.25, 0.1], [0.5, 0.2]])
def test_mixture_deals_as_by_hand(weights):
    sizes = [50, 7, 20, 11][: len(weights) + 1]
    in_order = [lambda positions, n=n: positions % n for n in sizes]
    mixed = at(order.mixed_order(in_order, sizes, weights), 0, 500)
    first_ids = np.cumsum([0, *sizes])
    expected = [first_ids[i] + q % sizes[i] for i, q in brute_mixture(sizes, weights, 500)]
    np.testing.assert_array_equal(mixed, expected)


@pytest.mark.parametrize("block", [1, 8, 12])
def test_each_set_of_a_mixture_sees_its_own_positions_without_a_gap(block):
    weights, far = [0.3, 0.123], 10**6 * block

    def own(positions):
        return positions  # large ids, one data set far from the other

    mixed = order.mixed_order([own] * 3, [2**40] * 3, weights, block=block)
    for i, weight in enumerate([1 - sum(weights), *weights]):
        for first, count in ((0, 50 * block), (far, 20 * block)):
            ids = at(mixed, first, first + count)
            mine = ids[ids // 2**40 == i] % 2**40
            np.testing.assert_array_equal(mine, mine[:1].sum() + np.arange(len(mine)))
            assert abs(mine[0] - weight * first) < 3 + block + first * 2**-19
            assert abs(len(mine) - weight * count) < 3 + block


def test_a_block_gives_its_first_rows_to_the_first_set():
    halves = order.mixed_order([lambda p: p] * 2, [1000, 1000], [0.25], block=8)
    np.testing.assert_array_equal(
        at(halves, 8, 24), [6, 7, 8, 9, 10, 11, 1002, 1003, 12, 13, 14, 15, 16, 17, 1004, 1005]
    )


@pytest.mark.parametrize("name", order.ORDERS)
def test_repeats_stand_side_by_side(name):
    how = {"chunk_size": 16, "streams": 2}
    once = order.make_order(name, [100], 0, global_batch_size=8, **how)
    thrice = order.make_order(name, [100], 0, global_batch_size=24, repeats=3, **how)
    np.testing.assert_array_equal(at(thrice, 0, 600), np.repeat(at(once, 0, 200), 3))


def test_what_is_left_to_the_data_set_is_filled_in():
    def resolve(name, streams, n, batch, repeats=1):
        how = {"global_batch_size": batch, "repeats": repeats}
        return order.resolve_order(name, streams, num_examples=n, **how)

    assert resolve(None, None, 99_999_999, 4096) == ("record", None)
    assert resolve(None, None, 100_000_000, 4096) == ("chunk", 256)
    assert resolve("record", None, 10**9, 4096) == ("record", None)
    assert resolve("chunk", 12, 10, 24) == ("chunk", 12)
    assert resolve(None, 12, 10, 24) == ("record", None)
    assert resolve(None, 12, 10**9, 24) == ("chunk", 12)
    for batch, repeats, streams in [
        (1024, 1, 128),
        (1024, 4, 32),
        (96, 1, 8),
        (7, 1, 1),
        (1000, 1, 8),
    ]:
        assert resolve("chunk", None, 10, batch, repeats) == ("chunk", streams)


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
