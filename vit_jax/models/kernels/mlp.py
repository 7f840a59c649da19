"""The MLP's branch of a block on TPU: norm, both products, activation, residual, all gradients.

Axes: R rows (the tokens of all images), D width, F hidden width, C hidden units of a chunk.

A program of the kernel takes a block of rows; the kernels of both products stay in VMEM. If they do
not fit, the kernel runs once for each piece of the hidden units. Each run adds its share of the
branch to the rows, and rounds them. With 2 pieces 3 layers of H/14 take 10 % fewer cycles than by
XLA. The forward pass also writes the hidden units before their activation, which the backward pass
reads. In a layer that is recomputed it does not, and the backward pass computes them again in VMEM,
so that nothing needs the forward pass a second time. The backward pass sums the gradients of the
parameters over all rows in VMEM, in float32. Neither normalised tokens nor activated hidden units
nor the gradients of either leave the chip.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eq. 3.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.dropout import kept_share, most_kept
from vit_jax.models.gelu import activations
from vit_jax.models.kernels.rows import (
    LANES,
    Blocks,
    Normed,
    at_first,
    at_last,
    dot,
    whole,
    whole_sum,
)

_CHUNK = 1536  # most hidden units at once
_MOST_PIECES = 4  # of the hidden units; each reads and normalises the rows again


def _sigmoid(z: jax.Array) -> jax.Array:
    # Vector units compute tanh in one instruction, and have none for a division.
    return 0.5 + 0.5 * jnp.tanh(0.5 * z)


# The normal distribution is nearly the sigmoid of z times a polynomial in z^2. With these
# coefficients GELU errs by 2e-5 at most and its derivative by 4e-5. Below -3, where GELU is under
# 0.004, that is more than the rounding of bfloat16.
_NORMAL = 1.59535832, 7.3381810e-2, -4.7265200e-4, -2.1610193e-5
_MOST_SQUARE = 36.0  # beyond it the sigmoid is 0 or 1


def _normal_share(z: jax.Array) -> jax.Array:
    square = jnp.minimum(z * z, _MOST_SQUARE)
    return _sigmoid(z * _polynomial(_NORMAL, square))


def _normal_slope(z: jax.Array) -> jax.Array:
    square, s = jnp.minimum(z * z, _MOST_SQUARE), _normal_share(z)
    of_derivative = tuple((2 * i + 1) * c for i, c in enumerate(_NORMAL))
    return s + z * s * (1 - s) * _polynomial(of_derivative, square)


def _polynomial(coefficients: Sequence[Any], x: jax.Array) -> jax.Array:
    *others, total = coefficients
    for coefficient in reversed(others):
        total = total * x + coefficient
    return total


_FORMS = activations(_sigmoid) | {"exact": (_normal_share, _normal_slope)}


class Spec(NamedTuple):
    """The form of a compiled kernel, beside the shapes of its arrays.

    gelu: the activation, a key of `gelu.GELU`; dropout: the rate after each product; norm: "layer"
      or "rms"; keeps_hidden: whether the backward pass reads the hidden units, or computes them
      again; blocks and pieces: of the rows and the hidden units, see `find_blocks`.
    """

    gelu: str
    dropout: float
    norm: str
    norm_eps: float
    keeps_hidden: bool
    blocks: Blocks
    pieces: int = 1


class Params(NamedTuple):
    """Of the norm (D,) and the layers; the kernels in bfloat16, the others in float32.

    With a gate, its activation multiplies the hidden units; without, they are activated themselves.
    """

    scale_D: jax.Array
    shift_D: jax.Array
    up_DF: jax.Array
    up_F: jax.Array
    down_FD: jax.Array
    down_D: jax.Array
    gate_DF: jax.Array | None = None
    gate_F: jax.Array | None = None


_AXES = (None, None, 1, 1, 0, None, 1, 1)  # of the hidden units, in the matrices of `Params`


class Drawn(NamedTuple):
    """Random numbers of a step; None if unused.

    bytes_RF, bytes_RD: uint8, of the dropout after each product; factor_R1: float32, multiplies the
      branch of a row, for stochastic depth.
    """

    bytes_RF: jax.Array | None = None
    bytes_RD: jax.Array | None = None
    factor_R1: jax.Array | None = None


def find_blocks(
    rows: int, vmem_bytes: int, width: int, hidden: int, gated: bool = False
) -> tuple[Blocks, int] | None:
    """Blocks of so many rows, and the fewest pieces of the hidden units that fit in so much VMEM.

    None: the kernel does not take these sizes.
    """
    for pieces in range(1, _MOST_PIECES + 1):
        if width % LANES or hidden % (pieces * LANES):
            continue
        # Kernels and their gradients in bfloat16, sums in float32; two blocks of each array of
        # rows, and what the compiler keeps.
        fixed = (2 + gated) * width * (hidden // pieces) * (2 + 2 + 4)
        of_row = 2 * ((3 + 2 * gated) * (hidden // pieces) + (4 + (pieces > 1)) * 2 * width)
        of_row += 2 * 4 * LANES + 4 * ((3 + 2 * gated) * _CHUNK + 4 * width)
        blocks = Blocks.fitting(rows, fixed, of_row, vmem_bytes)
        if blocks is not None:
            return blocks, pieces
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mlp(x_RD: jax.Array, params: Params, drawn: Drawn, spec: Spec) -> jax.Array:
    """x + factor drop(drop(gelu(norm(x) up + bias)) down + bias), if `find_blocks` takes the sizes.

    With a gate gelu(norm(x) gate + bias) (norm(x) up + bias) takes the place of gelu(...).

    Args:
      x_RD: bfloat16.
      params: of the norm and the layers.
      drawn: for dropout and stochastic depth.
      spec: what to compute.

    Returns:
      (R, D), bfloat16.
    """
    return _forward(x_RD, params, drawn, spec._replace(keeps_hidden=False))[0]


@functools.partial(jax.jit, static_argnames="spec")  # traced once for all layers
def _forward(
    x_RD: jax.Array, params: Params, drawn: Drawn, spec: Spec
) -> tuple[jax.Array, tuple[Any, ...]]:
    (R, D), F = x_RD.shape, params.up_F.size // spec.pieces
    num_layers, hidden = _num_hidden(params), list[list[jax.Array]]()
    num_hidden = num_layers if spec.keeps_hidden else 0
    y_RD = x_RD  # to which each piece adds its share of the branch
    for piece in range(spec.pieces):
        arrays = _Arrays(params, drawn, spec, piece)
        y_RD, *saved = pl.pallas_call(
            functools.partial(_forward_kernel, spec=spec, arrays=arrays),
            in_specs=[spec.blocks.of(D), *arrays.of_params, *arrays.of_drawn, *arrays.of_added],
            out_specs=[spec.blocks.of(D), *[spec.blocks.of(F)] * num_hidden],
            out_shape=[x_RD, *[jax.ShapeDtypeStruct((R, F), x_RD.dtype)] * num_hidden],
            cost_estimate=arrays.cost(x_RD, products=1 + num_layers, arrays=2, hidden=num_hidden),
            name="mlp_forward",
            **spec.blocks.options(),
        )(x_RD, *_matrices(params), *_given(drawn), *[y_RD] * len(arrays.of_added))
        hidden.append(saved)
    return y_RD, (x_RD, params, drawn, hidden)


@functools.partial(jax.jit, static_argnames="spec")
def _backward(spec: Spec, saved: tuple[Any, ...], grad_RD: jax.Array) -> tuple[Any, ...]:
    x_RD, params, drawn, hidden = saved
    (D, F), of, num_hidden = params.up_DF.shape, spec.blocks.of, _num_hidden(params)
    F //= spec.pieces
    num_kernels = 1 + num_hidden
    kernel_DF = jax.ShapeDtypeStruct((D, F), params.up_DF.dtype)
    grad_x, found = grad_RD, list[list[jax.Array]]()
    for piece, kept in enumerate(hidden):
        arrays = _Arrays(params, drawn, spec, piece)
        products = 2 * num_kernels + num_hidden - len(kept)
        grad_x, *grads = pl.pallas_call(
            functools.partial(_backward_kernel, spec=spec, arrays=arrays),
            in_specs=[
                of(D), *arrays.of_params, of(D), *[of(F)] * len(kept), *arrays.of_drawn,
                *arrays.of_added,
            ],
            out_specs=[of(D), *[whole(D, F)] * num_kernels, whole(num_hidden, F), whole(3, D)],
            out_shape=[
                x_RD, *[kernel_DF] * num_kernels, whole_sum(num_hidden, F), whole_sum(3, D)
            ],
            scratch_shapes=[pltpu.VMEM((D, F), jnp.float32)] * num_kernels,
            cost_estimate=arrays.cost(x_RD, products, arrays=3, hidden=len(kept)),
            name="mlp_backward",
            **spec.blocks.options(),
        )(
            x_RD, *_matrices(params), grad_RD, *kept, *_given(drawn),
            *[grad_x] * len(arrays.of_added),
        )  # fmt: skip
        found.append(grads)
    *of_pieces, sums_3D = zip(*found, strict=True)
    grad_down_DF, *grad_kernels, grads_F = (jnp.concatenate(g, axis=1) for g in of_pieces)
    grad_scale, grad_shift, _ = functools.reduce(jnp.add, sums_3D)
    of_params = Params(
        grad_scale, grad_shift, grad_kernels[0], grads_F[0], grad_down_DF.T, sums_3D[0][2]
    )
    if num_hidden == 2:
        of_params = of_params._replace(gate_DF=grad_kernels[1], gate_F=grads_F[1])
    return grad_x, of_params, None


mlp.defvjp(_forward, _backward)


def _given(drawn: Drawn) -> list[jax.Array]:
    return [x for x in drawn if x is not None]


def _num_hidden(params: Params) -> int:
    """The layers that make hidden units."""
    return 1 if params.gate_DF is None else 2


def _matrices(params: Params) -> list[jax.Array]:
    return [x if x.ndim == 2 else x[None] for x in params if x is not None]


class _Arrays:
    """What a piece of the hidden units reads beside the rows: blocks, and references in a list."""

    def __init__(self, params: Params, drawn: Drawn, spec: Spec, piece: int):
        self.piece, self._pieces = piece, spec.pieces
        axes = [axis for axis, x in zip(_AXES, params, strict=True) if x is not None]
        self.of_params = [
            whole(*x.shape, axis=axis, piece=piece, pieces=spec.pieces)
            for x, axis in zip(_matrices(params), axes, strict=True)
        ]
        self.of_drawn = [
            spec.blocks.of(x.shape[1] // spec.pieces, piece)
            if x is drawn.bytes_RF
            else spec.blocks.of(x.shape[1])
            for x in _given(drawn)
        ]
        self.of_added = [spec.blocks.of(params.up_DF.shape[0])] * (piece > 0)
        self._shape, self._drawn = params.up_DF.shape, [x is not None for x in drawn]

    def params(self, refs: Sequence[Any]) -> tuple[Params, Sequence[Any]]:
        """The `Params` that the list begins with, as references, and the rest of the list."""
        count = len(self.of_params)
        return Params(*refs[:count]), refs[count:]

    def drawn(self, refs: Sequence[Any]) -> tuple[Drawn, list[Any]]:
        """The `Drawn` that the list begins with, as references, and the rest of the list."""
        rest = list(refs)
        return Drawn(*(rest.pop(0) if is_given else None for is_given in self._drawn)), rest

    def added(self, rest: list[Any], first: Any) -> Any:
        """What the piece adds its share to: `first`, or the last piece's result, of the list."""
        return rest.pop(0) if self.piece else first

    def cost(self, x_RD: jax.Array, products: int, arrays: int, hidden: int) -> pl.CostEstimate:
        """Of so many products, which reads or writes so many arrays (R, D) and `hidden` (R, F)."""
        R, (D, F) = x_RD.shape[0], self._shape
        F, arrays = F // self._pieces, arrays + (self.piece > 0)
        of_hidden = 2 * hidden + self._drawn[0]
        of_width = 2 * arrays + self._drawn[1]
        return pl.CostEstimate(
            flops=products * 2 * R * D * F,
            transcendentals=R * F,
            bytes_accessed=R * (of_width * D + of_hidden * F) + 2 * products * D * F,
        )


