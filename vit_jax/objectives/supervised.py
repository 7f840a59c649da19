"""Classification of labelled images."""

from typing import Any, cast

import flax.linen as nn
import jax

from vit_jax.base.tree import Batch, Params, PyTree
from vit_jax.objectives.contract import (
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    sums_of_rows,
)
from vit_jax.objectives.forward import apply_in_training


class Supervised(ObjectivePart):
    """Classifies `batch["image"]` (B, H, W, channels) as `batch["label"]`.

    `log.metrics` names its metrics.
    """

    learns_labels = True
    splits_unasked = True
    takes_pictures = True
    takes_patch_sizes = True

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        def loss_of_batch(
            params: Params, state: State, batch: Batch, frozen: PyTree, rng: jax.Array
        ) -> ObjectiveOutput:
            logits, model_state = apply_in_training(model, params, state.model_state, batch, rng)
            heads = jax.tree.leaves(logits)  # every head learns the label
            losses: Any = sum(loss(logits_BC, batch["label"]) for logits_BC in heads)
            logits_BC, mask_B = cast(jax.Array, sum(heads) / len(heads)), batch["mask"]
            sums = sums_of_rows(losses / len(heads), mask_B, **facts.metrics(logits_BC, batch))
            return ObjectiveOutput(**sums, model_state=model_state)

        return Objective(loss_of_batch, is_single_pass=True)
