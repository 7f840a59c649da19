"""LAMB: AdamW whose update of each leaf is as large as the leaf."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import tree
from vit_jax.experiment.optimizers.masks import HEADS
from vit_jax.experiment.optimizers.optimizers import AdamW, eps_of


class Lamb(AdamW):
    """You et al. 2019 (arXiv:1904.00962), algorithm 2, with phi(z) = z.

    Leaves that `weight_decay_on` does not match take AdamW's update as it is, as published; so does
    the head's kernel. It starts at 0 here, where updates as large as itself would keep it.
    """

    eps: float = eps_of(1e-6)

    def after(
        self, weight_decay_on: str, schedule: optax.Schedule
    ) -> Mapping[str, optax.GradientTransformation]:
        return {"weight_decay": _scale_to_params(weight_decay_on)}


def _scale_to_params(pattern: str) -> optax.GradientTransformation:
    """Scale the update of each leaf that `pattern` matches, layer by layer, to the leaf's norm.

    It stays as it is if either norm is 0, and for the head's kernel.
    """

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        def scale(
            name: str, adapts: np.ndarray | bool, update: jax.Array, param: jax.Array
        ) -> jax.Array:
            if HEADS.fullmatch(name) or not np.any(adapts):
                return update
            axes = tuple(range(int(tree.is_stacked(name)), update.ndim))
            of_param, of_update = (
                jnp.sqrt(jnp.square(x).sum(axes, keepdims=True)) for x in (param, update)
            )
            scales = adapts & (of_param > 0) & (of_update > 0)
            return update * jnp.where(scales, of_param / of_update, 1.0)

        mask = tree.mask(params, pattern)
        return jax.tree.map(scale, tree.leaf_names(updates), mask, updates, params)

    return optax.stateless(update)
