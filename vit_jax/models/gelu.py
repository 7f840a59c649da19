"""The activations of an MLP, with the gate and the dropout that follow them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.dropout import kept_share

# tanh(z) is 2 sigmoid(2 z) - 1, so the tanh form is z sigmoid(z (_LINEAR + _CUBIC z^2)).
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def activations(sigmoid: Callable[[jax.Array], jax.Array]) -> dict[str, tuple[Callable, Callable]]:
    """{form: (activation(z) / z, its derivative by z)} in float32, by this form of the sigmoid."""

    def tanh_share(z: jax.Array) -> jax.Array:
        return sigmoid(z * (_LINEAR + _CUBIC * z * z))

    def tanh_slope(z: jax.Array) -> jax.Array:
        s = tanh_share(z)
        return s + z * s * (1 - s) * (_LINEAR + 3 * _CUBIC * z * z)

    def sigmoid_forms(factor: float) -> tuple[Callable, Callable]:
        """The forms of z sigmoid(factor z)."""

        def slope(z: jax.Array) -> jax.Array:
            s = sigmoid(factor * z)
            return s + factor * z * s * (1 - s)

        return lambda z: sigmoid(factor * z), slope

    return {
        "tanh": (tanh_share, tanh_slope),
        "exact": (_exact_share, _exact_slope),
        "quick": sigmoid_forms(1.702),  # CLIP's
        "silu": sigmoid_forms(1.0),
    }


def _exact_share(z: jax.Array) -> jax.Array:
    # JAX's form by erfc is exact for the far negative tail too, and takes more than twice as long.
    return 0.5 + 0.5 * jax.lax.erf(z * math.sqrt(0.5))


def _exact_slope(z: jax.Array) -> jax.Array:
    return _exact_share(z) + z * jnp.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


_FORMS = activations(jax.nn.sigmoid)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _gelu(
    form: str, x: jax.Array, gated: jax.Array | None, kept: jax.Array | None, rate: float
) -> jax.Array:
    """The activation of x, times `gated` if given, then `dropout.drop`; `kept` None: no dropout.

    The backward pass needs only the arguments, and takes half as many operations as JAX's
    derivative of `jax.nn.gelu`: on TPUs they, not the products around them, set the time of an MLP.
    It computes in float32 and has no forward-mode derivative.

    Shapes: (...), (...), (...) -> (...).
    Sources: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2; gates: Shazeer 2020
      (arXiv:2002.05202), Eq. 6.
    """
    return _forward(form, x, gated, kept, rate)[0]


def _forward(
    form: str, x: jax.Array, gated: jax.Array | None, kept: jax.Array | None, rate: float
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    share, _ = _FORMS[form]
    z = x.astype(jnp.float32)
    y = _scale(kept, rate) * z * share(z)
    y = y if gated is None else y * gated.astype(jnp.float32)
    return _select(y, kept).astype(x.dtype), (x, gated, kept)


def _backward(
    form: str, rate: float, saved: tuple[Any, ...], grad: jax.Array
) -> tuple[jax.Array | None, ...]:
    x, gated, kept = saved
    share, slope = _FORMS[form]
    z = x.astype(jnp.float32)
    grad = _scale(kept, rate) * _select(grad.astype(jnp.float32), kept)
    if gated is None:
        return (slope(z) * grad).astype(x.dtype), None, None
    grad_x = slope(z) * grad * gated.astype(jnp.float32)
    return grad_x.astype(x.dtype), (z * share(z) * grad).astype(gated.dtype), None


_gelu.defvjp(_forward, _backward)


def _scale(kept: jax.Array | None, rate: float) -> float:
    return 1.0 if kept is None else 1 / kept_share(rate)


def _select(x: jax.Array, kept: jax.Array | None) -> jax.Array:
    return x if kept is None else jnp.where(kept, x, 0)


# {form: gelu(x, gated, kept, rate)}, see `_gelu`.
GELU = {form: partial(_gelu, form) for form in _FORMS}
