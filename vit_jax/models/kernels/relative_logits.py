"""Logits of relative positions inside a TPU kernel, and their gradient.

Axes: N queries, M keys (as many as queries), K width of a head, P prefix tokens, T lanes, whole
tiles with one for each token, L = 2 T lanes of the offsets, X lanes of all tables. A name with the
axes swapped (q_KN) is a transposed array.

The vector R that a query n is multiplied with depends on its offset to the key m. The products of
all queries with all vectors, q R^T, are one product of matrices; the logit of (n, m) stands in its
row n and lane m - n (modulo L). To rotate row n by n lanes is one instruction of TPUs, and puts the
logit into lane m. With the gradient ds of the logits:

    y_NM = rotated(q R^T);  dR = rotated back(ds)^T q;  dq = rotated back(ds) R

TPUs rotate row n by n lanes to the right, not to the left. The backward pass reverses the lanes of
ds by a product with a permutation, rotates, and has the vectors in reversed order.

Other forms are dearer. A table of vectors for each pair has N times the size. Shifts by 1, 2, 4,
... lanes take eight operations instead of one.

Prefix tokens have vectors of their own for each token. A query of theirs gives one row of logits,
by the vector units. The products of all queries with their vectors for a key of theirs are summed
over K and join the contraction of q k^T, which ones in the lane of that key bring there.

Source: the rotation: Huang et al. 2018 (arXiv:1809.04281), section 3.4.1.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.kernels import short_attention as short
from vit_jax.models.kernels.short_attention import LANES
from vit_jax.models.position import Relative

MOST_PREFIX_TOKENS = short.SUBLANES // 2


class Tables(NamedTuple):
    """Where the tables lie in their array (K, X).

    The vector of a query's index minus its key's, o, is in lane T - 1 + o. The vectors of prefix
    tokens follow.
    """

    num_tokens: int
    num_prefix: int

    @property
    def lanes(self) -> int:
        """T."""
        return self.num_tokens + -self.num_tokens % LANES

    def of_keys(self, p: int) -> slice:
        """The lanes of the vectors for all keys that the query p is multiplied with."""
        start = (2 + p) * self.lanes
        return slice(start, start + self.num_tokens)

    def of_queries(self, p: int) -> slice:
        """The lanes of the vectors for the key p, one for each query."""
        return self.of_keys(self.num_prefix + p)


def pack_tables(relative: Relative, num_tokens: int, num_prefix: int) -> jax.Array:
    """The tables of `relative` in one array (K, X), float32, as the kernels take them.

    Args:
      relative: positions of P prefix tokens and S patches.
      num_tokens: N, P + S and the padding.
      num_prefix: P, at most MOST_PREFIX_TOKENS.
    """
    assert num_prefix <= MOST_PREFIX_TOKENS
    lanes = Tables(num_tokens, num_prefix).lanes
    rows = [_pad(relative.offsets, lanes - relative.num_patches, 2 * lanes)]
    if relative.prefix is None or relative.to_patches is None or relative.from_patches is None:
        none = jnp.zeros((2 * num_prefix * lanes, relative.offsets.shape[1]))
        return jnp.concatenate([*rows, none]).T
    to_PNK = jnp.concatenate([relative.prefix, relative.to_patches], axis=1)
    rows += [_pad(to_NK, 0, lanes) for to_NK in to_PNK]
    rows += [_pad(from_NK, num_prefix, lanes) for from_NK in relative.from_patches]
    return jnp.concatenate(rows).T


def _pad(x_NK, above: int, length: int):
    return jnp.pad(x_NK, ((above, length - above - x_NK.shape[0]), (0, 0)))


def by_key(tables_KX: jax.Array, tables: Tables) -> jax.Array:
    """The vectors of offsets (K, L), key minus query in its lane, modulo L."""
    offsets_KL = tables_KX[:, : 2 * tables.lanes]
    return jnp.roll(jnp.flip(offsets_KL, 1), tables.lanes, 1)


class Operands(NamedTuple):
    """A head's queries and keys, float32, for the logits and their gradient.

    prefix_keys: P rows (1, N), a logit of each query for the key of a prefix token.
    patches_KN: the queries of patches, 0 for others, in the dtype of the products.
    """

    q_KN: jax.Array
    k_KM: jax.Array
    prefix_keys: list
    patches_KN: jax.Array

    @classmethod
    def of(cls, q_KN, k_KM, tables_ref, tables: Tables) -> "Operands":
        dtype = q_KN.dtype
        q_KN, k_KM = q_KN.astype(jnp.float32), k_KM.astype(jnp.float32)
        prefix_keys = [
            (q_KN * tables_ref[:, tables.of_queries(p)]).sum(0, keepdims=True)
            for p in range(tables.num_prefix)
        ]
        patches_KN = jnp.where(_index(q_KN, 1) >= tables.num_prefix, q_KN, 0.0)
        return cls(q_KN, k_KM, prefix_keys, patches_KN.astype(dtype))


def _index(x, axis: int):
    return lax.broadcasted_iota(jnp.int32, x.shape, axis)


def scores(operands: Operands, by_key_ref, tables_ref, tables: Tables, num_keys: int):
    """log2(e) (k q^T + relative logits) / sqrt(K), -1e30 for padding: (N, M), float32."""
    queries, keys = [operands.q_KN], [operands.k_KM]
    dtype = operands.patches_KN.dtype
    if tables.num_prefix:
        logits_8N, ones_8M = _prefix_logits(operands, dtype)
        queries, keys = [*queries, logits_8N], [*keys, ones_8M]
    s_NM = short.product(_stacked(queries, dtype), _stacked(keys, dtype), (0, 0))
    relative_NM = _by_offset(operands.patches_KN, by_key_ref, tables.lanes)[:, : s_NM.shape[1]]
    key_NM = _index(s_NM, 1)
    s_NM += jnp.where(key_NM >= tables.num_prefix, relative_NM, 0.0)
    for p in range(tables.num_prefix):
        of_keys_KM = tables_ref[:, tables.of_keys(p)]
        row_1M = (operands.q_KN[:, p : p + 1] * of_keys_KM).sum(0, keepdims=True)
        first_8M, others_NM = s_NM[: short.SUBLANES], s_NM[short.SUBLANES :]
        first_8M += jnp.where(_index(first_8M, 0) == p, row_1M, 0.0)
        s_NM = jnp.concatenate([first_8M, others_NM]) if others_NM.size else first_8M
    s_NM *= short.LOG2_E / math.sqrt(operands.q_KN.shape[0])
    return jnp.where(key_NM < num_keys, s_NM, short.MASKED)


def _prefix_logits(operands: Operands, dtype):
    """(8, N), (8, M) for the contraction of q k^T: logits of the prefix keys, 1 in their lanes.

    A logit has two rows, rounded and the rest, so that it is as exact as a sum in float32.
    """
    num = operands.q_KN.shape[1]
    logits_8N = jnp.zeros((short.SUBLANES, num), jnp.float32)
    row_8N, lane_8N = _index(logits_8N, 0), _index(logits_8N, 1)
    for p, logit_1N in enumerate(operands.prefix_keys):
        rounded_1N = logit_1N.astype(dtype).astype(jnp.float32)
        logits_8N = jnp.where(row_8N == 2 * p, rounded_1N, logits_8N)
        logits_8N = jnp.where(row_8N == 2 * p + 1, logit_1N - rounded_1N, logits_8N)
    return logits_8N, jnp.where(row_8N >> 1 == lane_8N, 1.0, 0.0)


def _stacked(x, dtype):
    return jnp.concatenate(x).astype(dtype)


def _by_offset(patches_KN, by_key_ref, lanes: int):
    """The products of queries with the vectors of all their offsets, rotated: (N, L)."""
    num, tiles = patches_KN.shape[1], []
    for start in range(0, 2 * lanes, LANES):
        tile = slice(start, start + LANES)
        rows = _rows_with(start if start < lanes else start - 2 * lanes, num)
        y_NL = short.product(
            patches_KN[:, rows], by_key_ref[:, tile].astype(patches_KN.dtype), (0, 0)
        )
        tiles.append(jnp.pad(y_NL, ((rows.start, num - rows.stop), (0, 0))))
    return _rotated(jnp.concatenate(tiles, 1))


def _rows_with(first: int, num: int) -> slice:
    """The queries, in whole tiles, that have keys `first` to `first` + 127 tokens further on."""
    start = max(0, -(first + LANES - 1)) // LANES * LANES
    stop = min(num, num - first)
    return slice(start, min(stop + -stop % LANES, num))


def _rotated(x_NL):
    """Row n rotated by n lanes to the right."""
    return pltpu.roll(x_NL, 0, 1, stride=1, stride_axis=0)


def grad_queries(ds_NM, operands: Operands, tables_ref, dtables_ref, tables: Tables):
    """The gradient of a head's queries (K, N); adds the gradients of the tables to theirs.

    ds_NM: the gradient of the logits after their division by sqrt(K).
    """
    dtype, num_prefix = operands.patches_KN.dtype, tables.num_prefix
    K = operands.q_KN.shape[0]
    scale = 1 / math.sqrt(K)
    y_NL = _rotated(_reversed(ds_NM.astype(dtype), num_prefix, tables.lanes)).astype(dtype)
    dq_KN = _add_offsets(y_NL, operands.patches_KN, tables_ref, dtables_ref, tables.lanes, scale)
    token_KN = _index(dq_KN, 1)
    dq_KN = jnp.where(token_KN >= num_prefix, dq_KN, 0.0)
    keys = [operands.k_KM]
    if num_prefix:
        keys.append(_prefix_logits(operands, dtype)[1])
    grads = short.product(_stacked(keys, dtype), ds_NM.astype(dtype), (1, 1))
    dq_KN += grads[:K]
    for p in range(num_prefix):
        of_keys, of_queries = tables.of_keys(p), tables.of_queries(p)
        ds_1M, ds_1N = ds_NM[p : p + 1], grads[K + 2 * p : K + 2 * p + 1]  # of query p, of key p
        q_K1 = operands.q_KN[:, p : p + 1]
        dtables_ref[:, of_keys] += scale * q_K1 * ds_1M
        dtables_ref[:, of_queries] += scale * operands.q_KN * ds_1N
        dq_K1 = (tables_ref[:, of_keys] * ds_1M).sum(1, keepdims=True)
        dq_KN += jnp.where(token_KN == p, dq_K1, 0.0) + tables_ref[:, of_queries] * ds_1N
    return scale * dq_KN


def _add_offsets(y_NL, patches_KN, tables_ref, dtables_ref, lanes: int, scale: float):
    """The part of the offsets in `grad_queries`, from the rotated gradients of the logits."""
    dtype, num = y_NL.dtype, y_NL.shape[0]
    dq: dict[int, jax.Array] = {}
    for start in range(0, 2 * lanes, LANES):
        tile = slice(start, start + LANES)
        rows = _rows_with(lanes - LANES - start, num)
        grad_KL = short.product(patches_KN[:, rows], y_NL[rows, tile], (1, 0))
        dtables_ref[:, tile] += scale * grad_KL
        for first in range(rows.start, rows.stop, LANES):
            part_NL = y_NL[first : first + LANES, tile]
            part_KN = short.product(tables_ref[:, tile].astype(dtype), part_NL, (1, 1))
            dq[first] = dq[first] + part_KN if first in dq else part_KN
    return jnp.concatenate([dq[first] for first in sorted(dq)], 1)


def _reversed(ds_NM, num_prefix: int, lanes: int):
    """(N, L): the tiles of lanes of `ds_NM` in reversed order, each reversed, prefix keys 0."""
    N, M = ds_NM.shape
    row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    tiles: list[jax.Array] = []
    for start in range(0, M, LANES):
        tile = ds_NM[:, start : start + LANES]
        ones = (row + lane == LANES - 1) & (row >= num_prefix - start)
        permutation = jnp.where(ones, 1.0, 0.0).astype(ds_NM.dtype)[: tile.shape[1]]
        tiles.insert(0, short.product(tile, permutation, (1, 0)))
    return jnp.concatenate([*tiles, jnp.zeros((N, lanes), jnp.float32)], 1)