def _chunks(hidden: int) -> list[slice]:
    size = max(n for n in range(LANES, _CHUNK + 1, LANES) if hidden % n == 0)
    return [slice(start, start + size) for start in range(0, hidden, size)]


def _drop(
    x: jax.Array, bytes_ref: jax.Array | None, rate: float, columns: slice = slice(None)
) -> jax.Array:
    """`dropout.drop` by the bytes, widened, as Mosaic cannot compare uint8."""
    if bytes_ref is None:
        return x
    kept = bytes_ref[:, columns].astype(jnp.int32) <= most_kept(rate)
    return jnp.where(kept, x * (1 / kept_share(rate)), 0)


def _drop_branch(x_RD: jax.Array, drawn: Drawn, spec: Spec) -> jax.Array:
    """A branch, or the gradient of its output, after dropout and stochastic depth."""
    x_RD = _drop(x_RD, drawn.bytes_RD, spec.dropout)
    return x_RD if drawn.factor_R1 is None else x_RD * drawn.factor_R1[...]


def _layers_of(params: Params) -> tuple[tuple[Any, Any], ...]:
    """(kernel, bias) of each layer that makes hidden units; a gate comes last."""
    layers = (params.up_DF, params.up_F), (params.gate_DF, params.gate_F)
    return layers[: _num_hidden(params)]


