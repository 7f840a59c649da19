"""Scaled dot-product attention.

Axes: B images, H heads, N queries, M keys, K width of a head.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


def dot_product_attention(
    q_BHNK, k_BHMK, v_BHMK, *, bias_BHNM=None, dropout_rate=0.0, dropout_key=None
):
    """softmax(q k^T / sqrt(K) + bias) v, with dropout of the weights when `dropout_key` is given.

    Heads stand before tokens, so that both products are batched matrix products on contiguous
    blocks. The softmax is divided by its sum after the product with v, where there are K numbers a
    query to divide instead of M, and so is its gradient, which is written out by hand: of the
    arrays of N x M only the undivided weights are kept, and each is passed over as seldom as can
    be.

    Shapes: (B, H, N, K), (B, H, M, K), (B, H, M, K), the bias (B, H, N, M) -> (B, H, N, K), in the
      dtype of `v`, which is that of the bias.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), Eq. 1; ViT's Eqs. 6-8 (appendix A); the sum in
      the gradient taken over K: Dao et al. 2022 (arXiv:2205.14135), appendix B.2.
    """
    scale = q_BHNK.shape[-1] ** -0.5
    kept_BHNM = None
    if dropout_key is not None and dropout_rate > 0.0:
        shape = (*q_BHNK.shape[:-1], k_BHMK.shape[-2])
        kept_BHNM = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, shape)
    has_bias = bias_BHNM is not None
    return _attend(q_BHNK * scale, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, has_bias, dropout_rate)


def plain_attention(q_BHNK, k_BHMK, v_BHMK, *, bias_BHNM=None, dropout_rate=0.0, dropout_key=None):
    """`dot_product_attention` as it is written in the paper, its gradient JAX's own."""
    q_BNHK, k_BMHK, v_BMHK = (jnp.swapaxes(x, 1, 2) for x in (q_BHNK, k_BHMK, v_BHMK))
    scale = q_BNHK.shape[-1] ** -0.5
    scores_BHNM = jnp.einsum("bnhk,bmhk->bhnm", q_BNHK * scale, k_BMHK)
    if bias_BHNM is not None:
        scores_BHNM += bias_BHNM
    weights_BHNM = jax.nn.softmax(scores_BHNM, axis=-1)
    if dropout_key is not None and dropout_rate > 0.0:
        kept_BHNM = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, weights_BHNM.shape)
        weights_BHNM = _drop(weights_BHNM, kept_BHNM, dropout_rate)
    return jnp.swapaxes(jnp.einsum("bhnm,bmhk->bnhk", weights_BHNM, v_BMHK), 1, 2)


def choose_attention(platform: str) -> Callable:
    """The form that is fastest on "cpu", "gpu" or "tpu".

    The TPU compiler makes more of the plain form: by its own estimate a training step of ViT-B/16
    takes 113.5 instead of 135.3 million cycles on v5e, with full remat 156.0 instead of 186.2.
    docs/planning.md has other sizes and layouts, and the command.
    """
    return plain_attention if platform == "tpu" else dot_product_attention


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q_BHNK, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, has_bias, dropout_rate):
    return _attend_forward(q_BHNK, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, has_bias, dropout_rate)[0]


def _attend_forward(q_BHNK, k_BHMK, v_BHMK, bias_BHNM, kept_BHNM, has_bias, dropout_rate):
    scores_BHNM = jnp.einsum("bhnk,bhmk->bhnm", q_BHNK, k_BHMK)
    if has_bias:
        scores_BHNM += bias_BHNM
    weights_BHNM = jnp.exp(scores_BHNM - scores_BHNM.max(axis=-1, keepdims=True))
    sum_BHN1 = weights_BHNM.sum(axis=-1, keepdims=True, dtype=jnp.float32)
    dropped_BHNM = _drop(weights_BHNM, kept_BHNM, dropout_rate)
    out_BHNK = jnp.einsum("bhnm,bhmk->bhnk", dropped_BHNM, v_BHMK)
    out_BHNK = (out_BHNK / sum_BHN1).astype(v_BHMK.dtype)
    return out_BHNK, (q_BHNK, k_BHMK, v_BHMK, kept_BHNM, weights_BHNM, sum_BHN1, out_BHNK)


def _attend_backward(has_bias, dropout_rate, saved, grad_BHNK):
    """With w the undivided weights, s their sum, o the output and g its gradient:

    grad v = w^T (g / s);  grad scores = grad bias = w * ((g / s) v^T - <g / s, o>).
    """
    q_BHNK, k_BHMK, v_BHMK, kept_BHNM, weights_BHNM, sum_BHN1, out_BHNK = saved
    grad_BHNK = (grad_BHNK / sum_BHN1).astype(v_BHMK.dtype)
    grad_v_BHMK = jnp.einsum(
        "bhnm,bhnk->bhmk", _drop(weights_BHNM, kept_BHNM, dropout_rate), grad_BHNK
    )
    mean_BHN1 = (grad_BHNK * out_BHNK).sum(axis=-1, keepdims=True, dtype=jnp.float32)
    grad_BHNM = jnp.einsum("bhnk,bhmk->bhnm", grad_BHNK, v_BHMK)
    grad_BHNM = _drop(grad_BHNM, kept_BHNM, dropout_rate)
    grad_BHNM = weights_BHNM * (grad_BHNM - mean_BHN1.astype(grad_BHNM.dtype))
    grad_q_BHNK = jnp.einsum("bhnm,bhmk->bhnk", grad_BHNM, k_BHMK)
    grad_k_BHMK = jnp.einsum("bhnm,bhnk->bhmk", grad_BHNM, q_BHNK)
    return grad_q_BHNK, grad_k_BHMK, grad_v_BHMK, grad_BHNM if has_bias else None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _drop(x_BHNM, kept_BHNM, dropout_rate):
    if kept_BHNM is None:
        return x_BHNM
    return jnp.where(kept_BHNM, x_BHNM / (1.0 - dropout_rate), 0.0)
