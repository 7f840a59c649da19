"""Attention over few tokens on TPU: all tokens of an image lie in VMEM at once.

Axes: B images, N queries, M keys (as many as queries), H heads, K width of a head, W = H K, and L
the lanes of a group of heads. A name with the axes swapped (q_LN) is a transposed array.

The scores of a head stand transposed, keys in rows and queries in columns. The numbers that belong
to a query are then row vectors, and sums over keys run over sublanes, which is cheap. The inputs
are transposed once for each group of heads whose width is whole tiles of 128 lanes: in them a head
is a slice of rows, whatever its width. Nothing of N x M leaves the chip, and the backward pass
keeps only the inputs. With the scores s and the gradient g of the output:

    s_MN = k q^T log2(e) / sqrt(K);  e = 2^(s - max_M s);  r = 1 / sum_M e;  o = (v^T e r)^T
    p = e r;  dp_MN = v g^T;  ds = p (dp - sum_M p dp)
    dv = p g;  dk = ds q / sqrt(K);  dq = ds^T k / sqrt(K)

Rotary positions turn q and k before, and dq and dk back after: in the transposed group the two
halves of a head are slices of rows, so that no lane moves.

Images may have different numbers of keys. Then one more row of q is 1, and that row of k is -1e30
for the keys that do not count: the product that gives the scores hides them. A row of tokens may
hold several pictures; the kernel goes through them as through heads.

Source: Vaswani et al. 2017 (arXiv:1706.03762), Eq. 1; the recomputation in the backward pass: Dao
et al. 2022 (arXiv:2205.14135), section 3.1.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # of a vector register
SUBLANES = 8  # rows of a vector register of float32
# Scores that one program of a kernel computes, N x N a head: its code is as long.
MOST_SCORES = 32 * 264 * 264

LOG2_E = 1.4426950408889634
MASKED = -1e30  # a score whose weight is 0
# Heads by which the scores are ahead of the softmax, by the bundles of the compiled kernels.
_FORWARD_AHEAD, _BACKWARD_AHEAD = 3, 2
_COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=64 * 2**20
)


class Sizes(NamedTuple):
    """Sizes of a compiled kernel that the shapes of its arrays do not show.

    num_heads: H.
    num_keys: the keys that count, the first of M; the others are padding.
    parts: (m, n), ... if each of the B rows holds m pictures of n tokens, and so on, see
      `packing`; 8 divides each n. (): it holds one.
    """

    num_heads: int
    num_keys: int
    parts: tuple[tuple[int, int], ...] = ()

    def pictures(self, tokens: int) -> list[slice]:
        """The tokens of each picture in a row of so many."""
        numbers = [n for m, n in self.parts for _ in range(m)] or [tokens]
        ends = itertools.accumulate(numbers)
        return [slice(end - n, end) for n, end in zip(numbers, ends, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    turns_BKN: jax.Array | None,
    num_keys_B: jax.Array | None,
    sizes: Sizes,
) -> jax.Array:
    """softmax((q + bq) (k + bk)^T / sqrt(K)) (v + bv), head by head.

    Args:
      qkv: queries, keys and values (B, N, W) without bias, heads side by side; 8 divides N and K.
      biases: of each (W,), float32; their gradients are summed in the kernel.
      turns_BKN: float32, turns q + bq and k + bk: the transposed turns of `rotary.turn`, of each
        image or of one for all; None: nothing turns.
      num_keys_B: int32, how many first keys of each image, or picture, count; None:
        `sizes.num_keys` of each.
      sizes: of the heads, and how many tokens are not padding.

    Returns:
      (B, N, W) in the dtype of the projections. Rows of padding are finite; a gradient of 0 for
      them gives gradients of 0.
    """
    return _forward(qkv, biases, turns_BKN, num_keys_B, sizes)[0]


@functools.partial(jax.jit, static_argnames="sizes")  # traced once for all layers
def _forward(
    qkv: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    turns_BKN: jax.Array | None,
    num_keys_B: jax.Array | None,
    sizes: Sizes,
) -> tuple[jax.Array, tuple[Any, ...]]:
    qkv = tuple(x + b.astype(x.dtype)[None, None] for x, b in zip(qkv, biases, strict=True))
    layout, (more, blocks) = _Layout.of(qkv[0], sizes), _optional(turns_BKN, num_keys_B)
    out_BNW = pl.pallas_call(
        functools.partial(_forward_kernel, heads=layout.heads, num_keys=sizes.num_keys),
        grid=layout.grid,
        in_specs=[*[layout.tokens] * 3, blocks],
        out_specs=layout.tokens,
        out_shape=jax.ShapeDtypeStruct(qkv[0].shape, qkv[0].dtype),
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(qkv[0], sizes, products=2, arrays=4),
        name="short_attention_forward",
    )(*qkv, more)
    return out_BNW, (qkv, turns_BKN, num_keys_B)


@functools.partial(jax.jit, static_argnames="sizes")
def _backward(
    sizes: Sizes, saved: tuple[Any, ...], grad_BNW: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], None, None]:
    qkv, turns_BKN, num_keys_B = saved
    layout, (more, blocks) = _Layout.of(grad_BNW, sizes), _optional(turns_BKN, num_keys_B)
    like_grad = jax.ShapeDtypeStruct(grad_BNW.shape, grad_BNW.dtype)
    of_biases = jax.ShapeDtypeStruct((grad_BNW.shape[0], 3, grad_BNW.shape[2]), jnp.float32)
    *grads, grads_B3W = pl.pallas_call(
        functools.partial(_backward_kernel, heads=layout.heads, num_keys=sizes.num_keys),
        grid=layout.grid,
        in_specs=[*[layout.tokens] * 4, blocks],
        out_specs=[*[layout.tokens] * 3, layout.biases],
        out_shape=[*[like_grad] * 3, of_biases],
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(grad_BNW, sizes, products=5, arrays=7),
        name="short_attention_backward",
    )(*qkv, grad_BNW, more)
    return tuple(grads), tuple(grads_B3W.sum(0)), None, None


attention.defvjp(_forward, _backward)


def _optional(
    turns_BKN: jax.Array | None, num_keys_B: jax.Array | None
) -> tuple[tuple[tuple[jax.Array, ...], ...], tuple[tuple[pl.BlockSpec, ...], ...]]:
    """The turns and the numbers of keys, each in a tuple that is empty without, and their blocks.

    Turns that all images share stay where they are; each program can read all numbers.
    """
    turns = () if turns_BKN is None else (turns_BKN,)
    numbers = () if num_keys_B is None else (num_keys_B,)
    step = int(turns_BKN is not None and turns_BKN.shape[0] > 1)
    of_turns = [pl.BlockSpec((None, *x.shape[1:]), lambda b, j: (step * b, 0, 0)) for x in turns]
    of_numbers = [pl.BlockSpec(memory_space=pltpu.SMEM) for _ in numbers]
    return (turns, numbers), (tuple(of_turns), tuple(of_numbers))


def _cost(x_BNW: jax.Array, sizes: Sizes, products: int, arrays: int) -> pl.CostEstimate:
    """Of a kernel with so many products of N x N x K a head that reads or writes so many arrays."""
    B, N, W = x_BNW.shape
    pairs = B * sum((each.stop - each.start) ** 2 for each in sizes.pictures(N))
    return pl.CostEstimate(
        flops=products * 2 * pairs * W,
        transcendentals=pairs * sizes.num_heads,
        bytes_accessed=arrays * x_BNW.size * x_BNW.dtype.itemsize,
    )


class _Head(NamedTuple):
    """Where a head lies in a block.

    lanes: of its group; rows: its own in the transposed group; is_last: of its group.
    picture: its number in the row; tokens: of the picture.
    """

    lanes: slice
    rows: slice
    is_last: bool
    picture: int
    tokens: slice


class _Layout(NamedTuple):
    """How a kernel goes through its arrays: image by image, as many heads at once as are few.

    grid: images, blocks of heads; heads: of a block; tokens, biases: the blocks of (B, N, W)
    and of (B, 3, W).
    """

    grid: tuple[int, int]
    heads: list[_Head]
    tokens: pl.BlockSpec
    biases: pl.BlockSpec

    @classmethod
    def of(cls, x_BNW: jax.Array, sizes: Sizes) -> "_Layout":
        """That of arrays like `x_BNW`."""
        B, N, W = x_BNW.shape
        size = W // sizes.num_heads
        in_group = math.lcm(size, LANES) // size  # heads that fill whole tiles of lanes
        in_group = sizes.num_heads if sizes.num_heads % in_group else in_group
        groups = sizes.num_heads // in_group
        lanes = in_group * size
        pictures = sizes.pictures(N)
        pairs = sum((each.stop - each.start) ** 2 for each in pictures)
        most = max(MOST_SCORES // (in_group * pairs), 1)
        at_once = max(n for n in range(1, min(most, groups) + 1) if groups % n == 0)
        heads = [
            _Head(slice(start, start + lanes), slice(i * size, (i + 1) * size), i == in_group - 1,
                  *picture)
            for start in range(0, at_once * lanes, lanes)
            for picture in enumerate(pictures)
            for i in range(in_group)
        ]  # fmt: skip
        return cls(
            (B, groups // at_once),
            heads,
            pl.BlockSpec((None, N, at_once * lanes), lambda b, j: (b, 0, j)),
            pl.BlockSpec((None, 3, at_once * lanes), lambda b, j: (b, 0, j)),
        )


def _ahead(heads: Sequence[_Head], start: Callable[[_Head], Any], number: int) -> Iterator:
    """(head, start(head)) of each head, started so many heads ahead.

    The compiler keeps the order of the program: the matrix units work on the next heads' scores
    while the vector units take the softmax of this one.
    """
    started = [start(head) for head in heads[:number]]
    for i, head in enumerate(heads):
        begun = started.pop(0)
        if i + number < len(heads):
            started.append(start(heads[i + number]))
        yield head, begun


def _transposed(*refs: jax.Ref, turns: Sequence[Any]) -> Callable[[int, _Head], jax.Array]:
    """head_of(i, head): the rows of a head in the i-th of `refs`; each group is transposed once.

    Queries and keys, the first two, are turned.
    """
    groups: dict[tuple[int, int, int], jax.Array] = {}
    turned: dict[tuple[int, int, int, int], jax.Array] = {}

    def head_of(i: int, head: _Head) -> jax.Array:
        key = i, head.picture, head.lanes.start
        if key not in groups:
            groups[key] = refs[i][head.tokens, head.lanes].T
        rows = groups[key][head.rows]
        if i > 1 or not turns:
            return rows
        place = *key, head.rows.start
        if place not in turned:
            x_KN = _turned(rows.astype(jnp.float32), turns, head, 1)
            turned[place] = x_KN.astype(rows.dtype)
        return turned[place]

    return head_of


def _turned(x_KN: jax.Array, turns: Sequence[Any], head: _Head, sign: int) -> jax.Array:
    """Queries or keys turned, or with the sign -1 turned back; as they are without `turns`."""
    if not turns:
        return x_KN
    half = x_KN.shape[0] // 2
    cos, sin = turns[0][:half, head.tokens], sign * turns[0][half:, head.tokens]
    first, second = x_KN[:half], x_KN[half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin])


def _hidden_rows(
    numbers: Sequence[Any], heads: Sequence[_Head], dtype: Any
) -> dict[int, tuple[jax.Array, ...]]:
    """{picture: rows for q (R, N) and for k (R, M)} whose product hides keys, by their numbers.

    They fill a register; without `numbers` there are none.
    """
    pictures, found = {head.picture: head.tokens for head in heads}, {}
    for picture, tokens in pictures.items() if numbers else ():
        shape = SUBLANES * 4 // dtype.itemsize, tokens.stop - tokens.start
        row, key = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        hides = key >= numbers[0][pl.program_id(0) * len(pictures) + picture]
        rows = jnp.ones(shape), jnp.where((row == 0) & hides, MASKED, 0)
        found[picture] = tuple(x.astype(dtype) for x in rows)
    return found


def _scores(
    q_KN: jax.Array, k_KM: jax.Array, num_keys: int, hidden: tuple[jax.Array, ...]
) -> jax.Array:
    """log2(e) k q^T / sqrt(K), about -1e30 for padding: (M, N), float32."""
    scale = LOG2_E / math.sqrt(q_KN.shape[0])
    if hidden:
        q_KN, k_KM = (jnp.concatenate(x) for x in zip((q_KN, k_KM), hidden, strict=True))
    s_MN = _product(k_KM, q_KN, (0, 0)) * scale
    whole = num_keys // SUBLANES * SUBLANES  # only the last rows hold padding
    if hidden or num_keys == s_MN.shape[0]:
        return s_MN
    last_MN = s_MN[whole:]
    row_MN = lax.broadcasted_iota(jnp.int32, last_MN.shape, 0)
    last_MN = jnp.where(row_MN < num_keys - whole, last_MN, MASKED)
    return jnp.concatenate([s_MN[:whole], last_MN]) if whole else last_MN


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The matrix product over one axis of each, in float32."""
    of_a, of_b = contracted
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _forward_kernel(
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    v_ref: jax.Ref,
    more: tuple[tuple[jax.Ref, ...], ...],
    out_ref: jax.Ref,
    *,
    heads: Sequence[_Head],
    num_keys: int,
) -> None:
    turns, numbers = more
    hidden = _hidden_rows(numbers, heads, k_ref.dtype)
    head_of = _transposed(q_ref, k_ref, v_ref, turns=turns)

    def start(head: _Head) -> jax.Array:
        return _scores(head_of(0, head), head_of(1, head), num_keys, hidden.get(head.picture, ()))

    group = []
    for head, s_MN in _ahead(heads, start, _FORWARD_AHEAD):
        e_MN = jnp.exp2(s_MN - s_MN.max(0, keepdims=True))
        r_1N = 1.0 / e_MN.sum(0, keepdims=True)
        group.append(_product(head_of(2, head), e_MN.astype(v_ref.dtype), (1, 0)) * r_1N)
        if head.is_last:
            out_ref[head.tokens, head.lanes] = jnp.concatenate(group).T.astype(out_ref.dtype)
            group = []
    _clear_tail([out_ref], heads)


