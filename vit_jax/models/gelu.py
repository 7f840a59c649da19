"""GELU, with the dropout that follows it in an MLP."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from vit_jax.models.dropout import drop, kept_share

# tanh(z) is 2 sigmoid(2 z) - 1, so the tanh form of GELU is x sigmoid(x (_LINEAR + _CUBIC x^2)).
_LINEAR = 2 * (2 / jnp.pi) ** 0.5
_CUBIC = 0.044715 * _LINEAR


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tanh_gelu(x, kept, rate):
    """The tanh form of GELU, then `dropout.drop`; `kept` None: without dropout.

    The backward pass needs only `x` and `kept`, and takes half as many operations as JAX's
    derivative of `jax.nn.gelu`: on TPUs they, not the products around them, set the time of an MLP.
    It computes in float32 and has no forward-mode derivative.

    Shapes: (...), (...) -> (...).
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2.
    """
    return _forward(x, kept, rate)[0]


def _forward(x, kept, rate):
    z, scale = x.astype(jnp.float32), _scale(kept, rate)
    y = scale * z * jax.nn.sigmoid(z * (_LINEAR + _CUBIC * z * z))
    return _select(y, kept).astype(x.dtype), (x, kept)


def _backward(rate, saved, grad):
    x, kept = saved
    z, scale = x.astype(jnp.float32), _scale(kept, rate)
    square = z * z
    s = jax.nn.sigmoid(z * (_LINEAR + _CUBIC * square))
    slope = s + z * s * (1 - s) * (_LINEAR + 3 * _CUBIC * square)
    grad = scale * slope * _select(grad.astype(jnp.float32), kept)
    return grad.astype(x.dtype), None


tanh_gelu.defvjp(_forward, _backward)


def _scale(kept, rate):
    return 1.0 if kept is None else 1 / kept_share(rate)


def _select(x, kept):
    return x if kept is None else jnp.where(kept, x, 0)


def exact_gelu(x, kept, rate):
    """GELU by the error function, then `dropout.drop`; `kept` None: without dropout."""
    y = jax.nn.gelu(x, approximate=False)
    return y if kept is None else drop(y, kept, rate)


GELU: dict[str, Callable[..., jax.Array]] = {"tanh": tanh_gelu, "exact": exact_gelu}
