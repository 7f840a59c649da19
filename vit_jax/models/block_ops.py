"""Forms of the operations of a Transformer's block that have more than one.

Axes: B images, N tokens, D width. Models know no devices: who does gives a model its `BlockOps`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.dot_product import Attend, dot_product_attention
from vit_jax.models.dropout import DrawBytes, threefry_bytes

# add_bias(x_BND, bias_D) -> x_BND + bias_D, in the dtype of x_BND.
AddBias = Callable[[jax.Array, jax.Array], jax.Array]

# repeat(x_1ND, B, dtype) -> (B or 1, N, D): the same tokens for each image; 1: to be broadcast.
Repeat = Callable[[jax.Array, int, Any], jax.Array]

# multiply(x, kernel_CF) -> (..., F) of x (..., C).
Multiply = Callable[[jax.Array, jax.Array], jax.Array]

# kernel(qkv, biases, turns, num_keys[, parts]) -> (B, N, H, K): attention without dropout of three
# arrays (B, N, H, K) plus their biases (H, K), and each bias may be None; `turns` (B or 1, N, K),
# unless None, turns queries and keys, see `rotary.turn`. Only the first `num_keys` tokens are keys,
# an int or int32 (B,) by image; the others are padding; None: all are keys. With `parts` each row
# holds several pictures, see `packing`, and `num_keys` is of each picture.
AttentionKernel = Callable[..., jax.Array]


class RowKernels(NamedTuple):
    """Kernels that take the tokens of all images as R = B N rows, and the block of layers for them.

    block: takes the place of `layers.EncoderBlock`, with the same parameters.
    find_mlp: find(x_BND, F, gated) -> kernel(x_RD, params, drawn, **fields) -> (R, D): the branch
      of an MLP with F hidden units, from its norm to the residual; see `kernels.mlp` for the
      arguments. None: there is no kernel for such tokens.
    find_projections: find(x_BND) -> kernel(x_RD, norm_params, layers, **fields) -> (q_RD, k_RD,
      v_RD, x_RD): the norm before attention and its projections; see `kernels.projections`. None:
      as above.
    keeps_hidden: whether the kernel of an MLP keeps its hidden units for the backward pass, which
      else computes them again.
    """

    block: type[nn.Module]
    find_mlp: Callable[[jax.Array, int, bool], Callable | None]
    find_projections: Callable[[jax.Array], Callable | None]
    keeps_hidden: bool = True


def add_bias_plainly(x: jax.Array, bias_D: jax.Array | None) -> jax.Array:
    """x (..., D) plus its bias, in the dtype of x; None: it has none."""
    if bias_D is None:
        return x
    return x + jnp.reshape(bias_D.astype(x.dtype), (1,) * (x.ndim - 1) + (-1,))


add_bias_on_tpu = jax.custom_vjp(add_bias_plainly)
"""`add_bias_plainly`; the bias gets the gradient sum(g) = 1 g by a product, summed in float32."""


def _add_bias_forward(x: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, None]:
    return add_bias_plainly(x, bias_D), None


def _add_bias_backward(_: None, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # One row of ones: of more rows all would be reduced over the devices.
    ones = jnp.ones((1, *grad.shape[:-1]), grad.dtype)
    summed = tuple(range(grad.ndim - 1))
    over = (tuple(i + 1 for i in summed), summed)
    grad_1D = jax.lax.dot_general(ones, grad, (over, ((), ())), preferred_element_type=jnp.float32)
    return grad, grad_1D[0]


add_bias_on_tpu.defvjp(_add_bias_forward, _add_bias_backward)


def repeat_plainly(x_1ND: jax.Array, rows: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x_1ND in `dtype`."""
    del rows
    return x_1ND.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def repeat_in_order(
    x_1ND: jax.Array,
    rows: int,
    dtype: jax.typing.DTypeLike,
    in_order: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """x_1ND for each of the rows; its gradient is the sum of in_order(gradients), in float32."""
    del in_order
    return jnp.broadcast_to(x_1ND.astype(dtype), (rows, *x_1ND.shape[1:]))


def _repeat_forward(
    x_1ND: jax.Array,
    rows: int,
    dtype: jax.typing.DTypeLike,
    in_order: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, None]:
    return repeat_in_order(x_1ND, rows, dtype, in_order), None


def _repeat_backward(
    rows: int,
    dtype: jax.typing.DTypeLike,
    in_order: Callable[[jax.Array], jax.Array],
    _: None,
    grad_BND: jax.Array,
) -> tuple[jax.Array]:
    del rows, dtype
    return (in_order(grad_BND).sum(axis=0, keepdims=True, dtype=jnp.float32),)


repeat_in_order.defvjp(_repeat_forward, _repeat_backward)


@jax.custom_vjp
def multiply_on_cpu(x: jax.Array, kernel_CF: jax.Array) -> jax.Array:
    """x (..., C) times a kernel (C, F); the kernel's gradient has the form that CPUs compute best.

    JAX makes the gradient of `jnp.dot` with F as its first axis and transposes it. XLA (jax 0.10.2)
    then calls a slower routine than for other products: 57 instead of 88 GFLOP/s in float32 on one
    AMD EPYC core, in a step of ViT-Ti/16. It has no forward-mode derivative.
    """
    return jnp.dot(x, kernel_CF)


def _multiply_forward(
    x: jax.Array, kernel_CF: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # `jnp.dot` here too, so that the policies of remat see a product.
    return jnp.dot(x, kernel_CF), (x, kernel_CF)


def _multiply_backward(
    saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_CF = saved
    rows = tuple(range(x.ndim - 1))
    return (
        jax.lax.dot_general(grad, kernel_CF, (((x.ndim - 1,), (1,)), ((), ()))),
        jax.lax.dot_general(x, grad, ((rows, rows), ((), ()))),
    )


multiply_on_cpu.defvjp(_multiply_forward, _multiply_backward)


# constrain(x, axes) -> x: constrain the sharding of an activation. `axes` holds "batch", "tensor"
# or None for each axis of x. Models know no mesh; the caller that has one passes this function.
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Return x unchanged: the `Constrain` of a model on one device."""
    del axes
    return x


@dataclasses.dataclass(frozen=True)
class BlockOps:
    """How a block computes; the defaults are without kernels.

    attend: attention, see `attention.Attend`.
    attention_kernel: takes the place of `attend`, see `AttentionKernel`; None: there is none.
    rows: kernels of norms, projections and MLPs, which go with an `attention_kernel`.
    multiply: of dense layers in a block, see `Multiply`.
    add_bias: of dense layers.
    repeat: of positions and learned tokens.
    recompute_norms: whether the backward pass computes norms again, and keeps only their inputs.
    draw_bytes: random bytes for the masks of dropout.
    token_multiple: an attention kernel takes tokens padded to a multiple of it, from the first
      block to the last.
    """

    attend: Attend = dot_product_attention
    attention_kernel: AttentionKernel | None = None
    rows: RowKernels | None = None
    multiply: Multiply = jnp.dot
    add_bias: AddBias = add_bias_plainly
    repeat: Repeat = repeat_plainly
    recompute_norms: bool = False
    draw_bytes: DrawBytes = threefry_bytes
    token_multiple: int = 1

    def __post_init__(self) -> None:
        assert self.token_multiple == 1 or self.attention_kernel, "`attend` knows no padding"

    @property
    def recomputed(self) -> "BlockOps":
        """The operations of a block that the backward pass computes again."""
        if self.rows is None:
            return self
        return dataclasses.replace(self, rows=self.rows._replace(keeps_hidden=False))


PLAIN = BlockOps()
