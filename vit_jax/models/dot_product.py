"""Scaled dot-product attention: one interface, several forms.

Axes: B images, H heads, N queries, M keys, K width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.dropout import drop

# attend(q_BNHK, k_BMHK, v_BMHK, *, bias_BHNM, kept_BHNM, dropout, num_keys_B) -> (B, N, H, K), as
# `dot_product_attention` has it.
Attend = Callable[..., jax.Array]


def dot_product_attention(
    q_BNHK: jax.Array,
    k_BMHK: jax.Array,
    v_BMHK: jax.Array,
    *,
    bias_BHNM: jax.Array | None = None,
    kept_BHNM: jax.Array | None = None,
    dropout: float = 0.0,
    num_keys_B: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K) + bias) v, with dropout on the weights if `kept_BHNM` is given.

    The head axis precedes the token axis, so both products are batched matrix products on
    contiguous blocks. The division by the softmax's sum follows the product with v: that divides K
    numbers a query instead of M. The gradient is written by hand and does the same. The backward
    pass keeps only one N x M array, the undivided weights (two with dropout), and both passes
    read and write N x M arrays as rarely as possible.

    Args:
      q_BNHK, k_BMHK, v_BMHK: queries, keys, values.
      bias_BHNM: added to the logits, in the dtype of the values.
      kept_BHNM, dropout: mask of the weights that are kept, from `dropout.draw_kept`, and its rate.
      num_keys_B: only so many first keys of each image count, at least 1; None: all count.

    Returns:
      (B, N, H, K) in the dtype of the values.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), Eq. 1; ViT's Eqs. 6-8 (appendix A); the sum in
      the gradient taken over K: Dao et al. 2022 (arXiv:2205.14135), appendix B.2.
    """
    q_BHNK, k_BHMK, v_BHMK = (jnp.swapaxes(x, 1, 2) for x in (q_BNHK, k_BMHK, v_BMHK))
    scale = q_BHNK.shape[-1] ** -0.5
    has_bias = bias_BHNM is not None
    arrays = q_BHNK * scale, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, num_keys_B
    out_BHNK = _attend(*arrays, has_bias, dropout)
    return jnp.swapaxes(out_BHNK, 1, 2)


def plain_attention(
    q_BNHK: jax.Array,
    k_BMHK: jax.Array,
    v_BMHK: jax.Array,
    *,
    bias_BHNM: jax.Array | None = None,
    kept_BHNM: jax.Array | None = None,
    dropout: float = 0.0,
    num_keys_B: jax.Array | None = None,
) -> jax.Array:
    """`dot_product_attention` as the paper writes it, with JAX's automatic gradient."""
    scale = q_BNHK.shape[-1] ** -0.5
    scores_BHNM = jnp.einsum("bnhk,bmhk->bhnm", q_BNHK * scale, k_BMHK)
    if bias_BHNM is not None:
        scores_BHNM += bias_BHNM
    scores_BHNM = hide_padding(scores_BHNM, num_keys_B)
    weights_BHNM = jax.nn.softmax(scores_BHNM, axis=-1)
    weights_BHNM = _drop(weights_BHNM, kept_BHNM, dropout)
    return jnp.einsum("bhnm,bmhk->bnhk", weights_BHNM, v_BMHK)


def choose_attention(platform: str) -> Attend:
    """The form without kernels that is fastest on "cpu", "gpu" or "tpu".

    The TPU compiler optimises the plain form better: by its own estimate, a training step of
    ViT-B/16 on v5e takes 113.5 instead of 135.3 million cycles, and 156.0 instead of 186.2 with
    full remat. docs/explanation/attention.md has other sizes and layouts, and the command.
    """
    return plain_attention if platform == "tpu" else dot_product_attention


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q_BHNK: jax.Array,
    k_BHMK: jax.Array,
    v_BHMK: jax.Array,
    bias_BHNM: jax.Array | None,
    kept_BHNM: jax.Array | None,
    num_keys_B: jax.Array | None,
    has_bias: bool,
    dropout: float,
) -> jax.Array:
    arrays = q_BHNK, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, num_keys_B
    return _attend_forward(*arrays, has_bias, dropout)[0]


def _attend_forward(
    q_BHNK: jax.Array,
    k_BHMK: jax.Array,
    v_BHMK: jax.Array,
    bias_BHNM: jax.Array | None,
    kept_BHNM: jax.Array | None,
    num_keys_B: jax.Array | None,
    has_bias: bool,
    dropout: float,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    scores_BHNM = jnp.einsum("bhnk,bhmk->bhnm", q_BHNK, k_BHMK)
    if bias_BHNM is not None:
        scores_BHNM += bias_BHNM
    scores_BHNM = hide_padding(scores_BHNM, num_keys_B)
    weights_BHNM = jnp.exp(scores_BHNM - scores_BHNM.max(axis=-1, keepdims=True))
    sum_BHN1 = weights_BHNM.sum(axis=-1, keepdims=True, dtype=jnp.float32)
    dropped_BHNM = _drop(weights_BHNM, kept_BHNM, dropout)
    out_BHNK = jnp.einsum("bhnm,bhmk->bhnk", dropped_BHNM, v_BHMK)
    out_BHNK = (out_BHNK / sum_BHN1).astype(v_BHMK.dtype)
    return out_BHNK, (q_BHNK, k_BHMK, v_BHMK, kept_BHNM, weights_BHNM, sum_BHN1, out_BHNK)


def _attend_backward(
    has_bias: bool, dropout: float, saved: tuple[Any, ...], grad_BHNK: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Gradients, with w the undivided weights, s their sum, o the output and g its gradient:

    grad v = w^T (g / s);  grad scores = grad bias = w * ((g / s) v^T - <g / s, o>).
    """
    q_BHNK, k_BHMK, v_BHMK, kept_BHNM, weights_BHNM, sum_BHN1, out_BHNK = saved
    grad_BHNK = (grad_BHNK / sum_BHN1).astype(v_BHMK.dtype)
    grad_v_BHMK = jnp.einsum("bhnm,bhnk->bhmk", _drop(weights_BHNM, kept_BHNM, dropout), grad_BHNK)
    mean_BHN1 = (grad_BHNK * out_BHNK).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    grad_BHNM = jnp.einsum("bhnk,bhmk->bhnm", grad_BHNK, v_BHMK)
    grad_BHNM = _drop(grad_BHNM, kept_BHNM, dropout)
    grad_BHNM = weights_BHNM * (grad_BHNM - mean_BHN1.astype(grad_BHNM.dtype))
    grad_q_BHNK = jnp.einsum("bhnm,bhmk->bhnk", grad_BHNM, k_BHMK)
    grad_k_BHMK = jnp.einsum("bhnm,bhnk->bhmk", grad_BHNM, q_BHNK)
    return grad_q_BHNK, grad_k_BHMK, grad_v_BHMK, grad_BHNM if has_bias else None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def hide_padding(scores_BHNM: jax.Array, num_keys_B: jax.Array | None) -> jax.Array:
    """The logits, -inf for keys from `num_keys_B` on; such a key gets no gradient either."""
    if num_keys_B is None:
        return scores_BHNM
    numbers_M = jnp.arange(scores_BHNM.shape[3])
    counts_BHNM = numbers_M[None, None, None] < num_keys_B[:, None, None, None]
    return jnp.where(counts_BHNM, scores_BHNM, -jnp.inf)


def _drop(x_BHNM: jax.Array, kept_BHNM: jax.Array | None, dropout: float) -> jax.Array:
    if kept_BHNM is None:
        return x_BHNM
    return drop(x_BHNM, kept_BHNM, dropout)
