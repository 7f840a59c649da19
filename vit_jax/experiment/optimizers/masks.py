"""Optimizer parts that apply to parameters selected by a regex: weight decay and freezing."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import tree
from vit_jax.base.errors import InputError

HEADS = re.compile("head(_distillation)?/kernel")


def decay_weights(
    weight_decay: float,
    weight_decay_on: str,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
    head_share: float | None = None,
) -> optax.GradientTransformation:
    """Add the decay of the parameters that `weight_decay_on` matches.

    Args:
      weight_decay: factor of the parameters.
      weight_decay_on: regex over their names.
      schedule: number of the update, from 0 -> decay; None: `weight_decay` always.
      head_share: decay of the heads' kernels / decay of other parameters; None: 1.
    """

    def decaying(params: tree.PyTree) -> tree.PyTree:
        mask = tree.mask(params, weight_decay_on)
        if (weight_decay or schedule is not None) and not _values(mask).any():
            raise InputError(
                f"optimizer.weight_decay_on={weight_decay_on!r}: does not match the whole name of "
                f"any parameter; {_some_names(params)}"
            )
        return mask

    def init(params: optax.Params) -> optax.OptState:
        decaying(params)  # raises before anything is computed
        if schedule is None:
            return optax.EmptyState()
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = weight_decay if schedule is None else schedule(state.count)

        def add(
            name: str, decays: np.ndarray | bool, update: jax.Array, param: jax.Array
        ) -> jax.Array:
            if not np.any(decays):
                return update
            own = head_share if head_share is not None and HEADS.fullmatch(name) else 1
            decayed = update + own * factor * param
            return decayed if np.all(decays) else jnp.where(decays, decayed, update)

        if schedule is not None:
            state = optax.ScaleByScheduleState(state.count + 1)
        names = tree.leaf_names(updates)
        return jax.tree.map(add, names, decaying(params), updates, params), state

    return optax.GradientTransformation(init, update)


def _frozen(params: Any, freeze: str) -> Any:
    """`tree.mask` of the frozen parameters.

    Raises:
      InputError: if `freeze` matches none or all of the parameters.
    """
    mask = tree.mask(params, freeze)
    values = _values(mask)
    if values.all() or not values.any():
        raise InputError(
            f"optimizer.freeze={freeze!r}: matches the whole name of "
            f"{'every' if values.all() else 'no'} parameter; {_some_names(params)}; "
            "None freezes nothing"
        )
    return mask


def leaves_that_learn(params: Any, freeze: str) -> Any:
    return jax.tree.map(lambda frozen: not np.all(frozen), _frozen(params, freeze))


def drop_frozen(freeze: str) -> optax.GradientTransformation:
    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        # -0.0, since adding it leaves every parameter unchanged, bit by bit; -0.0 + 0.0 is 0.0.
        return jax.tree.map(
            lambda frozen, leaf: jnp.where(frozen, -0.0, leaf), _frozen(params, freeze), updates
        )

    return optax.stateless(update)


def stop_gradients(params: Any, freeze: str | None) -> Any:
    """`params` with gradients stopped wherever `freeze` matches."""

    def stop(frozen: np.ndarray | bool, leaf: jax.Array) -> jax.Array:
        if not np.any(frozen):
            return leaf
        stopped = jax.lax.stop_gradient(leaf)
        return stopped if np.all(frozen) else jnp.where(frozen, stopped, leaf)

    return params if freeze is None else jax.tree.map(stop, tree.mask(params, freeze), params)


def _values(mask: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mask)])


def _some_names(params: Any) -> str:
    named = tree.flatten_names(params)
    names = [tree.unrolled_names(name, leaf)[0] for name, leaf in named.items()]
    return f"example names: {', '.join(names[:3])}"
