"""Optimizers: optax chains with decoupled weight decay on the leaves that a regex names."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import tree
from vit_jax.errors import InputError, collect_faults, nearest

MOMENTUM_DTYPES = ("float32", "bfloat16")

# A matrix whose smaller side is below this keeps the whole second moment: factors save nothing.
_FACTORED_FROM = 32


def _rate(value: float, momentum_dtype: str) -> float | np.float32:
    """What optax is to multiply a first moment by.

    A Python float would be rounded to bfloat16 with the moment's type, and 0.9 be 0.8984.
    """
    return np.float32(value) if momentum_dtype == "bfloat16" else value


def adamw(b1=0.9, b2=0.999, eps=1e-8, momentum_dtype="float32"):
    """Kingma & Ba 2014 (arXiv:1412.6980), algorithm 1."""
    return optax.scale_by_adam(_rate(b1, momentum_dtype), b2, eps, mu_dtype=momentum_dtype)


def sgd(momentum=0.9, momentum_dtype="float32"):
    """Heavy-ball momentum (Polyak 1964)."""
    return optax.trace(_rate(momentum, momentum_dtype), accumulator_dtype=momentum_dtype)


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


# What turns clipped gradients into a direction; the arguments of each are the hyper-parameters that
# it has, with its own defaults.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
}


def make_optimizer(
    name: str,
    *,
    schedule: optax.Schedule,
    weight_decay: float = 0.0,
    weight_decay_on: str = ".*/kernel",
    grad_clip_norm: float | None = None,
    b1: float | None = None,
    b2: float | None = None,
    eps: float | None = None,
    momentum: float | None = None,
    momentum_dtype: str | None = None,
    layer_decay: float | None = None,
    freeze: str | None = None,
) -> optax.GradientTransformation:
    """A chain of named parts, of which those that a setting turns off do nothing:

    frozen_gradients, clip, direction, weight_decay, layer_decay, learning_rate, frozen_updates.

        g <- g * min(1, grad_clip_norm / ||g||)       over all parameters together
        d <- m_hat / (sqrt(v_hat) + eps)              adamw; m_hat, v_hat corrected for their start
             with m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2
             m                                        sgd; m <- g + momentum m
             sign(b1 m + (1 - b1) g)                  lion; then m <- b2 m + (1 - b2) g
             m                                        adafactor; m <- b1 m + (1 - b1) g / sqrt(V)
             with V = r c^T / mean(r) of a matrix, r and c the means over its columns and rows of
             V <- b V + (1 - b) (g^2 + eps), b = min(b2, 1 - t^-0.8) at the t-th step
        p <- p - k * schedule(step) * (d + weight_decay * p)
             with k = 1, or layer_decay^(depth + 1 - i) for the i-th part of the model

    The decay is added after the momentum and multiplied by the current learning rate. For adamw
    that is optax.adamw; it departs from Loshchilov & Hutter, whose decay is not multiplied by the
    base rate, only by the schedule's shape. For sgd it departs from L2 regularisation, whose decay
    would pass through the momentum.

    Of adafactor the paper takes: the factored second moment, its rate capped at adam's 0.999, a
    first moment in bfloat16, and a learning rate that is not scaled by the parameters' norms. Its
    updates are not clipped, and its moments are not corrected for their start: the first update is
    a tenth of the later ones. Vectors, and matrices with a side below 32, keep the whole second
    moment. It is mapped over scanned layers, so that it factors each layer's own matrix.

    Args:
      name: a key of `OPTIMIZERS`.
      schedule: update's number, from 0 -> learning rate.
      weight_decay: factor of the parameters that decay.
      weight_decay_on: regex over whole names; what matches decays. Layers are named as in the
        unrolled model (`encoder/layer_3/.*`) also where they are scanned.
      grad_clip_norm: greatest global norm of the gradients; None: no clipping.
      b1, b2: None: adamw's 0.9 and 0.999, lion's 0.9 and 0.99, adafactor's 0.9 and 0.999.
      eps: None: adamw's 1e-8, adafactor's 1e-30.
      momentum: of sgd; None: 0.9.
      momentum_dtype: what the first moment is kept in, "float32" or "bfloat16"; None: bfloat16 for
        adafactor, float32 for the others. The arithmetic on it is in float32.
      layer_decay: each layer learns at this share of the rate of the one above it: i is 0 for the
        embedding (patches, class token, positions), l + 1 for layer l, depth + 1 for the last norm
        and the head. None: all learn at the schedule's rate.
      freeze: regex over the same names. What matches is never changed, not a bit of it; its
        gradients do not count in the clip's norm; a leaf that is frozen whole has no state. None:
        everything learns.

    Raises:
      InputError: an unknown name, a number out of range, or one that the optimizer does not have;
        from `init` and `update`, a `weight_decay_on` that matches no parameter though
        `weight_decay` is not 0, a `freeze` that matches none or all, a `layer_decay` for a model
        without layers.

    Source: Loshchilov & Hutter 2017 (arXiv:1711.05101), algorithms 1 and 2; layer_decay: Clark et
      al. 2020 (arXiv:2003.10555), Bao et al. 2021 (arXiv:2106.08254).
    """
    faults = []

    def need(key: str, value, holds: bool, what: str) -> None:
        if not holds:
            faults.append(f"optimizer.{key}={value!r} {what}")

    need("name", name, name in OPTIMIZERS, f"is unknown; {nearest(name, list(OPTIMIZERS))}")
    need("weight_decay", weight_decay, weight_decay >= 0, "must be at least 0")
    clips = grad_clip_norm is None or grad_clip_norm > 0
    need("grad_clip_norm", grad_clip_norm, clips, "must be more than 0; None turns it off")
    for key, value in (("b1", b1), ("b2", b2), ("momentum", momentum)):
        need(key, value, value is None or 0 <= value < 1, "must be at least 0 and less than 1")
    need("eps", eps, eps is None or eps > 0, "must be more than 0")
    if momentum_dtype not in (None, *MOMENTUM_DTYPES):
        hint = nearest(momentum_dtype, MOMENTUM_DTYPES)
        need("momentum_dtype", momentum_dtype, False, f"is unknown; {hint}")
    decays_by_layer = layer_decay is None or 0 < layer_decay <= 1
    need("layer_decay", layer_decay, decays_by_layer, "must be more than 0 and at most 1")
    for key, pattern in (("weight_decay_on", weight_decay_on), ("freeze", freeze)):
        try:
            re.compile(pattern or "")
        except re.error as error:
            need(key, pattern, False, f"is not a regular expression: {error}")
    given = {"b1": b1, "b2": b2, "eps": eps, "momentum": momentum, "momentum_dtype": momentum_dtype}
    given = {key: value for key, value in given.items() if value is not None}
    if name in OPTIMIZERS:
        own = inspect.signature(OPTIMIZERS[name]).parameters
        for key in given.keys() - own.keys():
            need(key, given[key], False, f"is nothing that {name} has; set it to None")
    collect_faults(faults)

    clip = optax.identity() if grad_clip_norm is None else optax.clip_by_global_norm(grad_clip_norm)
    direction = OPTIMIZERS[name](**given)
    drop_frozen = optax.identity()
    if freeze is not None:
        direction = optax.masked(direction, lambda params: _leaves_that_learn(params, freeze))
        drop_frozen = _drop_frozen(freeze)
    return optax.named_chain(
        ("frozen_gradients", drop_frozen),
        ("clip", clip),
        ("direction", direction),
        ("weight_decay", _decay_weights(weight_decay, weight_decay_on)),
        ("layer_decay", optax.identity() if layer_decay is None else _scale_layers(layer_decay)),
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
        ("frozen_updates", drop_frozen),
    )


class LayersState(NamedTuple):
    """The state of an optimizer that is mapped over scanned layers.

    layers: of the leaves of scanned layers, each with the layer as first axis.
    others: of all other leaves.
    """

    layers: Any
    others: Any


def over_layers(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` on each layer of scanned leaves apart, as it would be on those of an unrolled model.

    To be used for what is not elementwise: for a stack of matrices (L, D, F), or of vectors (L, D),
    `tx` itself would see arrays with one more axis than the layers have.
    """

    def split(leaves):
        stacked = jax.tree.map(tree.is_stacked, tree.leaf_names(leaves))

        def keep(wanted):
            return jax.tree.map(
                lambda is_stacked, leaf: leaf if is_stacked == wanted else optax.MaskedNode(),
                stacked,
                leaves,
            )

        return keep(True), keep(False)

    def init(params):
        layers, others = split(params)
        mapped = jax.vmap(tx.init)(layers) if jax.tree.leaves(layers) else optax.EmptyState()
        return LayersState(mapped, tx.init(others))

    def update(grads, state, params=None):
        (layer_grads, other_grads), (layer_params, other_params) = split(grads), split(params)
        layers = state.layers
        if jax.tree.leaves(layer_grads):
            layer_grads, layers = jax.vmap(tx.update)(layer_grads, layers, layer_params)
        other_grads, others = tx.update(other_grads, state.others, other_params)
        updates = jax.tree.map(
            lambda layer, other: other if isinstance(layer, optax.MaskedNode) else layer,
            layer_grads,
            other_grads,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
        return updates, LayersState(layers, others)

    return optax.GradientTransformation(init, update)


def _decay_weights(weight_decay: float, weight_decay_on: str) -> optax.GradientTransformation:
    def decaying(params):
        mask = tree.mask(params, weight_decay_on)
        if weight_decay and not _values(mask).any():
            raise InputError(
                f"optimizer.weight_decay_on={weight_decay_on!r} matches the whole name of no "
                f"parameter; {_some_names(params)}"
            )
        return mask

    def init(params):
        decaying(params)  # to be refused before anything is computed
        return optax.EmptyState()

    def add(decays, update, param):
        if not np.any(decays):
            return update
        decayed = update + weight_decay * param
        return decayed if np.all(decays) else jnp.where(decays, decayed, update)

    def update(updates, state, params=None):
        return jax.tree.map(add, decaying(params), updates, params), state

    return optax.GradientTransformation(init, update)


def _frozen(params: Any, freeze: str) -> Any:
    """`tree.mask` of what does not learn.

    Raises:
      InputError: if `freeze` matches no parameter's name, or all of them.
    """
    mask = tree.mask(params, freeze)
    values = _values(mask)
    if values.all() or not values.any():
        raise InputError(
            f"optimizer.freeze={freeze!r} matches the whole name of "
            f"{'every' if values.all() else 'no'} parameter; {_some_names(params)}; "
            "None freezes nothing"
        )
    return mask


def _values(mask: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mask)])


