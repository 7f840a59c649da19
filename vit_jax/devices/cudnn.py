"""cuDNN's attention as plans see it where JAX has no plugin for CUDA: shapes to count, no program.

JAX traces cuDNN's attention only where its library is installed.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def described_attention(q_BNHK: jax.Array, k_BMHK: jax.Array, v_BMHK: jax.Array) -> jax.Array:
    """The operands and results of the functions that XLA calls; it cannot be compiled."""
    return _forward(q_BNHK, k_BMHK, v_BMHK)[0]


def _forward(
    q_BNHK: jax.Array, k_BMHK: jax.Array, v_BMHK: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    B, N, H, _ = q_BNHK.shape
    results = jax.ShapeDtypeStruct(q_BNHK.shape, q_BNHK.dtype), _float32(B, H, N)
    call = jax.ffi.ffi_call("__cudnn$fmhaSoftmax", results)
    out_BNHK, sums_BHN = call(q_BNHK, k_BMHK, v_BMHK)
    return out_BNHK, (q_BNHK, k_BMHK, v_BMHK, sums_BHN, out_BNHK)


def _backward(saved: tuple[jax.Array, ...], grad_BNHK: jax.Array) -> tuple[jax.Array, ...]:
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
    return tuple(jax.ffi.ffi_call("__cudnn$fmhaSoftmaxBackward", results)(*saved, grad_BNHK))


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


described_attention.defvjp(_forward, _backward)
