"""Queries, keys and values of a block on TPU: the norm before, three products, all gradients.

Axes: R rows (the tokens of all images), D width.

The three kernels stay in VMEM, and the backward pass sums their gradients there over all rows, in
float32. Neither normalised tokens nor their gradients leave the chip.

Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), Eqs. 2 and 5.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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


class Spec(NamedTuple):
    """The form of a compiled kernel; norm: "layer" or "rms"; blocks: see `find_blocks`."""

    norm: str
    norm_eps: float
    blocks: Blocks


def find_blocks(rows: int, vmem_bytes: int, width: int) -> Blocks | None:
    """Blocks of so many rows; None: the kernel does not take these sizes in so much VMEM."""
    if width % LANES:
        return None
    # Kernels and their gradients in bfloat16, sums in float32; two blocks of each array of rows,
    # and what the compiler keeps.
    fixed, of_row = 3 * width**2 * (2 + 2 + 4), width * (2 * 2 * 6 + 4 * 6)
    return Blocks.fitting(rows, fixed, of_row, vmem_bytes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def project(
    x_RD: jax.Array,
    norm_params: tuple[jax.Array, jax.Array],
    layers: Sequence[tuple[jax.Array, jax.Array]],
    spec: Spec,
) -> tuple[jax.Array, ...]:
    """norm(x) kernel + bias for each layer, and x, if `find_blocks` takes the sizes.

    It returns x, for the residual, so that the kernel adds the gradients of both uses.

    Args:
      x_RD: bfloat16.
      norm_params: scale and shift (D,), float32.
      layers: three pairs of a kernel (D, D), bfloat16, and a bias (D,), float32.
      spec: what to compute.

    Returns:
      Three arrays (R, D), then x.
    """
    return _forward(x_RD, norm_params, layers, spec)[0]


@functools.partial(jax.jit, static_argnames="spec")  # traced once for all layers
def _forward(
    x_RD: jax.Array,
    norm_params: tuple[jax.Array, jax.Array],
    layers: Sequence[tuple[jax.Array, jax.Array]],
    spec: Spec,
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    D, of = x_RD.shape[1], spec.blocks.of
    kernels, biases_3D = _split(layers)
    qkv = pl.pallas_call(
        functools.partial(_forward_kernel, spec=spec),
        in_specs=[of(D), *[whole(1, D)] * 2, whole(3, D), *[whole(D, D)] * 3],
        out_specs=[of(D)] * 3,
        out_shape=[x_RD] * 3,
        cost_estimate=_cost(x_RD, products=3, arrays=4),
        name="projections_forward",
        **spec.blocks.options(),
    )(x_RD, *(p[None] for p in norm_params), biases_3D, *kernels)
    return (*qkv, x_RD), (x_RD, norm_params, layers)


@functools.partial(jax.jit, static_argnames="spec")
def _backward(spec: Spec, saved: tuple[Any, ...], grads: Sequence[jax.Array]) -> tuple[Any, ...]:
    x_RD, norm_params, layers = saved
    D, of = x_RD.shape[1], spec.blocks.of
    kernels, _ = _split(layers)
    grad_x, *grad_kernels, grads_5D = pl.pallas_call(
        functools.partial(_backward_kernel, spec=spec),
        in_specs=[of(D), *[whole(1, D)] * 2, *[whole(D, D)] * 3, *[of(D)] * 4],
        out_specs=[of(D), *[whole(D, D)] * 3, whole(5, D)],
        out_shape=[x_RD, *kernels, whole_sum(5, D)],
        scratch_shapes=[pltpu.VMEM((D, D), jnp.float32)] * 3,
        cost_estimate=_cost(x_RD, products=6, arrays=6),
        name="projections_backward",
        **spec.blocks.options(),
    )(x_RD, *(p[None] for p in norm_params), *kernels, *grads)
    grad_scale, grad_shift, *grad_biases = grads_5D
    return grad_x, (grad_scale, grad_shift), tuple(zip(grad_kernels, grad_biases, strict=True))


project.defvjp(_forward, _backward)


def _split(
    layers: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The kernels, and the biases (3, D)."""
    kernels, biases = zip(*layers, strict=True)
    return kernels, jnp.stack(biases)


def _cost(x_RD: jax.Array, products: int, arrays: int) -> pl.CostEstimate:
    """Of so many products, which reads or writes so many arrays (R, D)."""
    R, D = x_RD.shape
    moved = 2 * arrays * R * D + 2 * products * D * D
    return pl.CostEstimate(flops=products * 2 * R * D * D, transcendentals=R, bytes_accessed=moved)


def _forward_kernel(
    x: jax.Ref, scale: jax.Ref, shift: jax.Ref, biases: jax.Ref, *refs: jax.Ref, spec: Spec
) -> None:
    x_RD = (Normed.of(x, spec.norm, spec.norm_eps).h_RD * scale[...] + shift[...]).astype(x.dtype)
    for i, (kernel, out) in enumerate(zip(refs[:3], refs[3:], strict=True)):
        out[...] = (dot(x_RD, kernel[...]) + biases[i : i + 1]).astype(out.dtype)


def _backward_kernel(
    x: jax.Ref, scale: jax.Ref, shift: jax.Ref, *refs: jax.Ref, spec: Spec
) -> None:
    kernels, grads, grad_residual = refs[:3], refs[3:6], refs[6]
    (grad_x, *grad_kernels, grads_5D), sums = refs[7:12], refs[12:]
    at_first(*sums, grads_5D)
    normed = Normed.of(x, spec.norm, spec.norm_eps)
    x_RD = (normed.h_RD * scale[...] + shift[...]).astype(x.dtype)
    sum_RD = jnp.zeros(x.shape, jnp.float32)
    for i, (kernel, grad, total) in enumerate(zip(kernels, grads, sums, strict=True)):
        grad_RD = grad[...]
        total[...] += dot(x_RD, grad_RD, (0, 0))
        grads_5D[2 + i : 3 + i] += grad_RD.astype(jnp.float32).sum(0, keepdims=True)
        sum_RD += dot(grad_RD, kernel[...], (1, 1))
    for i, of_rows in enumerate((sum_RD * normed.h_RD, sum_RD)):
        grads_5D[i : i + 1] += of_rows.sum(0, keepdims=True)
    grad_RD = normed.gradient(sum_RD * scale[...]) + grad_residual[...].astype(jnp.float32)
    grad_x[...] = grad_RD.astype(grad_x.dtype)
    at_last(sums, grad_kernels)
