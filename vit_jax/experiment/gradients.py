"""Gradients of an objective over a global batch, computed at once or in microbatches.

The transformed batch is split into A = `accum_steps` microbatches. Microbatch i holds the rows i,
i + A, i + 2A, ..., so that no row moves to another device. Gradients and sums of all microbatches
are added in float32 and divided once, by the weight of the whole batch; each of several terms is
divided by its own. The result is the same for every A, apart from rounding, the model's random
draws (microbatch i uses fold_in(key, i)), and the states that pass from one microbatch to the next.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.errors import InputError
from vit_jax.experiment.exchange import Exchange
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import (
    Objective,
    ObjectiveOutput,
    PlainObjective,
    as_objective,
    at_least_one,
)
from vit_jax.tree import Batch, Params, PyTree

_CARRIED = ("model_state", "objective_state")  # pass from one microbatch to the next

# gradients(state, batch, frozen=None) -> (gradients of the loss, the objective's sums).
Gradients = Callable[..., tuple[Params, ObjectiveOutput]]


def make_gradients(
    objective: Objective | PlainObjective,
    transform: DeviceTransform,
    seed: int,
    accum_steps: int,
    freeze: str | None,
    shardings: PyTree = None,
    exchange: Exchange | None = None,
) -> Gradients:
    """Make gradients(state, batch, frozen) -> (gradients of the loss, the objective's sums).

    `shardings`: of each gradient, in a tree like the parameters; None, also as a leaf: the compiler
    decides. `sharding.gradient_shardings` makes it. `exchange`: adds the sums of devices that each
    compute their own rows; None: the compiler decides. `exchange.choose_exchange` makes it, for
    objectives without further terms that leave the state as it is.

    Raises:
      InputError: the objective couples rows, and there are microbatches.
    """
    objective = as_objective(objective)
    loss_of_batch = objective.loss
    if objective.couples_rows and accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: the loss of an image depends on the others of "
            "its batch, so the batch cannot be computed in parts; set it to 1"
        )

    def sums_of(params, state, batch, frozen, key):
        if shardings is not None:
            params = _constrain(params, shardings)
        if freeze is not None:
            params = _stop_gradients(params, freeze)
        return loss_of_batch(params, state, batch, frozen, key)

    def whole_batch(state, batch, frozen, key):
        def loss_fn(params):
            out = sums_of(params, state, batch, frozen, key)
            return out.loss, out

        return jax.grad(loss_fn, has_aux=True)(state.params)

    def of_own_rows(state, batch, frozen, key):
        """Gradients and sums of the rows of one device."""
        grads, sums = _sum_microbatches(sums_of, accum_steps, state, batch, frozen, key)
        return grads, _without_carried(sums)

    def gradients(
        state: TrainState, batch: Batch, frozen: PyTree = None
    ) -> tuple[Params, ObjectiveOutput]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        rows = jnp.arange(batch["mask"].shape[0])
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(transform_key, rows)
        batch = transform(batch, row_keys)
        if exchange is not None:
            needed = state.replace(opt_state=(), ema={})
            grads, sums = exchange(of_own_rows)(needed, batch, frozen, model_key)
            return _divide(grads, sums._replace(**_carried_of(state)))
        if accum_steps == 1:
            return whole_batch(state, batch, frozen, model_key)
        return _add_microbatches(sums_of, accum_steps, state, batch, frozen, model_key)

    return gradients


def _add_microbatches(sums_of, accum_steps, state, batch, frozen, key):
    """Gradients and sums of a batch; sums_of(params, state, rows, frozen, key) gives a part's."""
    grads, sums = _sum_microbatches(sums_of, accum_steps, state, batch, frozen, key)
    return (grads, sums) if sums.terms else _divide(grads, sums)


def _divide(grads, sums):
    """The gradients of the only term, divided by its weight, and the sums."""
    weight = at_least_one(sums.weight_sum)
    return jax.tree.map(lambda g: g / weight, grads), sums


def _sum_microbatches(sums_of, accum_steps, state, batch, frozen, key):
    """As `_add_microbatches`; the gradients of the only term are not divided."""
    split = jax.tree.map(lambda x: _split_rows(x, accum_steps), batch)

    def sums_of_part(params, carried, i):
        rows = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), split
        )
        rng = jax.random.fold_in(key, i)
        return sums_of(params, state.replace(**carried), rows, frozen, rng)

    first = _carried_of(state)
    weights = _weights_of_batch(lambda i: sums_of_part(state.params, first, i), accum_steps)

    def loss_fn(params, carried, i):
        out = sums_of_part(params, carried, i)
        if weights is None:  # the only weight divides the sum of all gradients at the end
            return out.loss_sum, out
        return _with_weights(out, weights).loss, out

    grads_and_sums = jax.grad(loss_fn, has_aux=True)

    def add(total, i):
        grads, sums, carried = total
        more_grads, out = grads_and_sums(state.params, carried, i)
        carried = _carried_of(out)
        sums = jax.tree.map(jnp.add, sums, _without_carried(out))
        return (jax.tree.map(jnp.add, grads, more_grads), sums, carried), None

    shapes = jax.eval_shape(grads_and_sums, state.params, first, 0)
    grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = (grads, _without_carried(sums), first)
    (grads, sums, carried), _ = jax.lax.scan(add, start, jnp.arange(accum_steps))
    return grads, sums._replace(**carried)


def _carried_of(holder: TrainState | ObjectiveOutput) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in _CARRIED}


def _without_carried(out: ObjectiveOutput) -> ObjectiveOutput:
    return out._replace(model_state={}, objective_state={})


def _weights_of_batch(sums_of_part, accum_steps):
    """The weights of all terms of the whole batch, as `_weights`; None if there is only one term.

    A weight does not depend on the parameters, so the compiler leaves the model out here.
    """
    shapes = jax.eval_shape(sums_of_part, 0)
    if not shapes.terms:
        return None

    def add(total, i):
        return jax.tree.map(jnp.add, total, _weights(sums_of_part(i))), None

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _weights(shapes))
    return jax.lax.scan(add, start, jnp.arange(accum_steps))[0]


def _weights(out):
    """(weight_sum, {name: weight of a further term})."""
    return out.weight_sum, {name: term.weight for name, term in out.terms.items()}


def _with_weights(out, weights):
    weight_sum, of_terms = weights
    terms = {name: term.replace(weight=of_terms[name]) for name, term in out.terms.items()}
    return out._replace(weight_sum=weight_sum, terms=terms)


def _split_rows(x: jax.Array, accum_steps: int) -> jax.Array:
    """(B, ...) -> (B / A, A, ...): microbatch i is [:, i]; the first axis keeps its sharding."""
    if x.shape[0] % accum_steps:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: must divide the batch of {x.shape[0]} rows"
        )
    return x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:])


def _constrain(params: Params, shardings: PyTree) -> Params:
    """`params` with the given shardings; their gradients get the same."""

    def constrain(sharding, leaf):
        return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)

    return jax.tree.map(constrain, shardings, params, is_leaf=lambda x: x is None)


def _stop_gradients(params: Params, freeze: str) -> Params:
    """`params` with gradients stopped wherever `freeze` matches."""

    def stop(frozen, leaf):
        if not np.any(frozen):
            return leaf
        stopped = jax.lax.stop_gradient(leaf)
        return stopped if np.all(frozen) else jnp.where(frozen, stopped, leaf)

    return jax.tree.map(stop, tree.mask(params, freeze), params)
