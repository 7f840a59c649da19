"""Attention over few tokens on TPU with relative positions, whose logits never leave the chip.

Axes: B images, N queries, M keys (as many as queries), H heads, K width of a head, W = H K, P
prefix tokens, L lanes of the offsets, X lanes of all tables. A name with the axes swapped (q_KN) is
a transposed array. `short_attention` explains groups of heads and the recomputation.

The vector R that a query n is multiplied with depends on its offset to the key m. The products of
all queries with all vectors, y = q R^T, are one product of matrices; the logit of (n, m) stands in
its row n and lane m - n (modulo L). To rotate row n by n lanes is one instruction of TPUs, and puts
the logit into lane m. So queries stand in rows here, and keys in lanes:

    s_NM = (q k^T + rotated(y)_NM) log2(e) / sqrt(K);  p = softmax(s);  o = p v
    dR = rotated back(ds)^T q;  dq = ds k + rotated back(ds) R

TPUs rotate row n by n lanes to the right, not to the left. The backward pass reverses the lanes of
ds by a product with a permutation, rotates, and has the vectors in reversed order.

Other forms are dearer. Logits from XLA are N x N arrays in memory, written and read in both passes.
A table of vectors for each pair has N times the size. Shifts by 1, 2, 4, ... lanes take eight
operations instead of one.

Prefix tokens have vectors of their own for each token. Each of them makes the contraction of q k^T
longer by 2 K: its query, with 0 for the other tokens, is multiplied with its vectors for all keys;
the products of all queries with their vectors for its key are summed by ones in its lane.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4, after Shaw et al. 2018
  (arXiv:1803.02155), Eq. 5; the rotation: Huang et al. 2018 (arXiv:1809.04281), section 3.4.1.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.kernels import short_attention as short
from vit_jax.models.kernels.short_attention import LANES
from vit_jax.models.position import Relative

_MOST_SCORES = 6 * 208 * 208  # that one program computes: its code is as long
_MOST_IMAGES = 16  # whose gradients of the tables are summed in the kernel
_FORWARD_AHEAD, _BACKWARD_AHEAD = 1, 1  # heads, by the bundles of the compiled kernels
_COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=64 * 2**20
)


class Sizes(NamedTuple):
    """Sizes of a compiled kernel that the shapes of its arrays do not show.

    num_heads: H.
    num_keys: the keys that count, the first of M; the others are padding.
    num_prefix: P.
    """

    num_heads: int
    num_keys: int
    num_prefix: int


class _Lanes(NamedTuple):
    """Where the tables of N tokens lie in their array (K, X), in whole tiles of lanes.

    of_tokens: lanes for a vector of each token.
    of_offsets: L. The vector of a query's index minus its key's, o, is in lane of_tokens - 1 + o.
    """

    of_tokens: int
    of_offsets: int

    @classmethod
    def of(cls, num_tokens: int) -> "_Lanes":
        of_tokens = num_tokens + -num_tokens % LANES
        used = of_tokens + num_tokens - 1
        return cls(of_tokens, used + -used % LANES)

    def of_prefix(self, number: int, num_tokens: int) -> slice:
        """The vectors `number` of the prefix tokens: P for keys, then P for queries."""
        start = self.of_offsets + number * self.of_tokens
        return slice(start, start + num_tokens)


def pack_tables(relative: Relative, num_tokens: int, num_prefix: int) -> jax.Array:
    """The tables of `relative` in one array (K, X), float32, as `attention` takes them.

    Args:
      relative: positions of P prefix tokens and S patches.
      num_tokens: N, P + S and the padding.
      num_prefix: P, at most 8.
    """
    lanes = _Lanes.of(num_tokens)
    assert num_prefix <= short.SUBLANES
    above = lanes.of_tokens - relative.num_patches
    rows = [_pad(relative.offsets, above, lanes.of_offsets)]
    if relative.prefix is None:
        none = jnp.zeros((2 * num_prefix * lanes.of_tokens, relative.offsets.shape[1]))
        return jnp.concatenate([*rows, none]).T
    to_PNK = jnp.concatenate([relative.prefix, relative.to_patches], axis=1)
    rows += [_pad(to_NK, 0, lanes.of_tokens) for to_NK in to_PNK]
    rows += [_pad(from_NK, num_prefix, lanes.of_tokens) for from_NK in relative.from_patches]
    return jnp.concatenate(rows).T


def _pad(x_NK, above: int, length: int):
    return jnp.pad(x_NK, ((above, length - above - x_NK.shape[0]), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(qkv, biases, tables_KX, sizes: Sizes):
    """softmax(((q + bq) (k + bk)^T + (q + bq) R^T) / sqrt(K)) (v + bv), head by head.

    Args:
      qkv: queries, keys and values (B, N, W) without bias, heads side by side; 8 divides N and K.
      biases: of each (W,), float32; their gradients are summed in the kernel.
      tables_KX: from `pack_tables`, float32; all heads share them.
      sizes: of the heads, and how many tokens are prefix or padding.

    Returns:
      (B, N, W) in the dtype of the projections. Rows of padding are finite; a gradient of 0 for
      them gives gradients of 0.
    """
    return _forward(qkv, biases, tables_KX, sizes)[0]


def _forward(qkv, biases, tables_KX, sizes):
    qkv = tuple(x + b.astype(x.dtype)[None, None] for x, b in zip(qkv, biases, strict=True))
    x_BNW = qkv[0]
    layout = _Layout.of(x_BNW, tables_KX, sizes)
    tables = _with_reversed(tables_KX, layout.lanes)
    out_BNW = pl.pallas_call(
        functools.partial(_forward_kernel, layout=layout, sizes=sizes),
        grid=layout.grid,
        in_specs=[*[layout.tokens] * 3, *map(_whole, tables)],
        out_specs=layout.tokens,
        out_shape=jax.ShapeDtypeStruct(x_BNW.shape, x_BNW.dtype),
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(x_BNW, layout, sizes, products=2, of_offsets=1, arrays=4),
        name="relative_attention_forward",
    )(*qkv, *tables)
    return out_BNW, (qkv, tables_KX)


def _backward(sizes, saved, grad_BNW):
    qkv, tables_KX = saved
    layout = _Layout.of(grad_BNW, tables_KX, sizes)
    tables = _with_reversed(tables_KX, layout.lanes)
    like_grad = jax.ShapeDtypeStruct(grad_BNW.shape, grad_BNW.dtype)
    of_biases = jax.ShapeDtypeStruct((grad_BNW.shape[0], 3, grad_BNW.shape[2]), jnp.float32)
    of_tables = jax.ShapeDtypeStruct((layout.grid[0], *tables_KX.shape), jnp.float32)
    *grads, grads_B3W, grads_KX = pl.pallas_call(
        functools.partial(_backward_kernel, layout=layout, sizes=sizes),
        grid=layout.grid,
        in_specs=[*[layout.tokens] * 4, *map(_whole, tables)],
        out_specs=[*[layout.tokens] * 3, layout.biases, layout.tables],
        out_shape=[*[like_grad] * 3, of_biases, of_tables],
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(grad_BNW, layout, sizes, products=5, of_offsets=3, arrays=7),
        name="relative_attention_backward",
    )(*qkv, grad_BNW, *tables)
    return tuple(grads), tuple(grads_B3W.sum(0)), grads_KX.sum(0)


attention.defvjp(_forward, _backward)


def _with_reversed(tables_KX, lanes: _Lanes):
    """The vectors by key minus query (K, L), modulo L, and all tables (K, X)."""
    offsets_KL = tables_KX[:, : lanes.of_offsets]
    return jnp.roll(jnp.flip(offsets_KL, 1), lanes.of_tokens, 1), tables_KX


def _whole(table) -> pl.BlockSpec:
    return pl.BlockSpec(table.shape, lambda c, i, j: (0, 0))


def _cost(x_BNW, layout, sizes: Sizes, products: int, of_offsets: int, arrays: int):
    """Of a kernel with so many products of N x N x K and N x L x K a head."""
    B, N, W = x_BNW.shape
    return pl.CostEstimate(
        flops=2 * B * N * W * (products * N + of_offsets * layout.lanes.of_offsets),
        transcendentals=B * N * N * sizes.num_heads,
        bytes_accessed=arrays * x_BNW.size * x_BNW.dtype.itemsize,
    )


class _Layout(NamedTuple):
    """How a kernel goes through its arrays: image by image, as `short_attention.Layout`.

    grid: groups of images, images of a group, blocks of heads; heads: those of a block; tokens,
    biases, tables: the blocks of (B, N, W), (B, 3, W) and (groups, K, X).
    """

    grid: tuple[int, int, int]
    heads: list
    lanes: _Lanes
    tokens: pl.BlockSpec
    biases: pl.BlockSpec
    tables: pl.BlockSpec

    @classmethod
    def of(cls, x_BNW, tables_KX, sizes: Sizes) -> "_Layout":
        num_tokens = x_BNW.shape[1]
        of_short = short.Layout.of(
            x_BNW, short.Sizes(sizes.num_heads, sizes.num_keys), _MOST_SCORES
        )
        images, blocks = of_short.grid
        width = x_BNW.shape[2] // blocks
        at_once = max(n for n in range(1, min(_MOST_IMAGES, images) + 1) if images % n == 0)
        return cls(
            (images // at_once, at_once, blocks),
            of_short.heads,
            _Lanes.of(num_tokens),
            pl.BlockSpec((None, num_tokens, width), lambda c, i, j: (c * at_once + i, 0, j)),
            pl.BlockSpec((None, 3, width), lambda c, i, j: (c * at_once + i, 0, j)),
            pl.BlockSpec((None, *tables_KX.shape), lambda c, i, j: (c, 0, 0)),
        )


class _Operands(NamedTuple):
    """A head's queries and keys and the tables, for `_scores` and the backward pass.

    queries, keys: of the prefix tokens' logits, lists of (K, N) and (K, M), float32.
    patches_KN: the queries of patches, 0 for others.
    """

    queries: list
    keys: list
    patches_KN: jax.Array

    @classmethod
    def of(cls, q_KN, k_KM, tables_ref, lanes: _Lanes, num_prefix: int) -> "_Operands":
        q_KN, k_KM = q_KN.astype(jnp.float32), k_KM.astype(jnp.float32)
        num_tokens = q_KN.shape[1]
        token_KN = lax.broadcasted_iota(jnp.int32, q_KN.shape, 1)
        queries, keys = [q_KN], [k_KM]
        for p in range(num_prefix):
            queries.append(jnp.where(token_KN == p, q_KN, 0.0))
            keys.append(tables_ref[:, lanes.of_prefix(p, num_tokens)])
        for p in range(num_prefix):
            queries.append(q_KN * tables_ref[:, lanes.of_prefix(num_prefix + p, num_tokens)])
            keys.append(jnp.where(token_KN == p, 1.0, 0.0))
        patches_KN = jnp.where(token_KN >= num_prefix, q_KN, 0.0) if num_prefix else q_KN
        return cls(queries, keys, patches_KN)


def _scores(operands: _Operands, reversed_ref, sizes: Sizes, dtype):
    """log2(e) (k q^T + relative logits) / sqrt(K), -1e30 for padding: (N, M), float32."""
    queries, keys = (_stacked(x, dtype) for x in (operands.queries, operands.keys))
    s_NM = short.product(queries, keys, (0, 0))
    y_NL = short.product(operands.patches_KN.astype(dtype), reversed_ref[...].astype(dtype), (0, 0))
    relative_NM = _rotated(y_NL)[:, : s_NM.shape[1]]
    key_NM = lax.broadcasted_iota(jnp.int32, s_NM.shape, 1)
    s_NM += jnp.where(key_NM >= sizes.num_prefix, relative_NM, 0.0)
    s_NM *= short.LOG2_E / math.sqrt(operands.patches_KN.shape[0])
    return jnp.where(key_NM < sizes.num_keys, s_NM, short.MASKED)


def _stacked(x, dtype):
    return jnp.concatenate(x).astype(dtype)


def _rotated(x_NL):
    """Row n rotated by n lanes to the right."""
    return pltpu.roll(x_NL, 0, 1, stride=1, stride_axis=0)


def _softmax(s_NM):
    e_NM = jnp.exp2(s_NM - s_NM.max(1, keepdims=True))
    return e_NM * (1.0 / e_NM.sum(1, keepdims=True))


def _forward_kernel(q_ref, k_ref, v_ref, reversed_ref, tables_ref, out_ref, *, layout, sizes):
    head_of = short.transposed(q_ref, k_ref, v_ref)
    dtype = out_ref.dtype

    def start(head):
        q_KN, k_KM = head_of(0, head), head_of(1, head)
        operands = _Operands.of(q_KN, k_KM, tables_ref, layout.lanes, sizes.num_prefix)
        return _scores(operands, reversed_ref, sizes, dtype)

    group = []
    for head, s_NM in short.ahead(layout.heads, start, _FORWARD_AHEAD):
        p_NM = _softmax(s_NM).astype(dtype)
        group.append(short.product(head_of(2, head), p_NM, (1, 1)))
        if head.is_last:
            out_ref[:, head.lanes] = jnp.concatenate(group).T.astype(dtype)
            group = []


def _backward_kernel(
    q_ref, k_ref, v_ref, g_ref, reversed_ref, tables_ref,
    dq_ref, dk_ref, dv_ref, biases_ref, dtables_ref, *, layout: _Layout, sizes: Sizes,
):  # fmt: skip
    head_of = short.transposed(q_ref, k_ref, v_ref, g_ref)
    dtype = q_ref.dtype

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dtables_ref[...] = jnp.zeros_like(dtables_ref)

    def start(head):
        q_KN, k_KM = head_of(0, head), head_of(1, head)
        operands = _Operands.of(q_KN, k_KM, tables_ref, layout.lanes, sizes.num_prefix)
        s_NM = _scores(operands, reversed_ref, sizes, dtype)
        return operands, s_NM, short.product(head_of(3, head), head_of(2, head), (0, 0))

    group: tuple[list, ...] = ([], [], [])
    for head, (operands, s_NM, dp_NM) in short.ahead(layout.heads, start, _BACKWARD_AHEAD):
        p_NM = _softmax(s_NM)
        mean_N1 = (p_NM * dp_NM).sum(1, keepdims=True)
        ds_NM = (p_NM * (dp_NM - mean_N1)).astype(dtype)
        scale = 1 / math.sqrt(head.rows.stop - head.rows.start)
        dq_KN, dk_KM = _backward_of_logits(ds_NM, operands, tables_ref, dtables_ref, layout, scale)
        group[0].append(dq_KN * scale)
        group[1].append(dk_KM * scale)
        group[2].append(short.product(head_of(3, head), p_NM.astype(dtype), (1, 0)))
        if head.is_last:
            for i, ref in enumerate((dq_ref, dk_ref, dv_ref)):
                grad_NL = jnp.concatenate(group[i]).T
                ref[:, head.lanes] = grad_NL.astype(dtype)
                biases_ref[i : i + 1, head.lanes] = grad_NL.sum(0, keepdims=True)
            group = ([], [], [])


def _backward_of_logits(ds_NM, operands: _Operands, tables_ref, dtables_ref, layout, scale: float):
    """The gradients of a head's queries and keys, of logits not yet scaled; adds the tables'."""
    dtype, lanes = ds_NM.dtype, layout.lanes
    K, N = operands.patches_KN.shape
    num_prefix = len(operands.queries) // 2
    y_NL = _rotated(_reversed(ds_NM, num_prefix, lanes)).astype(dtype)
    offsets = slice(0, lanes.of_offsets)
    dtables_ref[:, offsets] += scale * short.product(
        operands.patches_KN.astype(dtype), y_NL, (1, 0)
    )
    token_KN = lax.broadcasted_iota(jnp.int32, (K, N), 1)
    dq_KN = short.product(tables_ref[:, offsets].astype(dtype), y_NL, (1, 1))
    dq_KN = jnp.where(token_KN >= num_prefix, dq_KN, 0.0)

    # Of the keys and the first vectors of the prefix tokens; of the queries, likewise.
    dkeys = short.product(_stacked(operands.queries[: 1 + num_prefix], dtype), ds_NM, (1, 0))
    first = [*operands.keys[: 1 + num_prefix], _first_lanes(N)] if num_prefix else operands.keys
    dqueries = short.product(_stacked(first, dtype), ds_NM, (1, 1))
    dq_KN += dqueries[:K]
    for p in range(num_prefix):
        rows = slice((1 + p) * K, (2 + p) * K)
        dtables_ref[:, lanes.of_prefix(p, N)] += scale * dkeys[rows]
        dq_KN += jnp.where(token_KN == p, dqueries[rows], 0.0)
        ds_1N = dqueries[(1 + num_prefix) * K + p][None]  # of the key p
        of_queries = lanes.of_prefix(num_prefix + p, N)
        dtables_ref[:, of_queries] += scale * operands.queries[0] * ds_1N
        dq_KN += tables_ref[:, of_queries] * ds_1N
    return dq_KN, dkeys[:K]


def _first_lanes(num: int):
    """(8, num): row p is 1 in lane p, else 0."""
    shape = (short.SUBLANES, num)
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.where(row == lane, 1.0, 0.0)


def _reversed(ds_NM, num_prefix: int, lanes: _Lanes):
    """(N, L): the tiles of lanes of `ds_NM` in reversed order, each reversed, prefix keys 0."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    N, M = ds_NM.shape
    tiles = []
    for start in range(0, M, LANES):
        tile = ds_NM[:, start : start + LANES]
        ones = (row + lane == LANES - 1) & (row >= num_prefix - start)
        permutation = jnp.where(ones, 1.0, 0.0).astype(ds_NM.dtype)[: tile.shape[1]]
        tiles.insert(0, short.product(tile, permutation, (1, 0)))
    rest = jnp.zeros((N, lanes.of_offsets - lanes.of_tokens), jnp.float32)
    return jnp.concatenate([*tiles, rest], 1)
