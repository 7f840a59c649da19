"""Gradients of an objective over a global batch, computed at once or in microbatches.

The transformed batch is split into A = `accum_steps` microbatches. Microbatch i holds the rows i,
i + A, i + 2A, ..., so that no row moves to another device. Gradients and sums of all microbatches
are added in float32 and divided once, by the weight of the whole batch. The result is the same for
every A, apart from rounding, the model's random draws (microbatch i uses fold_in(key, i)), and the
`model_state` that passes from one microbatch to the next.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.errors import InputError
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.supervised import Objective, ObjectiveOutput
from vit_jax.tree import Batch, Params

Gradients = Callable[[TrainState, Batch], tuple[Params, ObjectiveOutput]]


def make_gradients(
    objective: Objective,
    transform: DeviceTransform,
    seed: int,
    accum_steps: int,
    freeze: str | None,
) -> Gradients:
    """Make gradients(state, batch) -> (gradients of the mean loss, the objective's sums)."""

    def objective_of(params, model_state, batch, key):
        if freeze is not None:
            params = _stop_gradients(params, freeze)
        return objective(params, model_state, batch, key)

    def whole_batch(state, batch, key):
        def loss_fn(params):
            out = objective_of(params, state.model_state, batch, key)
            return out.loss_sum / at_least_one(out.weight_sum), out

        return jax.grad(loss_fn, has_aux=True)(state.params)

    def microbatches(state, batch, key):
        split = jax.tree.map(lambda x: _split_rows(x, accum_steps), batch)

        def loss_fn(params, model_state, i):
            rows = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), split
            )
            rng = jax.random.fold_in(key, i)
            out = objective_of(params, model_state, rows, rng)
            return out.loss_sum, out

        grads_and_sums = jax.grad(loss_fn, has_aux=True)

        def add(total, i):
            grads, sums = total
            more_grads, out = grads_and_sums(state.params, sums.model_state, i)
            model_state, out = out.model_state, out._replace(model_state=())
            sums = jax.tree.map(jnp.add, sums._replace(model_state=()), out)
            sums = sums._replace(model_state=model_state)
            return (jax.tree.map(jnp.add, grads, more_grads), sums), None

        shapes = jax.eval_shape(grads_and_sums, state.params, state.model_state, 0)
        grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        start = (grads, sums._replace(model_state=state.model_state))
        (grads, sums), _ = jax.lax.scan(add, start, jnp.arange(accum_steps))
        weight = at_least_one(sums.weight_sum)
        return jax.tree.map(lambda g: g / weight, grads), sums

    def gradients(state: TrainState, batch: Batch) -> tuple[Params, ObjectiveOutput]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        rows = jnp.arange(batch["image"].shape[0])
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(transform_key, rows)
        batch = transform(batch, row_keys)
        of_batch = whole_batch if accum_steps == 1 else microbatches
        return of_batch(state, batch, model_key)

    return gradients


def at_least_one(weight: jax.Array) -> jax.Array:
    return jnp.maximum(weight, 1.0)  # all rows of a batch may be masked


def _split_rows(x: jax.Array, accum_steps: int) -> jax.Array:
    """(B, ...) -> (B / A, A, ...): microbatch i is [:, i]; the first axis keeps its sharding."""
    if x.shape[0] % accum_steps:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: must divide the batch of {x.shape[0]} rows"
        )
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:])


def _stop_gradients(params: Params, freeze: str) -> Params:
    """`params` with gradients stopped wherever `freeze` matches."""

    def stop(frozen, leaf):
        if not np.any(frozen):
            return leaf
        stopped = jax.lax.stop_gradient(leaf)
        return stopped if np.all(frozen) else jnp.where(frozen, stopped, leaf)

    return jax.tree.map(stop, tree.mask(params, freeze), params)
