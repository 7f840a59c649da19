"""The order of data: a pure function of (seed, position).

A position numbers the examples of the endless training stream: row j of step s of a run with
global batch size B has position s * B + j; where B changes, `config.sizes` says it. The example at
a position depends only on the seed and the position, never on the number of hosts, on threads or on
earlier reads. A run therefore resumes at any step, on any number of hosts, with the same bytes and
without reading earlier records.

An order maps positions to record ids, both int64 tensors (b,). Orders are closed forms: they need
no table that grows with the data set, and position 10^15 costs as much as position 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.data.host_tf import tf

_SHUFFLE_ROUNDS = 16  # with 4, TensorFlow's default, successive epochs correlate by 0.65
_DRAWS = 2**48  # range of a random draw; its remainder mod k is a nearly uniform draw from k
_CHUNK_FROM = 100_000_000  # from this many examples on, opening a file per record costs too much
_MAX_STREAMS = 256
_CHUNK_SIZE = 64
_MIN_STRETCH = 8  # minimum of consecutive records that a stream gives to a batch
_WEIGHT_UNITS = 2**20  # weights of a mixture are multiples of 1 / _WEIGHT_UNITS

ORDERS = ("record", "chunk")

Order = Callable[["tf.Tensor"], "tf.Tensor"]  # quoted, so that TensorFlow is not imported


class Chunks(NamedTuple):
    """How to read records that are stored so that one costs as much as its neighbours together.

    size: number of records that are stored together.
    streams: number of chunks that can be read in parallel at most.
    """

    size: int
    streams: int


def resolve_order(
    name: str | None,
    streams: int | None,
    *,
    num_examples: int,
    global_batch_size: int,
    repeats: int,
    chunks: Chunks | None = None,
) -> tuple[str, int | None]:
    """The name and the number of streams of an order, with defaults that depend on the data set.

    The default order is `record` below 100 million examples, and `chunk` from there on or for data
    with `chunks`. The default number of streams of `chunk` is the largest power of two, up to 256
    or the number of `chunks`, that divides the records of a batch and leaves each stream at least 8
    consecutive records of it. `record` has no streams (None); given streams are dropped if the
    default order is `record`.

    Args:
      name: one of ORDERS, or None.
      streams: number of streams, or None.
      num_examples: number of examples, in a mixture of all its data sets.
      global_batch_size: B.
      repeats: R.
      chunks: of the data; None: each record can be read without its neighbours.
    """
    name = name or ("chunk" if chunks or num_examples >= _CHUNK_FROM else "record")
    if name == "chunk" and streams is None:
        records = global_batch_size // repeats
        most = chunks.streams if chunks else _MAX_STREAMS
        largest = min(_MAX_STREAMS, most, max(records // _MIN_STRETCH, 1))
        streams = math.gcd(records, 2 ** (largest.bit_length() - 1))
    return name, streams if name == "chunk" else None


def resolve_chunk_size(size: int | None, chunks: Chunks | None) -> int:
    """The number of records in a chunk; by default those that are stored together, or 64."""
    return size or (chunks.size if chunks else _CHUNK_SIZE)


def pair_distance(name: str, streams: int | None, *, global_batch_size: int, repeats: int) -> int:
    """Distance between two rows of a batch that are mixed with each other (device_ops.py).

    Rows that are closer hold the same record (`repeats`) or, under `chunk`, come from the same
    stream: they are neighbours in the data, would meet in every epoch and often share a class.

    Args: as for `resolve_order`; `name` and `streams` are its results.
    """
    if name == "record":
        return repeats
    assert streams is not None
    return repeats * (global_batch_size // repeats // streams)


def spread(number: int, total: int) -> np.ndarray:
    """At most `number` of `total` records, evenly spaced from the first: int64 ids."""
    number = min(number, total)
    return np.arange(number, dtype=np.int64) * total // max(number, 1)


def check_order(
    name: str | None,
    *,
    streams: int | None,
    repeats: int,
    global_batch_size: int | None,
    mixes: bool = False,
) -> None:
    """Raise InputError naming the keys if `make_order` cannot take these values.

    If `mixes`, i.e. data.ops mixes images, a batch must also consist of pairs that are
    `pair_distance` apart; a `name` of None is then checked as `record`, which requires less. Values
    that are out of their range are reported by another check.
    """
    if name == "record" and streams is not None:
        raise InputError(f"data.streams={streams}: needs data.order=chunk; leave it out")
    if min(global_batch_size or 0, repeats, 1 if streams is None else streams) < 1:
        return
    assert global_batch_size is not None
    records, rest = divmod(global_batch_size, repeats)
    if rest:
        raise InputError(f"data.repeats={repeats}: must divide the batch of {global_batch_size}")
    if streams is not None and records % streams:
        raise InputError(
            f"data.streams={streams}: must divide the {records} records of a batch; try "
            f"{math.gcd(records, streams)}, or leave it out"
        )
    if mixes and records % 2:
        raise InputError(
            f"global_batch_size={global_batch_size}: data.ops mixes pairs of images, so it needs a "
            f"multiple of 2 x data.repeats={repeats}; try {max(records // 2, 1) * 2 * repeats}"
        )
    if mixes and name == "chunk":
        _, dealt = resolve_order(
            name, streams, num_examples=0, global_batch_size=global_batch_size, repeats=repeats
        )
        if dealt is not None and dealt % 2:
            raise InputError(
                f"data.streams={dealt}: data.ops mixes images of two streams, so it needs an even "
                f"number that divides the {records} records of a batch; try {2 * dealt}"
            )


def make_order(
    name: str,
    part_sizes: Sequence[int],
    seed: int,
    *,
    global_batch_size: int,
    chunk_size: int = 64,
    streams: int | None = None,
    repeats: int = 1,
    weights: Sequence[float] = (),
) -> Order:
    """Make the order of a run.

    Args:
      name: `record` or `chunk`.
      part_sizes: number of records of each data set of a mixture, whose ids follow one another;
        one number for a single data set.
      seed: 0 <= seed < 2**32.
      global_batch_size: B.
      chunk_size: for `chunk`: number of consecutive records that are read together.
      streams: for `chunk`: number of chunks that are read in parallel; must divide B / repeats.
      repeats: number of consecutive positions that get the same record, each with its own key.
      weights: of all parts except the first, which gets the remainder to 1.

    Source of repeats: Hoffer et al. 2020 (arXiv:1901.09335).
    """
    cycle = global_batch_size // repeats
    if name == "chunk":
        assert streams is not None
        orders = [
            chunk_order(size, seed, chunk_size=chunk_size, streams=streams, cycle=cycle)
            for size in part_sizes
        ]
        block = cycle // streams
    else:
        orders, block = [record_order(size, seed) for size in part_sizes], 1
    mixed = mixed_order(orders, part_sizes, weights, block=block)
    return mixed if repeats == 1 else lambda positions: mixed(positions // repeats)


def record_order(num_records: int, seed: int) -> Order:
    """An order with a new permutation of all records in every epoch (position // num_records).

    Args:
      num_records: size of the split.
      seed: 0 <= seed < 2**32.
    """

    def order(positions: tf.Tensor) -> tf.Tensor:
        return _permuted(positions % num_records, positions // num_records, num_records, seed)

    return order


def chunk_order(num_records: int, seed: int, *, chunk_size: int, streams: int, cycle: int) -> Order:
    """An order with a new permutation of chunks in every epoch, read in parallel streams.

    Chunk k holds the consecutive records [k C, min((k + 1) C, n)). Each epoch draws a permutation
    of the full chunks and a place for the short last chunk, lays all chunks end to end, and cuts
    this row of n records into V parts, one for each stream. Of every W positions each stream gets
    W / V consecutive ones and fills them with the next records of its part. Let G(v, x) be the
    number of positions before x that belong to streams before v:

        G(v, x) = floor(x / W) v W / V + min(x mod W, v W / V)

    Let F(x) = G(v + 1, x) - G(v, x) be the number of positions before x that belong to stream v.
    In epoch e the part of stream v begins at place G(v, (e+1) n) - G(v, e n), and position p gets
    the place F(p) - F(e n) further on. This maps an epoch's positions one to one to its records,
    for all n, C, V and W. A host that prepares whole streams of a batch reads consecutive records.

    Args:
      num_records: n.
      seed: 0 <= seed < 2**32.
      chunk_size: C. A data set with n <= C is read in its own order.
      streams: V; must divide `cycle`.
      cycle: W, the number of records in a global batch.
    """
    per_cycle = cycle // streams
    num_full, tail = divmod(num_records, chunk_size)

    def before(stream: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return x // cycle * (stream * per_cycle) + tf.minimum(x % cycle, stream * per_cycle)

    def order(positions: tf.Tensor) -> tf.Tensor:
        epochs = positions // num_records
        start = epochs * num_records
        stream = positions % cycle // per_cycle
        part_start = before(stream, start + num_records) - before(stream, start)
        seen = before(stream + 1, positions) - before(stream, positions)
        seen_at_start = before(stream + 1, start) - before(stream, start)
        place = part_start + seen - seen_at_start
        if not num_full:
            return place
        draws = _permuted(0 * epochs, epochs, _DRAWS, seed, salt=1)
        tail_place = chunk_size * (draws % (num_full + 1))
        past_tail = place - tail * tf.cast(place >= tail_place + tail, tf.int64)
        in_tail = (place >= tail_place) & (place < tail_place + tail)
        slot = tf.minimum(past_tail // chunk_size, num_full - 1)  # unused inside the tail
        # Permute each chunk once: consecutive positions share it, and permuting an index of a
        # small range is slow.
        pair, which = tf.unique(epochs * num_full + slot, out_idx=tf.int64)
        chunk = tf.gather(_permuted(pair % num_full, pair // num_full, num_full, seed), which)
        return tf.where(
            in_tail,
            num_full * chunk_size + place - tail_place,
            chunk * chunk_size + past_tail % chunk_size,
        )

    return order


def mixed_order(
    orders: Sequence[Order], part_sizes: Sequence[int], weights: Sequence[float], *, block: int = 1
) -> Order:
    """An order that deals positions to several data sets by weight; each keeps its own order.

    The first data set, with weight w, gets floor(x w) of the first x positions, for every x that
    is a multiple of `block`, and within a block the first places. The same rule deals the remaining
    positions to the other data sets. Each data set thus sees its own positions 0, 1, 2, ... without
    a gap, and all its records once in each pass, whatever is mixed with it. Weights are rounded to
    multiples of 2**-20 and counted in integers.

    Args:
      orders: the order of each data set, on its own positions.
      part_sizes: number of records of each; their ids follow one another.
      weights: of all data sets except the first, which gets the remainder to 1.
      block: number of positions dealt together; more than 1 keeps stretches of records together.
    """
    units = weight_units(weights)
    first_ids = np.cumsum([0, *part_sizes])

    def order(positions: tf.Tensor) -> tf.Tensor:
        ids, undecided, left = tf.zeros_like(positions), tf.ones_like(positions, tf.bool), units
        for i, part_order in enumerate(orders):
            whole = sum(left)
            start = positions - positions % block
            got = _share(start, left[0], whole)
            gets = _share(start + block, left[0], whole) - got
            chosen = undecided & (positions % block < gets)
            own_position = tf.where(chosen, got + positions % block, 0)
            ids = tf.where(chosen, first_ids[i] + part_order(own_position), ids)
            undecided &= ~chosen
            positions = tf.where(undecided, positions - got - gets, 0)
            left = left[1:]
        return ids

    return orders[0] if len(orders) == 1 else order


def weight_units(weights: Sequence[float]) -> list[int]:
    """The weights of all parts, the first included, in multiples of 2**-20."""
    rest = [round(weight * _WEIGHT_UNITS) for weight in weights]
    return [_WEIGHT_UNITS - sum(rest), *rest]


def _share(x: tf.Tensor, part: int, whole: int) -> tf.Tensor:
    """floor(x * part / whole) for any int64 x >= 0, without overflow."""
    return x // whole * part + x % whole * part // whole


def _permuted(
    index: tf.Tensor, epochs: tf.Tensor, size: int, seed: int | tf.Tensor, salt: int = 0
) -> tf.Tensor:
    """The image of each index in [0, size) under a permutation drawn by (seed, epoch, salt)."""
    seeds = [tf.fill(tf.shape(epochs), tf.cast(seed, tf.int64)), epochs, 0 * epochs + salt]
    return tf.raw_ops.RandomIndexShuffle(
        index=index,
        seed=tf.stack(seeds, -1),
        max_index=tf.cast(size - 1, tf.int64),
        rounds=_SHUFFLE_ROUNDS,
    )


def keys(positions: tf.Tensor, seed: int) -> tf.Tensor:
    """Seeds for TensorFlow's stateless ops, one per position: the pair (seed, position).

    The ops hash the pair, so it need not look random; pairs never collide.

    Args:
      positions: int64 (b,).
      seed: 0 <= seed < 2**32.

    Returns:
      int64 (b, 2).
    """
    return tf.stack([tf.fill(tf.shape(positions), tf.cast(seed, tf.int64)), positions], -1)


def turn_rows(positions: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """The positions that the places of a batch get, where rows of `size` places are packed.

    Each row is turned by a number that (seed, row) draws. Otherwise an order that deals positions
    in turn, as a mixture does, would always give a data set the same places.
    """
    return positions // size * size + (positions + _turn(positions, size, seed)) % size


def place_in_row(positions: tf.Tensor, size: int, seed: tf.Tensor) -> tf.Tensor:
    """The place of each position in its row: the inverse of `turn_rows`."""
    return (positions - _turn(positions, size, seed)) % size


def _turn(positions: tf.Tensor, size: int, seed: int | tf.Tensor) -> tf.Tensor:
    row = positions // size
    return _permuted(0 * row, row, _DRAWS, seed, salt=2) % size


def fold_in(key: tf.Tensor, index: int) -> tf.Tensor:
    """The key of the `index`-th op at one position: int64 (2,) -> (2,).

    The seed fills the low 32 bits of the pair's first number and the index the bits above them, so
    these keys never collide either.
    """
    return key + tf.constant([index << 32, 0], tf.int64)


def local_rows(sharding: jax.sharding.Sharding, global_batch_size: int) -> np.ndarray:
    """The rows of the global batch that this process's devices hold: int64 (b,), sorted.

    Devices along a tensor axis hold the same rows; each row is listed once.

    Args:
      sharding: sharding of a batch's leaves, whose first dimension is the batch.
      global_batch_size: B.
    """
    indices = sharding.addressable_devices_indices_map((global_batch_size,)).values()
    rows = [np.arange(global_batch_size)[index] for index in indices if index is not None]
    return np.unique(np.concatenate(rows))
