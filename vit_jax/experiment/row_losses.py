"""The loss of each row of a batch, and the rows where it is largest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.tree import Batch, PyTree
from vit_jax.data.device_ops import DeviceTransform
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_inputs
from vit_jax.objectives.contract import Objective

_SHOWN = 64


def make_row_losses(
    objective: Objective, transform: DeviceTransform, seed: int
) -> Callable[..., dict[str, Any]]:
    """Make row_losses(state, batch, frozen=None) for the step that starts from `state`; pure.

    Returns {"loss": (B,), "id": (B,), "mask": (B,), "rows": (n,), "images": (n, h, w, channels)}:
    the images, uint8, of the n <= 64 rows with the largest loss, as the host prepared them; of
    several views the first. The losses are NaN for objectives that couple rows. The arguments are
    those of `make_train_step`.
    """
    inputs_of = make_inputs(transform, seed)

    def row_losses(state: TrainState, batch: Batch, frozen: PyTree = None) -> dict[str, Any]:
        inputs, key = inputs_of(state, batch)

        def loss_of(row):
            row = jax.tree.map(lambda x: x[None], row)
            return objective.loss(state.params, state, row, frozen, key).loss

        none = jnp.full_like(batch["mask"], jnp.nan)
        losses = none if objective.couples_rows else jax.vmap(loss_of)(inputs)
        # top_k takes NaN for the largest.
        _, rows = jax.lax.top_k(losses, min(_SHOWN, len(losses)))
        views = next(batch[k] for k in ("image", "global_views", "local_views") if k in batch)
        images = views[rows] if views.ndim == 4 else views[rows, 0]
        kept = {name: batch[name] for name in ("id", "mask")}
        return kept | {"loss": losses, "rows": rows, "images": images}

    return row_losses
