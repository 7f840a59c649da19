"""Gradients over a global batch in parts: in microbatches, or on devices for their own rows.

The batch is split into A = `accum_steps` microbatches. Microbatch i holds the rows i, i + A,
i + 2A, ..., so that no row moves to another device. Gradients and sums of all microbatches are
added in float32 and divided once, by the weight of the whole batch; each of several terms is
divided by its own. The result is the same for every A, apart from rounding, the model's random
draws (microbatch i uses fold_in(key, i)), and the states that pass from one microbatch to the next.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.tree import Batch, Params
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import ObjectiveOutput, at_least_one

# sums(state, batch, key) -> (gradients, the objective's sums) over the rows of the batch.
Sums = Callable[..., tuple[Params, ObjectiveOutput]]


def accumulate(
    sums_of: Callable[..., ObjectiveOutput],
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    accum_steps: int,
    join: Callable[[Sums], Sums] | None = None,
) -> tuple[Params, ObjectiveOutput]:
    """The gradients of the loss of a batch, and the objective's sums.

    Args:
      sums_of: (params, state, batch, key) -> the objective's sums; state to key are its arguments.
      accum_steps: A; must divide the rows of each device.
      join: adds the sums of devices that each compute their own rows (`exchange`), for objectives
        without further terms that leave the state as it is; None: the compiler decides.
    """

    def gradients(
        loss_of: Callable[[ObjectiveOutput], jax.Array],
        state: TrainState,
        rows: Batch,
        key: jax.Array,
    ) -> tuple[Params, ObjectiveOutput]:
        def loss_fn(params: Params) -> tuple[jax.Array, ObjectiveOutput]:
            sums = sums_of(params, state, rows, key)
            return loss_of(sums), sums

        return jax.grad(loss_fn, has_aux=True)(state.params)

    def add_up(state: TrainState, batch: Batch, key: jax.Array) -> tuple[Params, ObjectiveOutput]:
        """The gradients and sums; a single term's are not divided by its weight yet."""
        split = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:]), batch
        )  # microbatch i is [:, i]; the first axis keeps its sharding

        def inputs(i: jax.typing.ArrayLike) -> tuple[Batch, jax.Array]:
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, False), split)
            return rows, jax.random.fold_in(key, i)

        def weights_of_part(carried: Any, i: jax.Array) -> tuple[Any, Any]:
            # Without the model, on which the weights do not depend.
            sums = sums_of(state.params, state, *inputs(i))
            return weights_of(sums), carried

        has_terms = jax.eval_shape(lambda: sums_of(state.params, state, *inputs(0))).terms
        assert not has_terms or join is None, "a device knows the weights of its rows only"
        if accum_steps == 1:
            of_batch = (lambda sums: sums.loss) if has_terms else (lambda sums: sums.loss_sum)
            return gradients(of_batch, state, batch, key)
        weights = _add_up(weights_of_part, {}, accum_steps)[0] if has_terms else None

        def loss_of(sums: ObjectiveOutput) -> jax.Array:
            return sums.loss_sum if weights is None else with_weights(sums, *weights).loss

        def of_part(carried: dict[str, Any], i: jax.Array) -> tuple[Any, dict[str, Any]]:
            grads, sums = gradients(loss_of, state.replace(**carried), *inputs(i))
            return (grads, sums._replace(model_state={}, objective_state={})), _carried(sums)

        (grads, sums), carried = _add_up(of_part, _carried(state), accum_steps)
        return grads, sums._replace(**carried)

    grads, sums = (add_up if join is None else join(add_up))(state, batch, key)
    if not sums.terms:
        weight = at_least_one(sums.weight_sum)
        grads = jax.tree.map(lambda g: g / weight, grads)
    return grads, sums


def _add_up(part: Callable, carried: Any, number: int) -> tuple[Any, Any]:
    """The sum of the values of all parts, and what the last one carries on.

    part(carried, i) -> (values, carried on to part i + 1).
    """
    shapes, _ = jax.eval_shape(part, carried, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total_and_carried: tuple[Any, Any], i: jax.Array) -> tuple[tuple[Any, Any], None]:
        total, carried = total_and_carried
        values, carried = part(carried, i)
        return (jax.tree.map(jnp.add, total, values), carried), None

    return jax.lax.scan(add, (zeros, carried), jnp.arange(number))[0]


def _carried(holder: TrainState | ObjectiveOutput) -> dict[str, Any]:
    """The states that pass from one microbatch to the next."""
    return {name: getattr(holder, name) for name in ("model_state", "objective_state")}


def weights_of(sums: ObjectiveOutput) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weight of the first term of the loss, and the further terms' weights."""
    return sums.weight_sum, {name: term.weight for name, term in sums.terms.items()}


def with_weights(
    sums: ObjectiveOutput, weight_sum: jax.Array, of_terms: dict[str, jax.Array]
) -> ObjectiveOutput:
    """`sums` divided by these weights in place of their own; see `weights_of`."""
    terms = {name: term.replace(weight=of_terms[name]) for name, term in sums.terms.items()}
    return sums._replace(weight_sum=weight_sum, terms=terms)
