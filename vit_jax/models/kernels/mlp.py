"""The MLP's branch of a block on TPU: norm, both products, activation, residual, all gradients.

Axes: R rows (the tokens of all images), D width, F hidden width, C hidden units of a chunk.

A program of the kernel takes a block of rows; the kernels of both products stay in VMEM. The
forward pass also writes the hidden units before their activation, all that the backward pass needs
beside its inputs. That one sums the gradients of the parameters over all rows in VMEM, in float32:
neither normalised tokens nor activated hidden units nor the gradients of either leave the chip.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eq. 3.
"""

import functools
from typing import NamedTuple

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


def _sigmoid(z):
    # Vector units have an instruction for tanh, and none for a division.
    return 0.5 + 0.5 * jnp.tanh(0.5 * z)


# The normal distribution is nearly the sigmoid of z times a polynomial in z^2. With these
# coefficients GELU errs by 2e-5 at most and its derivative by 4e-5, below the rounding of bfloat16.
_NORMAL = 1.59535832, 7.3381810e-2, -4.7265200e-4, -2.1610193e-5
_MOST_SQUARE = 36.0  # beyond it the sigmoid is 0 or 1


def _normal_share(z):
    square = jnp.minimum(z * z, _MOST_SQUARE)
    return _sigmoid(z * _polynomial(_NORMAL, square))


def _normal_slope(z):
    square, s = jnp.minimum(z * z, _MOST_SQUARE), _normal_share(z)
    of_derivative = tuple((2 * i + 1) * c for i, c in enumerate(_NORMAL))
    return s + z * s * (1 - s) * _polynomial(of_derivative, square)


def _polynomial(coefficients, x):
    *others, total = coefficients
    for coefficient in reversed(others):
        total = total * x + coefficient
    return total


_FORMS = activations(_sigmoid) | {"exact": (_normal_share, _normal_slope)}


class Spec(NamedTuple):
    """What a compiled kernel computes, beside the shapes of its arrays.

    gelu: the activation, a key of `gelu.GELU`; dropout: the rate after each product; norm: "layer"
      or "rms"; blocks: those of the rows, see `find_blocks`.
    """

    gelu: str
    dropout: float
    norm: str
    norm_eps: float
    blocks: Blocks


class Params(NamedTuple):
    """Of the norm (D,) and both layers; the kernels in bfloat16, the others in float32."""

    scale_D: jax.Array
    shift_D: jax.Array
    up_DF: jax.Array
    up_F: jax.Array
    down_FD: jax.Array
    down_D: jax.Array


class Drawn(NamedTuple):
    """What is drawn for a step, each None where it is not.

    bytes_RF, bytes_RD: uint8, of the dropout after each product; factor_R1: float32, multiplies the
      branch of a row, for stochastic depth.
    """

    bytes_RF: jax.Array | None = None
    bytes_RD: jax.Array | None = None
    factor_R1: jax.Array | None = None


