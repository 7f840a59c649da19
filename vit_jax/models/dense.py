"""Dense layers, plain and with a low-rank adapter. The computation uses `dtype`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.block_ops import AddBias, Multiply, add_bias_plainly


def adapter_update(lora_a: np.ndarray, lora_b: np.ndarray) -> np.ndarray:
    """The matrix A B (D, F) that the adapter of a `LoraProduct` adds to its kernel."""
    return lora_a @ lora_b


@jax.custom_vjp
def multiply_to_float32(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x (..., C) times kernel (C, F), summed in float32. Operands and gradients keep their dtype.

    In place of bfloat16, float32 operands would cost a GPU twice the time or more; TPUs round them.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _multiply_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return multiply_to_float32(x, kernel), (x, kernel)


def _multiply_backward(operands: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = operands
    grad = grad.astype(x.dtype)
    # A transposed kernel would be gathered once more from its shards.
    return jnp.einsum("...f,cf->...c", grad, kernel), jnp.einsum("...c,...f->cf", x, grad)


multiply_to_float32.defvjp(_multiply_forward, _multiply_backward)


class Product(nn.Module):
    """A dense layer that leaves its bias to the caller: x -> (x kernel, bias or None).

    `multiply` is the form of the product; see `block_ops.Multiply`. `scale_F`, unless None,
    multiplies the kernel and the bias, which costs less than to multiply the output.

    Shapes: (..., C), (features,) -> (..., features), (features,).
    """

    features: int
    use_bias: bool = True
    dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.xavier_uniform()
    bias_init: Callable = nn.initializers.zeros
    multiply: Multiply = jnp.dot

    @nn.compact
    def __call__(
        self, x: jax.Array, scale_F: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        kernel, bias = self._params(x.shape[-1], scale_F)
        return self.multiply(x.astype(self.dtype), kernel), bias

    @nn.nowrap
    def _params(self, inputs: int, scale_F: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """The kernel (inputs, features) in `dtype`, and the bias in float32; both scaled."""
        kernel = self.param("kernel", self.kernel_init, (inputs, self.features))
        bias = self.param("bias", self.bias_init, (self.features,)) if self.use_bias else None
        if scale_F is not None:
            kernel, bias = kernel * scale_F[None], None if bias is None else bias * scale_F
        return kernel.astype(self.dtype), bias


class ProductParams(Product):
    """The parameters of a `Product` that its caller computes: C -> ((C, features), (features,))."""

    @nn.compact
    def __call__(  # type: ignore[override] # it takes a width
        self, inputs: int, scale_F: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        return self._params(inputs, scale_F)


class LoraProduct(Product):
    """`Product` with a low-rank adapter: x -> (x W + (x A) B, bias).

    B starts at zero, so a new adapter leaves the output bit-identical. `adapter_update` computes
    A B, which is added to W. The paper's factor alpha / r is 1: changing it is much like changing
    the learning rate. Shapes of A and B: (C, rank), (rank, features).

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """

    rank: int = 8

    @nn.compact
    def __call__(
        self, x: jax.Array, scale_F: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        assert scale_F is None, "adapters are of queries and values, which nothing scales"
        y, bias = super().__call__(x)
        normal = nn.initializers.lecun_normal()
        a_CR = self.param("lora_a", normal, (x.shape[-1], self.rank))
        b_RF = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return y + x.astype(y.dtype) @ a_CR.astype(y.dtype) @ b_RF.astype(y.dtype), bias


class Dense(Product):
    """A dense layer, whose bias is added by one of its forms.

    Shapes: (..., C) -> (..., features).
    """

    add_bias: AddBias = add_bias_plainly

    @nn.compact
    def __call__(  # type: ignore[override] # it adds the bias
        self, x: jax.Array, scale_F: jax.Array | None = None
    ) -> jax.Array:
        y, bias = super().__call__(x, scale_F)
        return y if bias is None else self.add_bias(y, bias)
