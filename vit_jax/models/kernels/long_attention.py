"""Attention over many tokens on TPU: block by block, by JAX's splash attention.

Axes: B images, H heads, N tokens, K width of a head.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

_BLOCKS = (512, 384, 256, 128)  # tokens; the largest that divides the padded number of them


def attention(
    q_BNHK: jax.Array, k_BNHK: jax.Array, v_BNHK: jax.Array, num_keys: int | jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v, head by head.

    Tokens are padded to a multiple of 128, and no token attends to padding.

    Args:
      q_BNHK, k_BNHK, v_BNHK: queries, keys and values of the same tokens; 8 divides K.
      num_keys: the tokens that count, the first of N, an int or int32 (B,) by image; the others
        are padding.

    Returns:
      (B, N, H, K) in the dtype of the values; rows of padding are finite.

    Source: Dao et al. 2022 (arXiv:2205.14135), section 3.1.
    """
    N, H, K = q_BNHK.shape[1:]
    padding = -N % _BLOCKS[-1]
    block = next(block for block in _BLOCKS if (N + padding) % block == 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((N + padding, N + padding))] * H),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
            block_q_dq=block, block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
    )  # fmt: skip
    q_BHNK, k_BHNK, v_BHNK = (
        jnp.swapaxes(jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, 2)
        for x in (q_BNHK * K**-0.5, k_BNHK, v_BNHK)
    )
    # Padding attends to padding, so that no row is without keys.
    place_N = jnp.arange(N + padding)
    counts = place_N < num_keys if isinstance(num_keys, int) else place_N[None] < num_keys[:, None]
    segments = splash.SegmentIds(*[counts.astype(jnp.int32)] * 2)
    axes = 0, 0, 0, None if isinstance(num_keys, int) else 0
    out_BHNK = jax.vmap(kernel, in_axes=axes)(q_BHNK, k_BHNK, v_BHNK, segments)
    return jnp.swapaxes(out_BHNK, 1, 2)[:, :N]
