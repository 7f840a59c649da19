"""The head of self-distillation and its losses.

The head is an MLP with a bottleneck and prototypes of length 1.

Source: Caron et al. 2021 (arXiv:2104.14294), section 3.2 and appendix C.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_INIT = nn.initializers.truncated_normal(0.02)
_EPS = 1e-12


class PrototypeHead(nn.Module):
    """Cosines of a feature with prototypes: (..., D) -> (..., K), float32, from -1 to 1.

    Fields:
      num_prototypes: K.
      hidden: width of the MLP's hidden layers.
      bottleneck: width of the prototypes.
      layers: number of dense layers before the prototypes, the bottleneck included.
    """

    num_prototypes: int
    hidden: int = 2048
    bottleneck: int = 256
    layers: int = 3
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, learns_prototypes: jax.Array | bool = True) -> jax.Array:
        for i in range(self.layers - 1):
            dense = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=_INIT, name=f"hidden_{i}")
            x = nn.gelu(dense(x), approximate=False)
        dense = nn.Dense(self.bottleneck, dtype=self.dtype, kernel_init=_INIT, name="bottleneck")
        x = normalised(dense(x).astype(jnp.float32), axis=-1).astype(self.dtype)
        prototypes = Prototypes((self.bottleneck, self.num_prototypes), name="prototypes")
        kernel = prototypes()
        kernel = jnp.where(learns_prototypes, kernel, jax.lax.stop_gradient(kernel))
        kernel = normalised(kernel, axis=0).astype(self.dtype)
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


class Prototypes(nn.Module):
    """The parameters of the prototypes, one a column, of any length."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", _INIT, self.shape)


def normalised(x: jax.Array, axis: int) -> jax.Array:
    """`x` with length 1 along `axis`."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=axis, keepdims=True) + _EPS)


def cross_entropies(
    student_BVK: jax.Array, targets_BGK: jax.Array, temperature: float
) -> jax.Array:
    """Mean cross-entropy over all pairs of a student's view and another view of the teacher.

    The first G of the student's V views are the teacher's; a view is never compared with
    itself.

    Shapes: logits (B, V, K), probabilities (B, G, K) -> (B,), float32.
    """
    (_, views, _), taught = student_BVK.shape, targets_BGK.shape[1]
    logs_BVK = jax.nn.log_softmax(student_BVK / temperature, axis=-1)
    all_B1K = targets_BGK.sum(axis=1, keepdims=True)
    others_BGK = all_B1K - targets_BGK
    total_B = -(others_BGK * logs_BVK[:, :taught]).sum(axis=(1, 2))
    total_B -= (all_B1K * logs_BVK[:, taught:]).sum(axis=(1, 2))
    return total_B / (taught * (views - 1))


def patch_entropies(
    student_BUMK: jax.Array, targets_BUMK: jax.Array, counts_BUM: jax.Array, temperature: float
) -> jax.Array:
    """Mean cross-entropy over the hidden patches of each of U views; 0 if there are none.

    `counts_BUM` is 1 for the hidden patches, and 0 for places without one.

    Shapes: logits (B, U, M, K), probabilities (B, U, M, K) -> (B, U), float32.
    """
    logs_BUMK = jax.nn.log_softmax(student_BUMK / temperature, axis=-1)
    each_BUM = -(targets_BUMK * logs_BUMK).sum(axis=-1) * counts_BUM
    return each_BUM.sum(axis=-1) / jnp.maximum(counts_BUM.sum(axis=-1), 1)
