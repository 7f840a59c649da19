"""Norms of gradients, parameters and updates, by layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import tree
from vit_jax.base.tree import Batch, PyTree
from vit_jax.experiment.experiment import Experiment
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics, Step


def watched(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with (gradients, updates) as its new state."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        moved, _ = tx.update(updates, state, params)
        return moved, (updates, moved)

    return optax.GradientTransformation(tx.init, update)


def make_layer_norms(step: Step) -> Callable[..., Metrics]:
    """Make norms(state, batch, frozen=None) -> scalars for the step that starts from `state`; pure.

    For each PART of `tree.parts(params)`: `grad_norm/PART` (before clipping), `param_norm/PART`
    (before the update), `update_norm/PART`, and `update_ratio/PART` = update_norm / param_norm, 0
    if param_norm is 0. `step` is the training step with its optimizer `watched`.

    The gradients are computed a second time. Adding the norms to the training step would avoid
    this, but change its program and thus, possibly, its rounding.
    """

    def layer_norms(state: TrainState, batch: Batch, frozen: PyTree = None) -> Metrics:
        seen: Any = step(state, batch, frozen)[0].opt_state
        grads, updates = seen
        grad, param, update = (norms_by_group(x) for x in (grads, state.params, updates))
        norms: Metrics = {}
        for part in tree.parts(state.params):
            norms |= {
                f"grad_norm/{part}": grad[part],
                f"param_norm/{part}": param[part],
                f"update_norm/{part}": update[part],
                f"update_ratio/{part}": update[part]
                / jnp.where(param[part] > 0, param[part], jnp.inf),
            }
        return norms

    return layer_norms


def layer_norms_program(e: Experiment) -> jax.stages.Wrapped:
    """(state, batch, *frozen) -> norms by layer for that step, jitted; keeps the state."""
    return e.jit(make_layer_norms(e.step_with(watched(e.tx))), in_shardings=e.in_shardings)


def norms_by_group(leaves: optax.Updates, group: Callable[[str], str] = tree.part_of) -> Metrics:
    """{group: Euclidean norm of its leaves} for a tree like the parameters.

    `group` maps the name of a leaf in the unrolled model to its group.
    """
    squares: Metrics = {}
    for name, leaf in tree.flatten_names(leaves).items():
        axes = tuple(range(int(tree.is_stacked(name)), leaf.ndim))
        totals = jnp.ravel(jnp.square(leaf).sum(axis=axes))
        for unrolled, total in zip(tree.unrolled_names(name, leaf), totals, strict=True):
            squares[group(unrolled)] = squares.get(group(unrolled), 0.0) + total
    return {name: jnp.sqrt(total) for name, total in squares.items()}
