"""Scaled dot-product attention.

Axes: B images, H heads, N queries, M keys, K width of a head.
"""

import jax
import jax.numpy as jnp


def dot_product_attention(q_BHNK, k_BHMK, v_BHMK, *, dropout_rate=0.0, dropout_key=None):
    """softmax(q k^T / sqrt(K)) v, with dropout of the weights when `dropout_key` is given.

    Heads stand before tokens, so that both products are batched matrix products on contiguous
    blocks, and the softmax is divided by its sum after the product with v, where there are K
    numbers a query to divide instead of M: on a CPU the faster order of both.

    Shapes: (B, H, N, K), (B, H, M, K), (B, H, M, K) -> (B, H, N, K), in the dtype of `v`.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), Eq. 1; ViT's Eqs. 6-8 (appendix A).
    """
    scale = q_BHNK.shape[-1] ** -0.5
    scores_BHNM = jnp.einsum("bhnk,bhmk->bhnm", q_BHNK * scale, k_BHMK)
    largest = jax.lax.stop_gradient(scores_BHNM.max(axis=-1, keepdims=True))
    weights_BHNM = jnp.exp(scores_BHNM - largest)
    sum_BHN1 = weights_BHNM.sum(axis=-1, keepdims=True, dtype=jnp.float32)
    if dropout_key is not None and dropout_rate > 0.0:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights_BHNM.shape)
        weights_BHNM = jnp.where(kept, weights_BHNM / (1.0 - dropout_rate), 0.0)
    out_BHNK = jnp.einsum("bhnm,bhmk->bhnk", weights_BHNM, v_BHMK)
    return (out_BHNK / sum_BHN1).astype(v_BHMK.dtype)
