"""The training step: (state, batch) -> (state, metrics)."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.tree import Batch, ModelState, PyTree
from vit_jax.experiment.gradients import Gradients
from vit_jax.experiment.schedules import Schedule
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import ObjectiveOutput, at_least_one

AbstractBatch = dict[str, jax.ShapeDtypeStruct]
Metrics = dict[str, jax.Array]  # scalars
Out = TypeVar("Out", covariant=True)


class Step(Protocol[Out]):
    """A pure function of a state, a batch and, if the objective has any, frozen arrays."""

    def __call__(self, state: TrainState, batch: Batch, frozen: PyTree = None, /) -> Out: ...


class JittedStep(Step[Out], Protocol[Out]):
    """A `Step` under `jax.jit`."""

    def trace(
        self, state: TrainState, batch: AbstractBatch, frozen: PyTree = None, /
    ) -> jax.stages.Traced: ...

    def lower(
        self, state: TrainState, batch: AbstractBatch, frozen: PyTree = None, /
    ) -> jax.stages.Lowered: ...


def make_train_step(
    gradients: Gradients,
    tx: optax.GradientTransformation,
    ema_decay: Schedule | None = None,
) -> Step[tuple[TrainState, Metrics]]:
    """Make step(state, batch, frozen=None) -> (state, metrics); pure.

    With `ema_decay`, the update after `step` earlier ones is followed by

        ema <- d * ema + (1 - d) * params,  d = ema_decay(step)

    and the model state, such as batch statistics, is averaged in the same way.

    Args:
      gradients: from `make_gradients`.
      tx: the optimizer.
      ema_decay: from `make_ema_decay`; None: no average.
    """

    def train_step(
        state: TrainState, batch: Batch, frozen: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        grads, sums = gradients(state, batch, frozen)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        metrics = metrics_of(sums) | {"grad_norm": optax.tree.norm(grads)}
        metrics["masked"] = (1.0 - batch["mask"]).sum()
        averages = {}
        if ema_decay is not None:
            averages = average(state, params, sums.model_state, ema_decay(state.step))
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


def metrics_of(sums: ObjectiveOutput) -> Metrics:
    """The metrics, the loss, and its further terms as `loss_NAME`."""
    weight = at_least_one(sums.weight_sum)
    metrics = {name: total / weight for name, total in sums.metric_sums.items()}
    metrics |= {f"loss_{name}": term.mean for name, term in sums.terms.items()}
    return metrics | {"loss": sums.plus_terms(sums.loss_sum / weight)}


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
