"""Attention over few tokens on TPU with relative positions, whose logits never leave the chip.

Axes: B images, N queries, M keys (as many as queries), H heads, K width of a head, W = H K, P
prefix tokens, L lanes of the offsets, X lanes of all tables. A name with the axes swapped (q_KN) is
a transposed array. `short_attention` explains groups of heads and the recomputation.

`relative_logits` makes the logits y_NM of relative positions, for which queries stand in rows and
keys in lanes:

    s_NM = (q k^T + y) log2(e) / sqrt(K);  p = softmax(s);  o = p v
    dp_NM = g v^T;  ds = p (dp - sum_M p dp)
    dv = p^T g;  dk = ds^T q / sqrt(K);  dq = (ds k + the gradient through y) / sqrt(K)

Logits from XLA would be N x N arrays in memory, written and read in both passes.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4, after Shaw et al. 2018
  (arXiv:1803.02155), Eq. 5.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.kernels import relative_logits as logits
from vit_jax.models.kernels import short_attention as short

_MOST_SCORES = 6 * 208 * 208  # that one program computes: its code is as long
_MOST_IMAGES = 16  # whose gradients of the tables are summed in the kernel
_FORWARD_AHEAD, _BACKWARD_AHEAD = 3, 2  # heads, by the bundles of the compiled kernels
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(qkv, biases, tables_KX, sizes: Sizes):
    """softmax(((q + bq) (k + bk)^T + (q + bq) R^T) / sqrt(K)) (v + bv), head by head.

    Args:
      qkv: queries, keys and values (B, N, W) without bias, heads side by side; 8 divides N and K.
      biases: of each (W,), float32; their gradients are summed in the kernel.
      tables_KX: from `relative_logits.pack_tables`, float32; all heads share them.
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
    tables = logits.by_key(tables_KX, layout.tables), tables_KX
    out_BNW = pl.pallas_call(
        functools.partial(_forward_kernel, layout=layout, num_keys=sizes.num_keys),
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
    tables = logits.by_key(tables_KX, layout.tables), tables_KX
    like_grad = jax.ShapeDtypeStruct(grad_BNW.shape, grad_BNW.dtype)
    of_biases = jax.ShapeDtypeStruct((grad_BNW.shape[0], 3, grad_BNW.shape[2]), jnp.float32)
    of_tables = jax.ShapeDtypeStruct((layout.grid[0], *tables_KX.shape), jnp.float32)
    *grads, grads_B3W, grads_KX = pl.pallas_call(
        functools.partial(_backward_kernel, layout=layout, num_keys=sizes.num_keys),
        grid=layout.grid,
        in_specs=[*[layout.tokens] * 4, *map(_whole, tables)],
        out_specs=[*[layout.tokens] * 3, layout.biases, layout.all_tables],
        out_shape=[*[like_grad] * 3, of_biases, of_tables],
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(grad_BNW, layout, sizes, products=5, of_offsets=3, arrays=7),
        name="relative_attention_backward",
    )(*qkv, grad_BNW, *tables)
    return tuple(grads), tuple(grads_B3W.sum(0)), grads_KX.sum(0)


attention.defvjp(_forward, _backward)


def _whole(table) -> pl.BlockSpec:
    return pl.BlockSpec(table.shape, lambda c, i, j: (0, 0))


def _cost(x_BNW, layout, sizes: Sizes, products: int, of_offsets: int, arrays: int):
    """Of a kernel with so many products of N x N x K and N x L x K a head."""
    B, N, W = x_BNW.shape
    return pl.CostEstimate(
        flops=2 * B * N * W * (products * N + of_offsets * 2 * layout.tables.lanes),
        transcendentals=B * N * N * sizes.num_heads,
        bytes_accessed=arrays * x_BNW.size * x_BNW.dtype.itemsize,
    )


class _Layout(NamedTuple):
    """How a kernel goes through its arrays: image by image, as `short_attention.Layout`.

    grid: groups of images, images of a group, blocks of heads; heads: those of a block; tables:
    their lanes; tokens, biases, all_tables: the blocks of (B, N, W), (B, 3, W), (groups, K, X).
    """

    grid: tuple[int, int, int]
    heads: list
    tables: logits.Tables
    tokens: pl.BlockSpec
    biases: pl.BlockSpec
    all_tables: pl.BlockSpec

    @classmethod
    def of(cls, x_BNW, tables_KX, sizes: Sizes) -> "_Layout":
        num_tokens = x_BNW.shape[1]
        of_short = short.Layout.of(
            x_BNW, short.Sizes(sizes.num_heads, sizes.num_keys), _MOST_SCORES
        )
        images, blocks = of_short.grid
        width = x_BNW.shape[2] // blocks
        most = min(_MOST_IMAGES, max(images // 2, 1))  # so that two cores have a group each
        at_once = max(n for n in range(1, most + 1) if images % n == 0)
        return cls(
            (images // at_once, at_once, blocks),
            of_short.heads,
            logits.Tables(num_tokens, sizes.num_prefix),
            pl.BlockSpec((None, num_tokens, width), lambda c, i, j: (c * at_once + i, 0, j)),
            pl.BlockSpec((None, 3, width), lambda c, i, j: (c * at_once + i, 0, j)),
            pl.BlockSpec((None, *tables_KX.shape), lambda c, i, j: (c, 0, 0)),
        )


def _softmax(s_NM):
    e_NM = jnp.exp2(s_NM - s_NM.max(1, keepdims=True))
    return e_NM * (1.0 / e_NM.sum(1, keepdims=True))


def _forward_kernel(q_ref, k_ref, v_ref, by_key_ref, tables_ref, out_ref, *, layout, num_keys):
    head_of = short.transposed(q_ref, k_ref, v_ref)

    def start(head):
        q_KN, k_KM = head_of(0, head), head_of(1, head)
        operands = logits.Operands.of(q_KN, k_KM, tables_ref, layout.tables)
        return logits.scores(operands, by_key_ref, tables_ref, layout.tables, num_keys)

    group = []
    for head, s_NM in short.ahead(layout.heads, start, _FORWARD_AHEAD):
        p_NM = _softmax(s_NM).astype(out_ref.dtype)
        group.append(short.product(head_of(2, head), p_NM, (1, 1)))
        if head.is_last:
            out_ref[:, head.lanes] = jnp.concatenate(group).T.astype(out_ref.dtype)
            group = []


def _backward_kernel(
    q_ref, k_ref, v_ref, g_ref, by_key_ref, tables_ref,
    dq_ref, dk_ref, dv_ref, biases_ref, dtables_ref, *, layout: _Layout, num_keys: int,
):  # fmt: skip
    head_of = short.transposed(q_ref, k_ref, v_ref, g_ref)
    dtype = q_ref.dtype

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dtables_ref[...] = jnp.zeros_like(dtables_ref)

    def start(head):
        q_KN, k_KM = head_of(0, head), head_of(1, head)
        operands = logits.Operands.of(q_KN, k_KM, tables_ref, layout.tables)
        s_NM = logits.scores(operands, by_key_ref, tables_ref, layout.tables, num_keys)
        return operands, s_NM, short.product(head_of(3, head), head_of(2, head), (0, 0))

    group: tuple[list, ...] = ([], [], [])
    for head, (operands, s_NM, dp_NM) in short.ahead(layout.heads, start, _BACKWARD_AHEAD):
        p_NM = _softmax(s_NM)
        ds_NM = p_NM * (dp_NM - (p_NM * dp_NM).sum(1, keepdims=True))
        scale = 1 / math.sqrt(head.rows.stop - head.rows.start)
        group[0].append(
            logits.grad_queries(ds_NM, operands, tables_ref, dtables_ref, layout.tables)
        )
        group[1].append(short.product(head_of(0, head), ds_NM.astype(dtype), (1, 0)) * scale)
        group[2].append(short.product(head_of(3, head), p_NM.astype(dtype), (1, 0)))
        if head.is_last:
            for i, ref in enumerate((dq_ref, dk_ref, dv_ref)):
                grad_NL = jnp.concatenate(group[i]).T
                ref[:, head.lanes] = grad_NL.astype(dtype)
                biases_ref[i : i + 1, head.lanes] = grad_NL.sum(0, keepdims=True)
            group = ([], [], [])
