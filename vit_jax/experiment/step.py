"""The training step: state and batch in, state and metrics out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import collect_faults
from vit_jax.experiment.gradients import at_least_one, make_gradients
from vit_jax.experiment.state import TrainState


def make_train_step(
    objective: Callable,
    tx: optax.GradientTransformation,
    transform: Callable,
    seed: int,
    *,
    accum_steps: int = 1,
    ema_decay: float | None = None,
    freeze: str | None = None,
) -> Callable:
    """step(state, batch) -> (state, metrics); pure.

    Its randomness depends on (seed, state.step) only, and `transform`'s also on the row of the
    global batch. With `accum_steps` the batch goes through in microbatches (gradients.py).

    With `ema_decay`, after the update that follows `step` others:

        ema <- d * ema + (1 - d) * params,  d = min(ema_decay, (1 + step) / (10 + step))

    so that the average of a short run does not stay at the start.

    Args:
      objective: (params, model_state, batch, rng) -> sums over the batch.
      tx: the optimizer.
      transform: (batch, keys (B,)) -> batch with float32 images in the value range.
      seed: of the run.
      accum_steps: microbatches; it divides each device's share of the batch.
      ema_decay: of the running average of the parameters; None: there is none.
      freeze: as in `make_optimizer`; what it matches has no gradient.

    Raises:
      InputError: if a number is out of range.
    """
    check_step(accum_steps, ema_decay)
    gradients = make_gradients(objective, transform, seed, accum_steps, freeze)

    def train_step(state: TrainState, batch: dict):
        grads, sums = gradients(state, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        weight = at_least_one(sums.weight_sum)
        metrics = {name: total / weight for name, total in sums.metric_sums.items()}
        metrics |= {"loss": sums.loss_sum / weight, "grad_norm": optax.tree.norm(grads)}
        metrics["masked"] = (1.0 - batch["mask"]).sum()
        ema = state.ema if ema_decay is None else average(state, params, ema_decay)
        state = state.replace(
            step=state.step + 1,
            params=params,
            model_state=sums.model_state,
            opt_state=opt_state,
            ema=ema,
        )
        return state, metrics

    return train_step


def average(state: TrainState, params: Any, ema_decay: float) -> Any:
    """The running average of the parameters after the update from `state` to `params`."""
    keep = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
    # In this form the average of what does not change does not change either.
    return jax.tree.map(lambda e, p: e + (1.0 - keep) * (p - e), state.ema, params)


def check_step(accum_steps: int, ema_decay: float | None) -> None:
    """Raises InputError for numbers out of range."""
    faults = []
    if accum_steps < 1:
        faults.append(f"optimizer.accum_steps={accum_steps}: needs a positive number; 1 is off")
    if ema_decay is not None and not 0.0 < ema_decay < 1.0:
        faults.append(f"optimizer.ema_decay={ema_decay}: needs a number between 0 and 1, or None")
    collect_faults(faults)
