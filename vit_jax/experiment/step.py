"""The training step: (state, batch) -> (state, metrics)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.tree import Batch, ModelState, Params, PyTree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.devices.sharding import constrain_params
from vit_jax.experiment.accumulation import Sums, accumulate
from vit_jax.experiment.optimizers import lower_rate
from vit_jax.experiment.optimizers.masks import stop_gradients
from vit_jax.experiment.schedules import Keep
from vit_jax.experiment.state import TrainState
from vit_jax.models.patches import row_keys
from vit_jax.objectives.contract import Objective, ObjectiveOutput

AbstractBatch = dict[str, jax.ShapeDtypeStruct]
Metrics = dict[str, Any]  # scalars, and dicts of sums that the host finishes

# A pure function of a state, a batch and, if the objective has any, frozen arrays.
Step = Callable[..., tuple[TrainState, Metrics]]


def make_train_step(
    objective: Objective,
    tx: optax.GradientTransformation,
    transform: DeviceTransform,
    seed: int,
    *,
    ema_decay: Keep | None = None,
    freeze: str | None = None,
    sam_radius: float | None = None,
    accum_steps: int = 1,
    join: Callable[[Sums], Sums] | None = None,
    shardings: PyTree = None,
    pack: tuple[int, ...] | None = None,
) -> Step:
    """Make step(state, batch, frozen=None) -> (state, metrics); pure.

    Randomness depends on (seed, state.step) only; in `transform` also on the row of the global
    batch. With `ema_decay`, the update after `step` earlier ones is followed by

        ema <- d * ema + (1 - d) * params,  d = ema_decay(step, the optimizer's new state)

    and the model state, such as batch statistics, is averaged in the same way.

    Args:
      objective: what is minimised.
      tx: the optimizer.
      transform: (batch, keys (B,)) -> batch with float32 images in the model's value range.
      seed: the run's seed.
      ema_decay: from `make_config_average`; None: no average.
      freeze: as in `make_optimizer`; matching parameters get no gradient.
      sam_radius: takes the gradients, a second time, where `climb` leads; the loss, the metrics and
        new states belong to the parameters themselves. None: it does not.
      accum_steps: number of microbatches; must divide each device's share of the batch.
      join: adds the sums of devices that each compute their own rows; None: the compiler decides.
      shardings: of each gradient, in a tree like the parameters; None, also as a leaf: the compiler
        decides. `sharding.gradient_shardings` makes it.
      pack: `data.pack`; then the share of padding in the rows of tokens is a metric.
    """

    inputs_of = make_inputs(transform, seed)
    gradients = _make_gradients(objective, freeze, accum_steps, join, shardings)

    def train_step(
        state: TrainState, batch: Batch, frozen: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        given = *inputs_of(state, batch), frozen
        grads, sums, loss = gradients(state, *given)
        if sam_radius is not None:
            highest = state.replace(params=climb(state.params, grads, sam_radius))
            grads, *_ = gradients(highest, *given)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        metrics = sums.metrics | {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        metrics["masked"] = (1.0 - batch["mask"]).sum()
        if pack is not None:
            pictures: Any = batch["image"]
            places = len(pictures.grid) // len(pack) * sum(pack)
            metrics["padding"] = 1 - pictures.counts.sum() / places
        averages = {}
        if ema_decay is not None:
            averages = average(state, params, sums.model_state, ema_decay(state.step, opt_state))
        state = state.replace(
            step=state.step + 1,
            params=params,
            model_state=sums.model_state,
            opt_state=opt_state,
            objective_state=sums.objective_state,
            **averages,
        )
        return state, metrics

    return train_step


def _make_gradients(
    objective: Objective,
    freeze: str | None,
    accum_steps: int,
    join: Callable[[Sums], Sums] | None,
    shardings: PyTree,
) -> Callable[..., tuple[Params, ObjectiveOutput, jax.Array]]:
    """Make gradients(state, inputs, key, frozen) -> (gradients, the objective's sums, its loss).

    The gradients are at the parameters of `state`. It takes the arguments of `make_train_step`.
    """

    def gradients(
        state: TrainState, inputs: Batch, key: jax.Array, frozen: PyTree
    ) -> tuple[Params, ObjectiveOutput, jax.Array]:
        def sums_of(
            params: Params, state: TrainState, inputs: Batch, key: jax.Array
        ) -> ObjectiveOutput:
            params = stop_gradients(constrain_params(params, shardings), freeze)
            return objective.loss(params, state, inputs, frozen, key)

        def loss_fn(params: Params) -> tuple[jax.Array, ObjectiveOutput]:
            sums = sums_of(params, state, inputs, key)
            return sums.loss, sums

        if accum_steps == 1 and join is None:
            (loss, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            return grads, sums, loss
        grads, sums = accumulate(sums_of, state, inputs, key, accum_steps, join)
        return grads, sums, sums.loss

    return gradients


def make_inputs(
    transform: DeviceTransform, seed: int
) -> Callable[[TrainState, Batch], tuple[Batch, jax.Array]]:
    """Make inputs_of(state, batch) -> (what the objective takes, its key) of the step from `state`.

    It takes the arguments of `make_train_step`.
    """

    def inputs_of(state: TrainState, batch: Batch) -> tuple[Batch, jax.Array]:
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        keys_B = row_keys(transform_key, batch["mask"].shape[0])
        return transform(batch, keys_B), model_key

    return inputs_of


def skip_step(objective: Objective, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """A step that leaves its batch out: counters advance, so the schedule goes on; pure.

    All else stays, except for the rate, which `lower_rate` halves where the optimizer has it, and
    what `objective.skip` does.
    """

    def advance(x: jax.Array) -> jax.Array:
        return x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x

    opt_state = lower_rate(jax.tree.map(advance, state.opt_state))
    metrics = {"masked": (1.0 - batch["mask"]).sum()}
    own = state.objective_state if objective.skip is None else objective.skip(state)
    return state.replace(step=state.step + 1, opt_state=opt_state, objective_state=own), metrics


def climb(params: optax.Params, grads: optax.Updates, radius: float) -> optax.Params:
    """The point at the distance `radius` where the loss is highest, to first order.

    Source: sharpness-aware minimisation (SAM), Foret et al. 2020 (arXiv:2010.01412), Eq. 2, p = 2.
    """
    scale = radius / (optax.tree.norm(grads) + 1e-12)
    return jax.tree.map(lambda p, g: p + scale * g, params, grads)


def average(
    state: TrainState, params: optax.Params, model_state: ModelState, keep: jax.Array | float
) -> dict[str, Any]:
    """The running averages, by field, after the update from `state` to the new values.

    `keep`: share of the old averages, a scalar.
    """

    def follow(e: jax.Array, p: jax.Array) -> jax.Array:
        if not jnp.issubdtype(p.dtype, jnp.floating):
            return p  # a counter
        # Written this way, the average of constant parameters stays exactly constant.
        return e + (1.0 - keep) * (p - e)

    old = {"ema": state.ema, "ema_model_state": state.ema_model_state}
    new = {"ema": params, "ema_model_state": model_state}
    return jax.tree.map(follow, old, new)
