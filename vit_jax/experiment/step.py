"""The training step: (state, batch) -> (state, metrics)."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from vit_jax.data.device_ops import DeviceTransform
from vit_jax.errors import collect_faults
from vit_jax.experiment.exchange import Exchange
from vit_jax.experiment.gradients import make_gradients
from vit_jax.experiment.schedules import half_cosine
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import Objective, ObjectiveOutput, PlainObjective, at_least_one
from vit_jax.tree import Batch, ModelState, PyTree

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
    objective: Objective | PlainObjective,
    tx: optax.GradientTransformation,
    transform: DeviceTransform,
    seed: int,
    *,
    accum_steps: int = 1,
    ema_decay: float | None = None,
    freeze: str | None = None,
    ema_decay_end: float | None = None,
    total_steps: int = 1,
    grad_shardings: PyTree = None,
    exchange: Exchange | None = None,
) -> Step[tuple[TrainState, Metrics]]:
    """Make step(state, batch, frozen=None) -> (state, metrics); pure.

    Randomness depends on (seed, state.step) only; in `transform` also on the row of the global
    batch. With `accum_steps` the batch is processed in microbatches (gradients.py).

    With `ema_decay`, the update after `step` earlier ones is followed by

        ema <- d * ema + (1 - d) * params,  d = min(ema_decay, (1 + step) / (10 + step))

    so that in a short run the average does not stay near the initial parameters. With
    `ema_decay_end` the average is a teacher, whose d follows half a cosine from ema_decay at the
    first to ema_decay_end at the last step:

        d = ema_decay_end + (ema_decay - ema_decay_end) (1 + cos(pi step / total_steps)) / 2

    The model state, such as batch statistics, is averaged in the same way.

    Args:
      objective: an `Objective`, or a function (params, model_state, batch, rng) -> sums over the
        batch.
      tx: the optimizer.
      transform: (batch, keys (B,)) -> batch with float32 images in the model's value range.
      seed: the run's seed.
      accum_steps: number of microbatches; must divide each device's share of the batch.
      ema_decay: decay of the running average of the parameters; None: no average.
      freeze: as in `make_optimizer`; matching parameters get no gradient.
      ema_decay_end: decay at the end of the run, see above; None: the decay is constant.
      total_steps: length of the run.
      grad_shardings, exchange: `shardings` and `exchange` of `make_gradients`.

    Raises:
      InputError: if a number is out of range.
    """
    check_step(accum_steps, ema_decay, ema_decay_end)
    gradients = make_gradients(
        objective, transform, seed, accum_steps, freeze, grad_shardings, exchange
    )

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
            keep = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
            if ema_decay_end is not None:
                keep = half_cosine(state.step, total_steps, ema_decay, ema_decay_end)
            averages = average(state, params, sums.model_state, keep)
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
    state: TrainState, params: optax.Params, model_state: ModelState, keep: jax.Array
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


def check_step(
    accum_steps: int, ema_decay: float | None, ema_decay_end: float | None = None
) -> None:
    """Raise InputError if a number is out of range."""
    faults = []
    if accum_steps < 1:
        faults.append(
            f"optimizer.accum_steps={accum_steps}: needs a positive number; 1 turns it off"
        )
    if ema_decay is not None and not 0.0 < ema_decay < 1.0:
        faults.append(f"optimizer.ema_decay={ema_decay}: must be between 0 and 1, or None")
    if ema_decay_end is not None and (ema_decay is None or not 0.0 < ema_decay_end <= 1.0):
        faults.append(
            f"optimizer.ema_decay_end={ema_decay_end}: needs a number above 0, at most 1, and "
            "optimizer.ema_decay at the start of the run; None keeps the decay constant"
        )
    collect_faults(faults)