def _some_names(params: Any) -> str:
    named = tree.flatten_names(params)
    names = [tree.unrolled_names(name, leaf)[0] for name, leaf in named.items()]
    return f"the names are like {', '.join(names[:3])}"


def _leaves_that_learn(params: Any, freeze: str) -> Any:
    return jax.tree.map(lambda frozen: not np.all(frozen), _frozen(params, freeze))


def _drop_frozen(freeze: str) -> optax.GradientTransformation:
    def update(updates, params):
        # -0.0, because adding it changes no bit of a parameter: -0.0 + 0.0 is 0.0.
        return jax.tree.map(
            lambda frozen, leaf: jnp.where(frozen, -0.0, leaf), _frozen(params, freeze), updates
        )

    return optax.stateless(update)


def _scale_layers(layer_decay: float) -> optax.GradientTransformation:
    def scales(params):
        parts = tree.parts(params)
        layers = [part for part in parts if part not in ("embedding", "head")]
        if not layers:
            raise InputError(
                f"optimizer.layer_decay={layer_decay}: the model has no layers (layer_0, ...); "
                "set it to None"
            )
        above = {part: i for i, part in enumerate(reversed(layers), 1)}
        above |= {"head": 0, "embedding": len(layers) + 1}
        return tree.map_layers(lambda name: layer_decay ** above[tree.part_of(name)], params)

    def init(params):
        scales(params)  # to be refused before anything is computed
        return optax.EmptyState()

    def update(updates, state, params=None):
        scaled = jax.tree.map(
            lambda scale, leaf: leaf * jnp.asarray(scale, leaf.dtype), scales(params), updates
        )
        return scaled, state

    return optax.GradientTransformation(init, update)
