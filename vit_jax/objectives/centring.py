"""How a teacher's outputs become targets that do not collapse: a centre, or Sinkhorn-Knopp.

Both reduce over all rows of the global batch, however the mesh splits it.

Axes: N samples (rows and views, or patches), K prototypes.
Sources: Caron et al. 2021 (arXiv:2104.14294), section 3.1, for the centre; Caron et al. 2020
(arXiv:2006.09882), section 3.1, for Sinkhorn-Knopp; Ruan et al. 2022 (arXiv:2212.03810) for its use
on a teacher.
"""

import jax
import jax.numpy as jnp

CENTRINGS = ("centre", "sinkhorn", "none")
_ITERATIONS = 3


def centred(logits_NK: jax.Array, centre_K: jax.Array, temperature: jax.Array) -> jax.Array:
    """softmax((logits - centre) / temperature): (..., K) -> (..., K)."""
    centre = jnp.reshape(centre_K, (1,) * (logits_NK.ndim - 1) + (-1,))
    return jax.nn.softmax((logits_NK - centre) / temperature, axis=-1)


def moved_centre(
    centre_K: jax.Array, logits_NK: jax.Array, weights_N: jax.Array, momentum: float
) -> jax.Array:
    """momentum * centre + (1 - momentum) * mean of the logits, weighted by `weights_N`: (K,).

    Without any weight the centre stays.
    """
    total = weights_N.sum()
    mean_K = (weights_N[:, None] * logits_NK).sum(axis=0) / jnp.maximum(total, 1e-6)
    return jnp.where(total > 0, momentum * centre_K + (1 - momentum) * mean_K, centre_K)


def sinkhorn(logits_NK: jax.Array, temperature: jax.Array, weights_N: jax.Array) -> jax.Array:
    """Targets that use all prototypes equally: exp(logits / temperature), normalised three times.

    Each time first every prototype gets the same share of all samples, then every sample the sum 1.

    Args:
      logits_NK: of the teacher.
      temperature: a scalar.
      weights_N: 1, or 0 for samples that do not count.

    Returns:
      (N, K), rows with the sum 1, or 0 where a sample does not count.
    """
    scaled_NK = logits_NK / temperature
    counts_N1 = weights_N[:, None] > 0
    # A common factor of all entries has no effect; this one keeps exp from overflowing.
    greatest = jnp.max(jnp.where(counts_N1, scaled_NK, -jnp.inf), initial=-1e9)
    q_NK = jnp.where(counts_N1, jnp.exp(scaled_NK - greatest), 0.0)
    for _ in range(_ITERATIONS):
        q_NK = _divide(q_NK, q_NK.sum(axis=0, keepdims=True))
        q_NK = _divide(q_NK, q_NK.sum(axis=1, keepdims=True))
    return q_NK


def entropy(probs_NK: jax.Array) -> jax.Array:
    """-sum_k p_k log p_k, in nats: (..., K) -> (...)."""
    return -jax.scipy.special.xlogy(probs_NK, probs_NK).sum(axis=-1)


def _divide(x: jax.Array, by: jax.Array) -> jax.Array:
    return x / jnp.where(by > 0, by, 1.0)
