"""Gradients of an objective over a global batch: one pass over it, or a scan of passes.

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

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.tree import Batch, Params, PyTree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.experiment.exchange import Sums
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import (
    Objective,
    ObjectiveOutput,
    at_least_one,
)

# gradients(state, batch, frozen=None) -> (gradients of the loss, the objective's sums).
Gradients = Callable[..., tuple[Params, ObjectiveOutput]]


def make_gradients(
    objective: Objective,
    transform: DeviceTransform,
    seed: int,
    accum_steps: int = 1,
    freeze: str | None = None,
    shardings: PyTree = None,
    exchange: Callable[[Sums], Sums] | None = None,
) -> Gradients:
    """Make gradients(state, batch, frozen) -> (gradients of the loss, the objective's sums).

    Randomness depends on (seed, state.step) only; in `transform` also on the row of the global
    batch.

    Args:
      objective: what is minimised.
      transform: (batch, keys (B,)) -> batch with float32 images in the model's value range.
      seed: the run's seed.
      accum_steps: number of microbatches; must divide each device's share of the batch.
      freeze: as in `make_optimizer`; matching parameters get no gradient.
      shardings: of each gradient, in a tree like the parameters; None, also as a leaf: the compiler
        decides. `sharding.gradient_shardings` makes it.
      exchange: adds the sums of devices that each compute their own rows; None: the compiler
        decides. `choose_exchange` makes it, for objectives without further terms that leave the
        state as it is.

    Raises:
      InputError: the objective couples rows, and there are microbatches.
    """
    if objective.couples_rows and accum_steps > 1:
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: the loss of an image depends on the others of "
            "its batch, so the batch cannot be computed in parts; set it to 1"
        )

    def sums_of(params, state, rows, frozen, key):
        if shardings is not None:
            params = _constrain(params, shardings)
        if freeze is not None:
            params = _stop_gradients(params, freeze)
        return objective.loss(params, state, rows, frozen, key)

    def one_pass(loss_of, state, rows, frozen, key):
        """The gradients of loss_of(sums of `rows`), and the sums."""

        def loss_fn(params):
            sums = sums_of(params, state, rows, frozen, key)
            return loss_of(sums), sums

        return jax.grad(loss_fn, has_aux=True)(state.params)

    def scan_of_passes(state, batch, frozen, key):
        """The gradients and sums of a batch; a single term is not divided by its weight yet."""
        split = jax.tree.map(lambda x: _split_rows(x, accum_steps), batch)

        def inputs(i):
            rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, False), split)
            return rows, frozen, jax.random.fold_in(key, i)

        def weights_of(carried, i):  # without the model, on which the weights do not depend
            return _weights(sums_of(state.params, state, *inputs(i))), carried

        has_terms = jax.eval_shape(lambda: sums_of(state.params, state, *inputs(0))).terms
        if has_terms and exchange is not None:
            raise ValueError("a device cannot divide further terms by the weights of the batch; "
                             "leave the objective out of choose_exchange")  # fmt: skip
        if accum_steps == 1:
            return one_pass(lambda sums: sums.loss_sum, state, batch, frozen, key)
        weights = _add_up(weights_of, {}, accum_steps)[0] if has_terms else None

        def loss_of(sums):
            return sums.loss_sum if weights is None else _with_weights(sums, weights).loss

        def of_part(carried, i):
            grads, sums = one_pass(loss_of, state.replace(**carried), *inputs(i))
            return (grads, sums._replace(model_state={}, objective_state={})), _carried(sums)

        (grads, sums), carried = _add_up(of_part, _carried(state), accum_steps)
        return grads, sums._replace(**carried)

    def gradients(
        state: TrainState, batch: Batch, frozen: PyTree = None
    ) -> tuple[Params, ObjectiveOutput]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        rows = jnp.arange(batch["mask"].shape[0])
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(transform_key, rows)
        batch = transform(batch, row_keys)
        if accum_steps == 1 and exchange is None:
            return one_pass(lambda sums: sums.loss, state, batch, frozen, model_key)
        passes = scan_of_passes if exchange is None else exchange(scan_of_passes)
        grads, sums = passes(state, batch, frozen, model_key)
        if not sums.terms:
            weight = at_least_one(sums.weight_sum)
            grads = jax.tree.map(lambda g: g / weight, grads)
        return grads, sums

    return gradients


def _add_up(part: Callable, carried: Any, number: int) -> tuple[Any, Any]:
    """The sum of the values of all parts, and what the last one carries on.

    part(carried, i) -> (values, carried on to part i + 1).
    """
    shapes, _ = jax.eval_shape(part, carried, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total_and_carried, i):
        total, carried = total_and_carried
        values, carried = part(carried, i)
        return (jax.tree.map(jnp.add, total, values), carried), None

    return jax.lax.scan(add, (zeros, carried), jnp.arange(number))[0]


def _carried(holder: TrainState | ObjectiveOutput) -> dict[str, Any]:
    """The states that pass from one microbatch to the next."""
    return {name: getattr(holder, name) for name in ("model_state", "objective_state")}


def _weights(sums):
    """(weight_sum, {name: weight of a further term})."""
    return sums.weight_sum, {name: term.weight for name, term in sums.terms.items()}


def _with_weights(sums, weights):
    weight_sum, of_terms = weights
    terms = {name: term.replace(weight=of_terms[name]) for name, term in sums.terms.items()}
    return sums._replace(weight_sum=weight_sum, terms=terms)


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
