"""The loss of each row of a batch, and the rows where it is largest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.pictures import Pictures
from vit_jax.base.tree import Batch, PyTree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.experiment.accumulation import accumulate, weights_of, with_weights
from vit_jax.experiment.experiment import Experiment
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_inputs
from vit_jax.objectives.contract import Objective, ObjectiveOutput, at_least_one

_SHOWN = 64


def make_row_losses(
    objective: Objective,
    transform: DeviceTransform,
    seed: int,
    *,
    accum_steps: int = 1,
) -> Callable[..., dict[str, Any]]:
    """Make row_losses(state, batch, frozen=None) for the step that starts from `state`; pure.

    Returns {"loss": (B,), "id": (B,), "mask": (B,), "rows": (n,), "images": (n, h, w, channels)}:
    the images, uint8, of the n <= 64 rows with the largest loss, as the host prepared them; of
    several views the first. "images" is missing if the batch has features in their place, or
    pictures in their own shape. It takes the arguments of `make_train_step`.

    The losses come from the step's own forward pass, with its batch statistics and random draws:
    a row's is the derivative of the loss by the row's mask, times the weight of the batch. 0 where
    the mask is. All are NaN if the objective couples rows, or if their mean is not the step's loss
    because it uses the mask otherwise than as a factor.
    """
    inputs_of = make_inputs(transform, seed)

    def of_step(state: TrainState, batch: Batch, frozen: PyTree) -> jax.Array:
        inputs, key = inputs_of(state, batch)
        params, mask = state.params, inputs["mask"]

        def sums_of(
            mask: jax.Array, state: TrainState, rows: Batch, key: jax.Array
        ) -> ObjectiveOutput:
            rows = rows | {"mask": mask[rows["row"]]}
            sums = objective.loss(params, state, rows, frozen, key)
            return with_weights(sums, *jax.lax.stop_gradient(weights_of(sums)))

        rows = inputs | {"row": jnp.arange(len(mask))}
        of_mask: Any = state.replace(params=mask)
        grads, sums = accumulate(sums_of, of_mask, rows, key, accum_steps)
        weight = at_least_one(mask.sum())
        losses = jnp.where(mask > 0, jnp.asarray(grads) * weight, 0)
        adds_up = jnp.isclose(losses.sum() / weight, sums.loss, rtol=1e-3, equal_nan=True)
        return jnp.where(adds_up, losses, jnp.nan)

    def row_losses(state: TrainState, batch: Batch, frozen: PyTree = None) -> dict[str, Any]:
        none = jnp.full_like(batch["mask"], jnp.nan)
        losses = none if objective.couples_rows else of_step(state, batch, frozen)
        # top_k takes NaN for the largest.
        _, rows = jax.lax.top_k(losses, min(_SHOWN, len(losses)))
        found = {name: batch[name] for name in ("id", "mask")} | {"loss": losses, "rows": rows}
        views = [batch[k] for k in ("image", "global_views", "local_views") if k in batch]
        if views and not isinstance(views[0], Pictures):
            found["images"] = views[0][rows] if views[0].ndim == 4 else views[0][rows, 0]
        return found

    return row_losses


def row_losses_program(e: Experiment, mesh: Mesh) -> jax.stages.Wrapped:
    """The function of `make_row_losses`, jitted; it keeps the state."""
    parts = e.parts
    function = make_row_losses(
        e.objective, parts.transform, parts.seed, accum_steps=parts.accum_steps
    )
    whole = NamedSharding(mesh, P())
    return e.jit(function, in_shardings=e.in_shardings, out_shardings=whole)
