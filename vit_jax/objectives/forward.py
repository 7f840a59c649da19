"""A model's forward pass in training, with its batch statistics."""

from typing import Any

import flax.linen as nn
import jax

from vit_jax.base.tree import Batch, ModelState, Params
from vit_jax.models.contract import about


def apply_in_training(
    model: nn.Module,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    rng: jax.Array,
    **kwargs: Any,
) -> tuple[Any, ModelState]:
    """(output for `batch["image"]` (B, H, W, 3) or `Pictures`, new model state).

    A model whose class has the attribute `has_batch_statistics = True` also gets
    `mask=batch["mask"]` (B,), 0 for rows that its statistics must ignore, and may change its model
    state. Other models get neither, and their state is returned as it is.

    Args:
      rng: key of the random stream `dropout`.
      **kwargs: for `model.apply`, e.g. `method`.
    """
    variables = {"params": params, **model_state}
    kwargs |= {"train": True, "rngs": {"dropout": rng}}
    if not about(model).has_batch_statistics:
        return model.apply(variables, batch["image"], **kwargs), model_state
    # `row_losses` takes the gradient of the mask as a row's weight in the loss, not in statistics.
    mask = jax.lax.stop_gradient(batch["mask"])
    kwargs |= {"mask": mask, "mutable": [*model_state]}
    output, changed = model.apply(variables, batch["image"], **kwargs)
    return output, {**model_state, **changed}