def _units(x_RD: jax.Array, params: Params, chunk: slice) -> list[jax.Array]:
    """The chunk's hidden units (R, C) by each of `_layers_of`, of normalised rows."""
    return [
        (dot(x_RD, kernel[:, chunk]) + bias[:, chunk]).astype(x_RD.dtype)
        for kernel, bias in _layers_of(params)
    ]


def _forward_kernel(x: jax.Ref, *refs: jax.Ref, spec: Spec, arrays: _Arrays) -> None:
    params, rest = arrays.params(refs)
    drawn, rest = arrays.drawn(rest)
    added = arrays.added(rest, x)
    y, *hidden = rest
    dtype, (share, _) = y.dtype, _FORMS[spec.gelu]
    normed = Normed.of(x, spec.norm, spec.norm_eps)
    x_RD = (normed.h_RD * params.scale_D[...] + params.shift_D[...]).astype(dtype)
    sum_RD = jnp.zeros(y.shape, jnp.float32)
    for chunk in _chunks(params.up_DF.shape[1]):
        units = _units(x_RD, params, chunk)
        for saved, unit_RC in zip(hidden, units, strict=bool(hidden)):
            saved[:, chunk] = unit_RC
        *gated, z_RC = (unit_RC.astype(jnp.float32) for unit_RC in units)
        out_RC = math.prod(gated, start=z_RC * share(z_RC))
        out_RC = _drop(out_RC, drawn.bytes_RF, spec.dropout, chunk)
        sum_RD += dot(out_RC.astype(dtype), params.down_FD[chunk])
    if arrays.piece == 0:
        sum_RD += params.down_D[...]
    y[...] = (added[...].astype(jnp.float32) + _drop_branch(sum_RD, drawn, spec)).astype(dtype)


