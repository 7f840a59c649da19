"""The training step: state and batch in, state and metrics out."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class TrainState:
    """All that a run carries from step to step.

    step: int32 scalar, the number of updates made.
    params: float32 parameters.
    model_state: what else the model carries (batch statistics); {} where there is none.
    opt_state: the optimizer's.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any


def init_state(
    model: nn.Module, tx: optax.GradientTransformation, image_size: tuple[int, int], seed: int
) -> TrainState:
    """The state before the first step; pure, to be jitted with its shardings."""
    images = jnp.zeros((1, *image_size, 3))
    model_state = model.init(jax.random.key(seed), images)
    params = model_state.pop("params")
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, tx.init(params))


def make_train_step(
    objective: Callable, tx: optax.GradientTransformation, transform: Callable, seed: int
) -> Callable:
    """step(state, batch, frozen=None) -> (state, metrics); pure.

    Its randomness depends on (seed, state.step) only, that of `transform` on the row of the global
    batch besides.

    Args:
      objective: (params, model_state, batch, frozen, rng) -> sums over the batch.
      tx: the optimizer.
      transform: (batch, keys (B,)) -> batch with float32 images in the value range.
      seed: of the run.
    """

    def train_step(state: TrainState, batch: dict, frozen=None):
        step_key = jax.random.fold_in(jax.random.key(seed), state.step)
        transform_key, model_key = jax.random.split(step_key)
        rows = jnp.arange(batch["image"].shape[0])
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(transform_key, rows)
        mask = batch["mask"]
        batch = transform(batch, row_keys)

        def loss_fn(params):
            out = objective(params, state.model_state, batch, frozen, model_key)
            weight = jnp.maximum(out.weight_sum, 1.0)  # a batch may be masked altogether
            return out.loss_sum / weight, (out, weight)

        (loss, (out, weight)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        metrics = {name: total / weight for name, total in out.metric_sums.items()}
        metrics["corrupt"] = (1.0 - mask).sum()
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        state = state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            model_state=out.model_state,
            opt_state=opt_state,
        )
        return state, metrics

    return train_step