def _backward_kernel(
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    v_ref: jax.Ref,
    g_ref: jax.Ref,
    more: tuple[tuple[jax.Ref, ...], ...],
    *grads: jax.Ref,
    heads: Sequence[_Head],
    num_keys: int,
) -> None:
    (turns, numbers), (*of_qkv, biases_ref) = more, grads
    hidden = _hidden_rows(numbers, heads, k_ref.dtype)
    head_of = _transposed(q_ref, k_ref, v_ref, g_ref, turns=turns)
    dtype = q_ref.dtype

    def start(head: _Head) -> tuple[jax.Array, jax.Array]:
        s_MN = _scores(head_of(0, head), head_of(1, head), num_keys, hidden.get(head.picture, ()))
        return s_MN, _product(head_of(2, head), head_of(3, head), (0, 0))

    group: tuple[list, ...] = ([], [], [])
    for head, (s_MN, dp_MN) in _ahead(heads, start, _BACKWARD_AHEAD):
        e_MN = jnp.exp2(s_MN - s_MN.max(0, keepdims=True))
        r_1N = 1.0 / e_MN.sum(0, keepdims=True)
        mean_1N = (e_MN * dp_MN).sum(0, keepdims=True) * r_1N
        p_MN = e_MN * r_1N
        ds_MN = (p_MN * (dp_MN - mean_1N)).astype(dtype)
        scale = 1 / math.sqrt(head.rows.stop - head.rows.start)
        for i, of_ds in enumerate((0, 1)):
            grad_KN = _product(head_of(1 - i, head), ds_MN, (1, of_ds)) * scale
            group[i].append(_turned(grad_KN, turns, head, -1))
        group[2].append(_product(head_of(3, head), p_MN.astype(dtype), (1, 1)))
        if head.is_last:
            for i, ref in enumerate(of_qkv):
                grad_NL = jnp.concatenate(group[i]).T
                ref[head.tokens, head.lanes] = grad_NL.astype(dtype)
                grad_1L, of_bias = grad_NL.sum(0, keepdims=True), (slice(i, i + 1), head.lanes)
                biases_ref[of_bias] = grad_1L + biases_ref[of_bias] if head.picture else grad_1L
            group = ([], [], [])
    _clear_tail(of_qkv, heads)


def _clear_tail(refs: Sequence[jax.Ref], heads: Sequence[_Head]) -> None:
    """Write 0 behind the pictures of a row."""
    end = heads[-1].tokens.stop
    for ref in refs:
        if end < ref.shape[0]:
            ref[end:] = jnp.zeros((ref.shape[0] - end, ref.shape[1]), ref.dtype)
