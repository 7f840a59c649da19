"""Optimizers: optax transformations from clipped gradients to a descent direction.

`momentum_dtype` is the dtype in which the first moment is stored; arithmetic on it is in float32.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config import sections
from vit_jax.config.parts import Part, key
from vit_jax.experiment.optimizers.layers import over_layers

# A matrix whose smaller side is below this keeps the full second moment; factors would save little.
_FACTORED_FROM = 32

_TRUST = 1e-3  # LARS: norm of an update / norm of its parameter, at a learning rate of 1


def moment_rate(value: float, momentum_dtype: str) -> float | np.float32:
    """The factor that optax multiplies a first moment by, of a type that keeps its precision.

    optax would round a Python float to bfloat16 along with the moment, so that 0.9 becomes 0.8984.
    """
    return np.float32(value) if momentum_dtype == "bfloat16" else value


def decay_of(moment: str, default: float) -> Any:
    return key(default, f"share of the {moment} that stays in a step", within="[0, 1)")


def eps_of(default: float) -> Any:
    return key(default, "added to the second moment or its root", within="(0, inf)")


def dtype_of(default: str = "float32") -> Any:
    return key(default, "in which the first moment is stored", choices=("float32", "bfloat16"))


class Optimizer(sections.Optimizer, Part):
    """The interface of an optimizer.

    averages: whether it needs the running average of the parameters; its state has `keep` then, the
      share of the average that stays in an update.
    """

    def bind(self) -> optax.GradientTransformation:
        """From clipped gradients to a descent direction, whose size the learning rate sets."""
        raise NotImplementedError

    def after(
        self, weight_decay_on: str, schedule: optax.Schedule
    ) -> Mapping[str, optax.GradientTransformation]:
        """{part of `make_optimizer`'s chain: what follows it}; by default nothing."""
        return {}


class AdamW(Optimizer):
    """Kingma & Ba 2014 (arXiv:1412.6980), algorithm 1."""

    b1: float = decay_of("first moment", 0.9)
    b2: float = decay_of("second moment", 0.999)
    eps: float = eps_of(1e-8)
    momentum_dtype: str = dtype_of()

    def bind(self) -> optax.GradientTransformation:
        b1 = moment_rate(self.b1, self.momentum_dtype)
        return optax.scale_by_adam(b1, self.b2, self.eps, mu_dtype=self.momentum_dtype)


class Sgd(Optimizer):
    """Heavy-ball momentum (Polyak 1964)."""

    momentum: float = decay_of("sum of the gradients", 0.9)
    momentum_dtype: str = dtype_of()

    def bind(self) -> optax.GradientTransformation:
        momentum = moment_rate(self.momentum, self.momentum_dtype)
        return optax.trace(momentum, accumulator_dtype=self.momentum_dtype)


class RmsProp(Sgd):
    """Tieleman & Hinton 2012, lecture 6.5, as in TensorFlow: eps is inside the root, v starts at 1.

    TensorFlow multiplies by the learning rate before the momentum. Here it is multiplied after it,
    as in `Sgd`, which differs while the learning rate changes.
    """

    b2: float = decay_of("second moment", 0.9)
    eps: float = eps_of(1e-3)

    def bind(self) -> optax.GradientTransformation:
        by_rms = optax.scale_by_rms(self.b2, self.eps, initial_scale=1.0, eps_in_sqrt=True)
        return optax.named_chain(("rms", by_rms), ("momentum", super().bind()))


class Lion(Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    b1: float = decay_of("first moment", 0.9)
    b2: float = decay_of("second moment", 0.99)
    momentum_dtype: str = dtype_of()

    def bind(self) -> optax.GradientTransformation:
        b1, b2 = (moment_rate(b, self.momentum_dtype) for b in (self.b1, self.b2))
        return optax.scale_by_lion(b1, b2, mu_dtype=self.momentum_dtype)


class Adafactor(Optimizer):
    """Zhai et al. 2021 (arXiv:2106.04560), section 3.4, after Shazeer & Stern 2018."""

    b1: float = decay_of("first moment", 0.9)
    b2: float = decay_of("second moment", 0.999)
    eps: float = eps_of(1e-30)
    momentum_dtype: str = dtype_of("bfloat16")

    def bind(self) -> optax.GradientTransformation:
        def decay_rate(count: Any, exponent: Any) -> jax.Array:
            return jnp.minimum(self.b2, 1.0 - (count + 1.0) ** -exponent)

        second = optax.scale_by_factored_rms(
            decay_rate=0.8,
            decay_rate_fn=decay_rate,
            epsilon=self.eps,
            min_dim_size_to_factor=_FACTORED_FROM,
        )
        b1 = moment_rate(self.b1, self.momentum_dtype)
        first = optax.ema(b1, debias=False, accumulator_dtype=self.momentum_dtype)
        return over_layers(optax.named_chain(("second_moment", second), ("momentum", first)))


class Lars(Sgd):
    """You et al. 2017 (arXiv:1708.03888), algorithm 1, with 0.001 as the trust coefficient.

    Vectors and scalars take their gradients as they are.
    """

    def bind(self) -> optax.GradientTransformation:
        by_norm = optax.masked(
            optax.scale_by_trust_ratio(trust_coefficient=_TRUST),
            lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        )
        return over_layers(optax.named_chain(("trust", by_norm), ("momentum", super().bind())))