def _backward_kernel(x: jax.Ref, *refs: jax.Ref, spec: Spec, arrays: _Arrays) -> None:
    params, (grad, *rest) = arrays.params(refs)
    layers = _layers_of(params)
    num_hidden = len(layers) if spec.keeps_hidden else 0
    hidden, rest = rest[:num_hidden], rest[num_hidden:]
    drawn, rest = arrays.drawn(rest)
    added = arrays.added(rest, grad)
    grad_x, *rest = rest
    grad_kernels, (grads_F, grad_3D, *sums) = rest[: 1 + len(layers)], rest[1 + len(layers) :]
    dtype, (share, slope) = grad_x.dtype, _FORMS[spec.gelu]
    at_first(*sums, grads_F, grad_3D)

    normed = Normed.of(x, spec.norm, spec.norm_eps)
    x_RD = (normed.h_RD * params.scale_D[...] + params.shift_D[...]).astype(dtype)
    branch_RD = _drop_branch(grad[...].astype(jnp.float32), drawn, spec)
    g_RD, (sum_down, *sums_of_layers) = branch_RD.astype(dtype), sums
    sum_RD = jnp.zeros(grad_x.shape, jnp.float32)
    for chunk in _chunks(params.up_DF.shape[1]):
        units = [each[:, chunk] for each in hidden] or _units(x_RD, params, chunk)
        *gated, z_RC = (unit_RC.astype(jnp.float32) for unit_RC in units)
        drop = functools.partial(_drop, bytes_ref=drawn.bytes_RF, rate=spec.dropout, columns=chunk)
        active_RC = z_RC * share(z_RC)
        out_RC = drop(math.prod(gated, start=active_RC)).astype(dtype)
        g_RC = drop(dot(g_RD, params.down_FD[chunk], (1, 1)))
        of_z_RC = math.prod(gated, start=g_RC * slope(z_RC))
        grads = [*(g_RC * active_RC for _ in gated), of_z_RC]
        # The compiler keeps this order of the products: of those tried it takes the fewest bundles.
        for i, (each, total) in enumerate(zip(grads, sums_of_layers, strict=True)):
            grads_F[i : i + 1, chunk] += each.sum(0, keepdims=True)
            total[:, chunk] += dot(x_RD, each.astype(dtype), (0, 0))
        sum_down[:, chunk] += dot(g_RD, out_RC, (0, 0))
        for each, (kernel, _) in zip(grads, layers, strict=True):
            sum_RD += dot(each.astype(dtype), kernel[:, chunk], (1, 1))

    for i, of_rows in enumerate((sum_RD * normed.h_RD, sum_RD, branch_RD)):
        grad_3D[i : i + 1] += of_rows.sum(0, keepdims=True)
    of_norm = normed.gradient(sum_RD * params.scale_D[...])
    grad_x[...] = (of_norm + added[...].astype(jnp.float32)).astype(dtype)
    at_last(sums, grad_kernels)
