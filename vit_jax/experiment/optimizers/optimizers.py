"""Optimizer directions: optax transformations from clipped gradients to a descent direction.

`momentum_dtype` is the dtype in which the first moment is stored; arithmetic on it is in float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.experiment.optimizers.layers import over_layers

MOMENTUM_DTYPES = ("float32", "bfloat16")

# A matrix whose smaller side is below this keeps the full second moment; factors would save little.
_FACTORED_FROM = 32

_TRUST = 1e-3  # LARS: norm of an update / norm of its parameter, at a learning rate of 1


def _rate(value: float, momentum_dtype: str) -> float | np.float32:
    """The factor that optax multiplies a first moment by, of a type that keeps its precision.

    optax would round a Python float to bfloat16 along with the moment, so that 0.9 becomes 0.8984.
    """
    return np.float32(value) if momentum_dtype == "bfloat16" else value


def adamw(b1=0.9, b2=0.999, eps=1e-8, momentum_dtype="float32"):
    """Kingma & Ba 2014 (arXiv:1412.6980), algorithm 1."""
    return optax.scale_by_adam(_rate(b1, momentum_dtype), b2, eps, mu_dtype=momentum_dtype)


def sgd(momentum=0.9, momentum_dtype="float32"):
    """Heavy-ball momentum (Polyak 1964)."""
    return optax.trace(_rate(momentum, momentum_dtype), accumulator_dtype=momentum_dtype)


def rmsprop(momentum=0.9, b2=0.9, eps=1e-3, momentum_dtype="float32"):
    """Tieleman & Hinton 2012, lecture 6.5, as in TensorFlow: eps is inside the root, v starts at 1.

    TensorFlow multiplies by the learning rate before the momentum. Here it is multiplied after it,
    as in `sgd`, which differs while the learning rate changes.
    """
    by_rms = optax.scale_by_rms(b2, eps, initial_scale=1.0, eps_in_sqrt=True)
    return optax.named_chain(("rms", by_rms), ("momentum", sgd(momentum, momentum_dtype)))


def lion(b1=0.9, b2=0.99, momentum_dtype="float32"):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""
    b1, b2 = _rate(b1, momentum_dtype), _rate(b2, momentum_dtype)
    return optax.scale_by_lion(b1, b2, mu_dtype=momentum_dtype)


def adafactor(b1=0.9, b2=0.999, eps=1e-30, momentum_dtype="bfloat16"):
    """Zhai et al. 2021 (arXiv:2106.04560), section 3.4, after Shazeer & Stern 2018."""

    def decay_rate(count, exponent):
        return jnp.minimum(b2, 1.0 - (count + 1.0) ** -exponent)

    second_moment = optax.scale_by_factored_rms(
        decay_rate=0.8,
        decay_rate_fn=decay_rate,
        epsilon=eps,
        min_dim_size_to_factor=_FACTORED_FROM,
    )
    b1 = _rate(b1, momentum_dtype)
    momentum = optax.ema(b1, debias=False, accumulator_dtype=momentum_dtype)
    return over_layers(optax.named_chain(("second_moment", second_moment), ("momentum", momentum)))


def lars(momentum=0.9, momentum_dtype="float32"):
    """You et al. 2017 (arXiv:1708.03888), algorithm 1, with 0.001 as the trust coefficient.

    Vectors and scalars take their gradients as they are.
    """
    by_norm = optax.masked(
        optax.scale_by_trust_ratio(trust_coefficient=_TRUST),
        lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    chain = optax.named_chain(("trust", by_norm), ("momentum", sgd(momentum, momentum_dtype)))
    return over_layers(chain)


# The arguments of each function are its hyper-parameters, with its own defaults.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "rmsprop": rmsprop,
    "adafactor": adafactor,
    "lars": lars,
}
