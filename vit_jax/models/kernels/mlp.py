"""The MLP's branch of a block on TPU: norm, both products, activation, residual, all gradients.

Axes: R rows (the tokens of all images), D width, F hidden width, C hidden units of a chunk.

A program of the kernel takes a block of rows; the kernels of both products stay in VMEM. The
forward pass also writes the hidden units before their activation, all that the backward pass needs
beside its inputs. That one sums the gradients of the parameters over all rows in VMEM, in float32:
neither normalised tokens nor activated hidden units nor the gradients of either leave the chip.
With h = (x - mean) / deviation, the gradient g of the output and the gradient n of scale h + shift:

    dx = (d - mean(d) - h mean(d h)) / deviation + g,  d = scale n

An RMSNorm subtracts no mean.

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eq. 3; Ba et al. 2016 (arXiv:1607.06450).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.models.dropout import kept_share, most_kept
from vit_jax.models.gelu import activations

LANES = 128  # of a vector register
_MOST_ROWS = 512  # of a block
_ROWS_MULTIPLE = 32  # rows of a tile of bytes
_SHARE_OF_VMEM = 0.9  # that a kernel may take
_CHUNK = 1536  # most hidden units at once
# Vector units have an instruction for tanh, and none for the exponential's division.
_FORMS = activations(lambda z: 0.5 + 0.5 * jnp.tanh(0.5 * z))


class Spec(NamedTuple):
    """What a compiled kernel computes, beside the shapes of its arrays.

    gelu: the activation, a key of `gelu.GELU`; dropout: the rate after each product; norm: "layer"
      or "rms"; block_rows: those of a program, see `block_rows`; vmem_bytes: of a core.
    """

    gelu: str
    dropout: float
    norm: str
    norm_eps: float
    block_rows: int
    vmem_bytes: int


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


def block_rows(rows: int, width: int, hidden: int, vmem_bytes: int) -> int | None:
    """Rows of one program; None: the kernel does not take these sizes in so much VMEM."""
    if width % LANES or hidden % LANES:
        return None
    # Kernels and their gradients in bfloat16, sums in float32; two blocks of each array of rows,
    # and what the compiler keeps.
    fixed = width * hidden * (2 * 2 + 2 * 2 + 2 * 4)
    of_row = 2 * (3 * hidden + 4 * 2 * width) + 4 * (3 * _CHUNK + 2 * width)
    for block in range(_MOST_ROWS, LANES - 1, -_ROWS_MULTIPLE):
        if rows % block == 0 and fixed + block * of_row <= _SHARE_OF_VMEM * vmem_bytes:
            return block
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mlp(x_RD, params: Params, drawn: Drawn, spec: Spec):
    """x + factor drop(drop(gelu(norm(x) up + bias)) down + bias), if `block_rows` takes the sizes.

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
    call = _Call(x_RD, params, drawn, spec)
    y_RD, hidden_RF = pl.pallas_call(
        functools.partial(_forward_kernel, spec=spec, drawn=call.drawn),
        in_specs=[call.width, *call.params, *call.of_drawn],
        out_specs=[call.width, call.hidden],
        out_shape=[x_RD, call.like_hidden],
        cost_estimate=call.cost(products=2, arrays=2),
        name="mlp_forward",
        **call.options,
    )(x_RD, *_matrices(params), *_given(drawn))
    return y_RD, (x_RD, params, drawn, hidden_RF)


def _backward(spec, saved, grad_RD):
    x_RD, params, drawn, hidden_RF = saved
    call, (D, F) = _Call(x_RD, params, drawn, spec), params.up_DF.shape
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, F), (3, D))]
    grad_x, grad_up, grad_down_DF, grad_F, grad_3D = pl.pallas_call(
        functools.partial(_backward_kernel, spec=spec, drawn=call.drawn),
        in_specs=[call.width, *call.params, call.width, call.hidden, *call.of_drawn],
        out_specs=[call.width, *map(call.whole, ((D, F), (D, F), (1, F), (3, D)))],
        out_shape=[x_RD, params.up_DF, params.up_DF, *sums],
        scratch_shapes=[pltpu.VMEM((D, F), jnp.float32)] * 2,
        cost_estimate=call.cost(products=4, arrays=3),
        name="mlp_backward",
        **call.options,
    )(x_RD, *_matrices(params), grad_RD, hidden_RF, *_given(drawn))
    grad_scale, grad_shift, grad_D = grad_3D
    of_params = Params(grad_scale, grad_shift, grad_up, grad_F[0], grad_down_DF.T, grad_D)
    return grad_x, of_params, None


mlp.defvjp(_forward, _backward)


def _given(drawn: Drawn) -> list[jax.Array]:
    return [x for x in drawn if x is not None]


def _matrices(params: Params) -> list[jax.Array]:
    return [x if x.ndim == 2 else x[None] for x in params]


