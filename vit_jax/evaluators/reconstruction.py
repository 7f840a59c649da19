"""Reconstruction: the loss of an objective that hides patches, and tables of what it predicts.

Axes: B images of a batch, K images of the table, H height, W width, C channels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures, cut_out
from vit_jax.base.tree import Batch, Params
from vit_jax.config import FROM_0, SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.data.device_ops import per_channel, to_value_range
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.image_table import TableWriter
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.experiment.state import TrainState
from vit_jax.models.contract import about
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.patches import Reconstruction, as_pixels

FOLDER = "reconstructions"  # in the workdir

# (params, uint8 images (B, H, W, C) or `Pictures`, record ids (B,)) -> the loss, and uint8 images.
Reconstruct = Callable[[Params, Images, jax.Array], Reconstruction]


class ReconstructionLoss(SplitEvaluator):
    """The loss of an objective that hides patches, and tables of images that it restores.

    What is hidden depends on an image's record id only, so that the losses of different steps
    compare. During training `num_images` images, spread over the split, are written as
    WORKDIR/reconstructions/NAME_STEP.png, a row for each: what the model sees, its reconstruction,
    the image. Pictures keep their own shape. It uses the objective of the run.
    """

    num_images: int = key(8, "images to draw, spread over the split", within=FROM_0)

    learns_classes = True
    output = "features"
    multi_label = None
    shows_worth = False

    def reports(self) -> dict[str, Better]:
        return {"loss": "lower", "num_examples": "neither"}

    def bind(self, inputs: EvalInputs) -> Measure:
        return self.bind_to(inputs, _reconstruct_of(inputs))

    def bind_to(self, inputs: EvalInputs, reconstruct: Reconstruct) -> Measure:
        """`bind`, with the function that reconstructs images."""
        table = TableWriter(inputs, FOLDER)

        @inputs.jit
        def compute(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            found = reconstruct(params, batch["image"], batch["id"])
            return (found.loss_B * batch["mask"]).sum(), batch["mask"].sum()

        @inputs.jit
        def draw(params: Params, batch: Batch) -> tuple[tuple[Images, ...], jax.Array]:
            found = reconstruct(params, batch["image"], batch["id"])
            return (found.hidden, found.restored, batch["image"]), batch["mask"]

        def measure(state: TrainState) -> dict[str, float]:
            counts = fetch(compute(state.params, batch) for batch in inputs.batches())
            loss, seen = np.asarray(list(counts), np.float64).sum(axis=0)
            need_images(int(seen), "split")
            if table.begin(int(state.step)) and self.num_images > 0:
                drawn = fetch(draw(state.params, batch) for batch in inputs.spread(self.num_images))
                rows = [
                    row
                    for images, mask in drawn
                    for *row, weight in zip(*map(cut_out, images), mask, strict=True)
                    if weight > 0
                ]
                if jax.process_index() == 0 and rows:
                    table.write(rows)
            return {"loss": float(loss / seen), "num_examples": int(seen)}

        return measure


def _reconstruct_of(inputs: EvalInputs) -> Reconstruct:
    """How the objective of the run reconstructs; raises InputError if it hides no patches."""
    channels = about(inputs.model).channels
    data, own = inputs.settings.data, inputs.settings.objective
    mean, std = (per_channel(values, channels) for values in (data.mean, data.std))
    reconstruct = None
    if not own.teachers:
        loss = inputs.settings.loss.bind()
        reconstruct = own.bind(inputs.model, loss, RunFacts(mean, std)).reconstruct
    if reconstruct is None:
        raise InputError(
            f"type='reconstruction': objective.name={own.name!r} hides no patches; leave the "
            "evaluator out, or train with objective.name=mae or masked_patches"
        )

    def pixels_of(images: Images) -> Images:
        if isinstance(images, Pictures):
            return images._replace(patches=pixels_of(images.patches))
        return as_pixels(images, mean, std).astype(jnp.uint8)

    def of_pixels(params: Params, images: Images, id_B: jax.Array) -> Reconstruction:
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), id_B)
        found = reconstruct(params, to_value_range(images, mean, std), keys_B)
        return Reconstruction(found.loss_B, pixels_of(found.hidden), pixels_of(found.restored))

    return of_pixels
