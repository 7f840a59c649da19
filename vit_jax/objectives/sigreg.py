"""SIGReg: how far embeddings are from a standard normal distribution in every direction.

Axes: B examples, K dimensions of an embedding, M directions.
Source: Balestriero and LeCun 2025 (arXiv:2511.08544), sections 4.2 and 4.3, for directions and
integration; Epps and Pulley 1983, "A test for normality based on the empirical characteristic
function", for the statistic of one direction.
"""

import jax
import jax.numpy as jnp

# The statistic is integrated over t in [-LIMIT, LIMIT], as in the paper; its authors' code has 3.
LIMIT = 5.0


def draw_directions(rng: jax.Array, width: int, number: int) -> jax.Array:
    """`number` unit vectors of `width` dimensions, uniform on the sphere: (K, M)."""
    directions_KM = jax.random.normal(rng, (width, number))
    return directions_KM / jnp.linalg.norm(directions_KM, axis=0, keepdims=True)


def sigreg(
    x_BK: jax.Array,
    directions_KM: jax.Array,
    mask_B: jax.Array | None = None,
    *,
    points: int = 17,
) -> jax.Array:
    """The mean over the directions a of the statistic of Epps and Pulley of the numbers a . x.

        N * integral of |mean exp(i t a.x) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt

    over t from -5 to 5 by the trapezoidal rule. For N independent standard normal x its
    expectation is sqrt(2 pi) (1 - 1 / sqrt(3)) = 1.06, whatever N; for other distributions it grows
    as N. The integrand is even and is 0 at t = 0, so only points with t > 0 are computed.

    Args:
      x_BK: the embeddings, float32.
      directions_KM: unit vectors.
      mask_B: 0 for rows that do not count, else 1; None: all count. N is their number.
      points: odd number of points from -5 to 5.
    """
    mask_B = jnp.ones(x_BK.shape[0]) if mask_B is None else mask_B
    mask_B1, number = mask_B[:, None], jnp.maximum(mask_B.sum(), 1.0)
    s_BM = jnp.matmul(x_BK, directions_KM, precision="highest")
    half = points // 2
    spacing, total = LIMIT / half, jnp.zeros(())
    for i in range(1, half + 1):
        t = i * spacing
        normal = jnp.exp(-jnp.square(t) / 2)
        real_M = (mask_B1 * jnp.cos(t * s_BM)).sum(axis=0) / number
        imaginary_M = (mask_B1 * jnp.sin(t * s_BM)).sum(axis=0) / number
        error_M = jnp.square(real_M - normal) + jnp.square(imaginary_M)
        share = 1.0 if i == half else 2.0  # the trapezoidal rule, of t and -t together
        total += share * spacing * normal * error_M.mean()
    return number * total
