"""Norms of gradients, parameters and updates, by layer."""

import jax.numpy as jnp
import optax

from vit_jax import tree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.experiment.gradients import make_gradients
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics, Step
from vit_jax.objectives.supervised import Objective
from vit_jax.tree import Batch


def make_layer_norms(
    objective: Objective,
    tx: optax.GradientTransformation,
    transform: DeviceTransform,
    seed: int,
    *,
    accum_steps: int = 1,
    freeze: str | None = None,
) -> Step[Metrics]:
    """norms(state, batch) -> scalars of the step that `state` has before it; pure.

    For each PART of `tree.parts(params)`: `grad_norm/PART` (before clipping), `param_norm/PART`
    (before the update), `update_norm/PART`, and `update_ratio/PART`, update over parameter norm (0
    where that is 0). The arguments are those of `make_train_step`.

    It computes the gradients once more. In the training step itself they would have been for
    nothing, but they would have made it another program, which the compiler may round otherwise.
    """
    gradients = make_gradients(objective, transform, seed, accum_steps, freeze)

    def layer_norms(state: TrainState, batch: Batch) -> Metrics:
        grads, _ = gradients(state, batch)
        updates, _ = tx.update(grads, state.opt_state, state.params)
        grad, param, update = (_norms_by_part(x) for x in (grads, state.params, updates))
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


def _norms_by_part(leaves: optax.Updates) -> Metrics:
    """{part: Euclidean norm of all that belongs to it} of a tree like the parameters."""
    squares: Metrics = {}
    for name, leaf in tree.flatten_names(leaves).items():
        axes = tuple(range(int(tree.is_stacked(name)), leaf.ndim))
        totals = jnp.ravel(jnp.square(leaf).sum(axis=axes))
        for unrolled, total in zip(tree.unrolled_names(name, leaf), totals, strict=True):
            part = tree.part_of(unrolled)
            squares[part] = squares.get(part, 0.0) + total
    return {part: jnp.sqrt(total) for part, total in squares.items()}