def find_blocks(rows: int, vmem_bytes: int, width: int, hidden: int) -> Blocks | None:
    """Blocks of so many rows; None: the kernel does not take these sizes in so much VMEM."""
    if width % LANES or hidden % LANES:
        return None
    # Kernels and their gradients in bfloat16, sums in float32; two blocks of each array of rows,
    # and what the compiler keeps.
    fixed = width * hidden * (2 * 2 + 2 * 2 + 2 * 4)
    of_row = 2 * (3 * hidden + 4 * 2 * width) + 4 * (3 * _CHUNK + 2 * width)
    return Blocks.fitting(rows, fixed, of_row, vmem_bytes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mlp(x_RD, params: Params, drawn: Drawn, spec: Spec):
    """x + factor drop(drop(gelu(norm(x) up + bias)) down + bias), if `find_blocks` takes the sizes.

    Args:
      x_RD: bfloat16.
      params: of the norm and the layers.
      drawn: for dropout and stochastic depth.
      spec: what to compute.

    Returns:
      (R, D), bfloat16.
    """
    return _forward(x_RD, params, drawn, spec)[0]


def _forward(x_RD, params, drawn, spec):
    (R, D), F = x_RD.shape, params.up_F.size
    arrays = _Arrays(params, drawn, spec.blocks)
    y_RD, hidden_RF = pl.pallas_call(
        functools.partial(_forward_kernel, spec=spec, drawn=arrays.drawn),
        in_specs=[spec.blocks.of(D), *arrays.of_params, *arrays.of_drawn],
        out_specs=[spec.blocks.of(D), spec.blocks.of(F)],
        out_shape=[x_RD, jax.ShapeDtypeStruct((R, F), x_RD.dtype)],
        cost_estimate=arrays.cost(x_RD, products=2, arrays=2),
        name="mlp_forward",
        **spec.blocks.options(),
    )(x_RD, *_matrices(params), *_given(drawn))
    return y_RD, (x_RD, params, drawn, hidden_RF)


def _backward(spec, saved, grad_RD):
    x_RD, params, drawn, hidden_RF = saved
    (D, F), of = params.up_DF.shape, spec.blocks.of
    arrays = _Arrays(params, drawn, spec.blocks)
    grad_x, grad_up, grad_down_DF, grad_F, grad_3D = pl.pallas_call(
        functools.partial(_backward_kernel, spec=spec, drawn=arrays.drawn),
        in_specs=[of(D), *arrays.of_params, of(D), of(F), *arrays.of_drawn],
        out_specs=[of(D), whole(D, F), whole(D, F), whole(1, F), whole(3, D)],
        out_shape=[x_RD, params.up_DF, params.up_DF, whole_sum(1, F), whole_sum(3, D)],
        scratch_shapes=[pltpu.VMEM((D, F), jnp.float32)] * 2,
        cost_estimate=arrays.cost(x_RD, products=4, arrays=3),
        name="mlp_backward",
        **spec.blocks.options(),
    )(x_RD, *_matrices(params), grad_RD, hidden_RF, *_given(drawn))
    grad_scale, grad_shift, grad_D = grad_3D
    of_params = Params(grad_scale, grad_shift, grad_up, grad_F[0], grad_down_DF.T, grad_D)
    return grad_x, of_params, None


mlp.defvjp(_forward, _backward)


def _given(drawn: Drawn) -> list[jax.Array]:
    return [x for x in drawn if x is not None]


def _matrices(params: Params) -> list[jax.Array]:
    return [x if x.ndim == 2 else x[None] for x in params]


class _Arrays:
    """The blocks of the parameters and of what is drawn.

    `drawn` is the `Drawn` of references that a kernel gets from their list.
    """

    def __init__(self, params: Params, drawn: Drawn, blocks: Blocks):
        self.of_params = [whole(*x.shape) for x in _matrices(params)]
        self.of_drawn = [blocks.of(x.shape[1]) for x in _given(drawn)]
        self._hidden, self._drawn = params.up_F.size, [x is not None for x in drawn]

    def drawn(self, refs) -> Drawn:
        given = iter(refs)
        return Drawn(*(next(given) if is_given else None for is_given in self._drawn))

    def cost(self, x_RD, products: int, arrays: int) -> pl.CostEstimate:
        """Of so many products, which reads or writes so many arrays (R, D)."""
        (R, D), F = x_RD.shape, self._hidden
        of_hidden, of_width = 2 + self._drawn[0], 2 * arrays + self._drawn[1]
        return pl.CostEstimate(
            flops=products * 2 * R * D * F,
            transcendentals=R * F,
            bytes_accessed=R * (of_width * D + of_hidden * F) + 2 * products * D * F,
        )


def _chunks(hidden: int) -> list[slice]:
    size = max(n for n in range(LANES, _CHUNK + 1, LANES) if hidden % n == 0)
    return [slice(start, start + size) for start in range(0, hidden, size)]


def _drop(x, bytes_ref, rate, columns=slice(None)):
    """`dropout.drop` by the bytes, which Mosaic does not compare as they are."""
    if bytes_ref is None:
        return x
    kept = bytes_ref[:, columns].astype(jnp.int32) <= most_kept(rate)
    return jnp.where(kept, x * (1 / kept_share(rate)), 0)


def _drop_branch(x_RD, drawn, spec):
    """A branch, or the gradient of its output, after dropout and stochastic depth."""
    x_RD = _drop(x_RD, drawn.bytes_RD, spec.dropout)
    return x_RD if drawn.factor_R1 is None else x_RD * drawn.factor_R1[...]


def _normed(x, spec) -> Normed:
    return Normed.of(x[...].astype(jnp.float32), spec.norm, spec.norm_eps)


def _forward_kernel(x, scale, shift, up, up_bias, down, down_bias, *refs, spec, drawn):
    drawn, (y, hidden) = drawn(refs[:-2]), refs[-2:]
    share, _ = _FORMS[spec.gelu]
    dtype = y.dtype
    x_RD = (_normed(x, spec).h_RD * scale[...] + shift[...]).astype(dtype)
    sum_RD = jnp.zeros(y.shape, jnp.float32)
    for chunk in _chunks(up.shape[1]):
        hidden_RC = (dot(x_RD, up[:, chunk]) + up_bias[:, chunk]).astype(dtype)
        hidden[:, chunk] = hidden_RC
        z_RC = hidden_RC.astype(jnp.float32)
        z_RC = _drop(z_RC * share(z_RC), drawn.bytes_RF, spec.dropout, chunk)
        sum_RD += dot(z_RC.astype(dtype), down[chunk])
    y_RD = _drop_branch(sum_RD + down_bias[...], drawn, spec)
    y[...] = (x[...].astype(jnp.float32) + y_RD).astype(dtype)


def _backward_kernel(x, scale, shift, up, up_bias, down, down_bias, grad, hidden, *refs, spec,
                     drawn):  # fmt: skip
    drawn, (grad_x, grad_up, grad_down, grad_F, grad_3D, *sums) = drawn(refs[:-7]), refs[-7:]
    (sum_up, sum_down), (share, slope) = sums, _FORMS[spec.gelu]
    dtype = grad_x.dtype
    at_first(*sums, grad_F, grad_3D)
    normed = _normed(x, spec)
    x_RD = (normed.h_RD * scale[...] + shift[...]).astype(dtype)
    whole_RD = grad[...].astype(jnp.float32)
    branch_RD = _drop_branch(whole_RD, drawn, spec)
    g_RD = branch_RD.astype(dtype)
    sum_RD = jnp.zeros(grad_x.shape, jnp.float32)
    for chunk in _chunks(up.shape[1]):
        z_RC = hidden[:, chunk].astype(jnp.float32)
        drop = functools.partial(_drop, bytes_ref=drawn.bytes_RF, rate=spec.dropout, columns=chunk)
        out_RC = drop(z_RC * share(z_RC)).astype(dtype)
        g_RC = drop(dot(g_RD, down[chunk], (1, 1))) * slope(z_RC)
        grad_F[:, chunk] += g_RC.sum(0, keepdims=True)
        g_RC = g_RC.astype(dtype)
        sum_up[:, chunk] += dot(x_RD, g_RC, (0, 0))
        sum_down[:, chunk] += dot(g_RD, out_RC, (0, 0))
        sum_RD += dot(g_RC, up[:, chunk], (1, 1))

    for i, of_rows in enumerate((sum_RD * normed.h_RD, sum_RD, branch_RD)):
        grad_3D[i : i + 1] += of_rows.sum(0, keepdims=True)
    grad_x[...] = (normed.gradient(sum_RD * scale[...]) + whole_RD).astype(dtype)
    at_last(sums, (grad_up, grad_down))
