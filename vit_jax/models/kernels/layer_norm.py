"""LayerNorm on TPU whose gradient also takes that of the residual: one pass over memory each way.

Axes: B images, N tokens, D width. With x of a token, m its mean and r = 1 / sqrt(var(x) + eps):

    h = (x - m) r;  y = h scale + bias
    gs = g scale;  dx = e + r (gs - mean(gs) - h mean(gs h));  dscale = sum g h;  dbias = sum g

where g is the gradient of y, and e that of x by the residual. Statistics are computed again in the
backward pass. All is float32 but the arrays in memory.

Source: Ba et al. 2016 (arXiv:1607.06450), Eq. 4.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel",), vmem_limit_bytes=64 * 2**20
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalize(x_BND, scale_D, bias_D, eps: float):
    """(LayerNorm of x, x), both (B, N, D) in the dtype of x.

    Whoever adds a branch to x takes the second, so that the gradients of both meet in the kernel.
    """
    return _forward(x_BND, scale_D, bias_D, eps)[0]


def _forward(x_BND, scale_D, bias_D, eps):
    tokens, row, _ = _blocks(x_BND.shape)
    y_BND = pl.pallas_call(
        functools.partial(_forward_kernel, eps=eps),
        grid=x_BND.shape[:1],
        in_specs=[tokens, row, row],
        out_specs=tokens,
        out_shape=jax.ShapeDtypeStruct(x_BND.shape, x_BND.dtype),
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(x_BND, arrays=2),
        name="layer_norm_forward",
    )(x_BND, scale_D[None], bias_D[None])
    return (y_BND, x_BND), (x_BND, scale_D)


def _backward(eps, saved, grads):
    x_BND, scale_D = saved
    tokens, row, image_row = _blocks(x_BND.shape)
    rows_B1D = jax.ShapeDtypeStruct((x_BND.shape[0], 1, x_BND.shape[2]), jnp.float32)
    grad_BND, scale_B1D, bias_B1D = pl.pallas_call(
        functools.partial(_backward_kernel, eps=eps),
        grid=x_BND.shape[:1],
        in_specs=[tokens, row, tokens, tokens],
        out_specs=[tokens, image_row, image_row],
        out_shape=[jax.ShapeDtypeStruct(x_BND.shape, x_BND.dtype), rows_B1D, rows_B1D],
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=_cost(x_BND, arrays=4),
        name="layer_norm_backward",
    )(x_BND, scale_D[None], *grads)
    return grad_BND, scale_B1D.sum((0, 1)), bias_B1D.sum((0, 1))


normalize.defvjp(_forward, _backward)


def _blocks(shape) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Of (B, N, D) the tokens of an image; of (1, D) all; of (B, 1, D) the row of an image."""
    _, N, D = shape
    return (
        pl.BlockSpec((None, N, D), lambda b: (b, 0, 0)),
        pl.BlockSpec((1, D), lambda b: (0, 0)),
        pl.BlockSpec((None, 1, D), lambda b: (b, 0, 0)),
    )


def _cost(x_BND, arrays: int) -> pl.CostEstimate:
    """Of a kernel that reads or writes so many arrays; it has no matrix product."""
    size = x_BND.size * x_BND.dtype.itemsize
    transcendentals = x_BND.size // x_BND.shape[-1]
    return pl.CostEstimate(flops=0, transcendentals=transcendentals, bytes_accessed=arrays * size)


def _normalized(x_ND, eps):
    """(x - m) r and r, float32."""
    x_ND = x_ND.astype(jnp.float32)
    centred_ND = x_ND - _mean(x_ND)
    r_N1 = lax.rsqrt(_mean(centred_ND * centred_ND) + eps)
    return centred_ND * r_N1, r_N1


def _mean(x_ND):
    return x_ND.sum(-1, keepdims=True) * (1 / x_ND.shape[-1])


def _forward_kernel(x_ref, scale_ref, bias_ref, y_ref, *, eps):
    h_ND, _ = _normalized(x_ref[...], eps)
    y_ref[...] = (h_ND * scale_ref[...] + bias_ref[...]).astype(y_ref.dtype)


def _backward_kernel(x_ref, scale_ref, g_ref, e_ref, dx_ref, dscale_ref, dbias_ref, *, eps):
    h_ND, r_N1 = _normalized(x_ref[...], eps)
    g_ND = g_ref[...].astype(jnp.float32)
    gs_ND = g_ND * scale_ref[...]
    dx_ND = r_N1 * (gs_ND - _mean(gs_ND) - h_ND * _mean(gs_ND * h_ND))
    dx_ref[...] = (e_ref[...].astype(jnp.float32) + dx_ND).astype(dx_ref.dtype)
    dscale_ref[...] = (g_ND * h_ND).sum(0, keepdims=True)
    dbias_ref[...] = g_ND.sum(0, keepdims=True)