class _Call:
    """How a kernel goes through its arrays: `width` and `hidden` are blocks of (R, D), (R, F).

    `drawn` is the `Drawn` of references that a kernel gets from their list.
    """

    def __init__(self, x_RD, params: Params, drawn: Drawn, spec: Spec):
        (rows, D), F = x_RD.shape, params.up_F.size
        of_rows = {n: pl.BlockSpec((spec.block_rows, n), lambda i: (i, 0)) for n in (D, F, 1)}
        self.width, self.hidden = of_rows[D], of_rows[F]
        self.params = [self.whole(x.shape) for x in _matrices(params)]
        self.of_drawn = [of_rows[x.shape[1]] for x in _given(drawn)]
        self.like_hidden = jax.ShapeDtypeStruct((rows, F), x_RD.dtype)
        self._sizes, self._drawn = (rows, D, F), [x is not None for x in drawn]
        compiler_params = pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=int(_SHARE_OF_VMEM * spec.vmem_bytes),
        )
        grid = (rows // spec.block_rows,)
        self.options = {"grid": grid, "compiler_params": compiler_params}

    def whole(self, shape) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0, 0), pipeline_mode=pl.Buffered(1))

    def drawn(self, refs) -> Drawn:
        given = iter(refs)
        return Drawn(*(next(given) if is_given else None for is_given in self._drawn))

    def cost(self, products: int, arrays: int) -> pl.CostEstimate:
        """Of so many products, which reads or writes so many arrays (R, D)."""
        R, D, F = self._sizes
        of_hidden, of_width = 2 + self._drawn[0], 2 * arrays + self._drawn[1]
        return pl.CostEstimate(
            flops=products * 2 * R * D * F,
            transcendentals=R * F,
            bytes_accessed=R * (of_width * D + of_hidden * F) + 2 * products * D * F,
        )


def _chunks(hidden: int) -> list[slice]:
    size = max(n for n in range(LANES, _CHUNK + 1, LANES) if hidden % n == 0)
    return [slice(start, start + size) for start in range(0, hidden, size)]


def _dot(x, y, axes=(1, 0)):
    """The product of two matrices over these axes, in float32."""
    over = tuple((axis,) for axis in axes)
    return lax.dot_general(x, y, (over, ((), ())), preferred_element_type=jnp.float32)


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


def _normalise(x, spec):
    """(x - mean) / deviation in float32, and 1 / deviation (R, 1)."""
    x_RD = x[...].astype(jnp.float32)
    square = (x_RD * x_RD).mean(1, keepdims=True)
    if spec.norm == "layer":
        mean = x_RD.mean(1, keepdims=True)
        x_RD, square = x_RD - mean, jnp.maximum(square - mean * mean, 0)
    factor = lax.rsqrt(square + spec.norm_eps)
    return x_RD * factor, factor


def _forward_kernel(x, scale, shift, up, up_bias, down, down_bias, *refs, spec, drawn):
    drawn, (y, hidden) = drawn(refs[:-2]), refs[-2:]
    share, _ = _FORMS[spec.gelu]
    dtype = y.dtype
    x_RD = (_normalise(x, spec)[0] * scale[...] + shift[...]).astype(dtype)
    sum_RD = jnp.zeros(y.shape, jnp.float32)
    for chunk in _chunks(up.shape[1]):
        hidden_RC = (_dot(x_RD, up[:, chunk]) + up_bias[:, chunk]).astype(dtype)
        hidden[:, chunk] = hidden_RC
        z_RC = hidden_RC.astype(jnp.float32)
        z_RC = _drop(z_RC * share(z_RC), drawn.bytes_RF, spec.dropout, chunk)
        sum_RD += _dot(z_RC.astype(dtype), down[chunk])
    y_RD = _drop_branch(sum_RD + down_bias[...], drawn, spec)
    y[...] = (x[...].astype(jnp.float32) + y_RD).astype(dtype)


def _backward_kernel(x, scale, shift, up, up_bias, down, down_bias, grad, hidden, *refs, spec,
                     drawn):  # fmt: skip
    drawn, (grad_x, grad_up, grad_down, grad_F, grad_3D, *sums) = drawn(refs[:-7]), refs[-7:]
    (sum_up, sum_down), (share, slope) = sums, _FORMS[spec.gelu]
    dtype = grad_x.dtype

    @pl.when(pl.program_id(0) == 0)
    def start():
        for each in (*sums, grad_F, grad_3D):
            each[...] = jnp.zeros_like(each)

    normed_RD, factor_R1 = _normalise(x, spec)
    x_RD = (normed_RD * scale[...] + shift[...]).astype(dtype)
    whole_RD = grad[...].astype(jnp.float32)
    branch_RD = _drop_branch(whole_RD, drawn, spec)
    g_RD = branch_RD.astype(dtype)
    sum_RD = jnp.zeros(grad_x.shape, jnp.float32)
    for chunk in _chunks(up.shape[1]):
        z_RC = hidden[:, chunk].astype(jnp.float32)
        drop = functools.partial(_drop, bytes_ref=drawn.bytes_RF, rate=spec.dropout, columns=chunk)
        out_RC = drop(z_RC * share(z_RC)).astype(dtype)
        g_RC = drop(_dot(g_RD, down[chunk], (1, 1))) * slope(z_RC)
        grad_F[:, chunk] += g_RC.sum(0, keepdims=True)
        g_RC = g_RC.astype(dtype)
        sum_up[:, chunk] += _dot(x_RD, g_RC, (0, 0))
        sum_down[:, chunk] += _dot(g_RD, out_RC, (0, 0))
        sum_RD += _dot(g_RC, up[:, chunk], (1, 1))

    for i, of_rows in enumerate((sum_RD * normed_RD, sum_RD, branch_RD)):
        grad_3D[i : i + 1] += of_rows.sum(0, keepdims=True)
    d_RD = sum_RD * scale[...]
    mean_R1 = d_RD.mean(1, keepdims=True) if spec.norm == "layer" else 0
    d_RD -= normed_RD * (d_RD * normed_RD).mean(1, keepdims=True) + mean_R1
    grad_x[...] = (d_RD * factor_R1 + whole_RD).astype(dtype)

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def end():
        grad_up[...] = sum_up[...].astype(grad_up.dtype)
        grad_down[...] = sum_down[...].astype(grad_down.dtype)
