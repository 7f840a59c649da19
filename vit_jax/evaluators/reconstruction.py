"""Reconstruction: the loss of an objective that hides patches, and pictures of what it predicts.

Axes: B images of a batch, K pictures, H height, W width, C channels.
"""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config import OBJECTIVES
from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.data.device_ops import per_channel, to_value_range
from vit_jax.errors import InputError
from vit_jax.evaluators.features import need_images
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.evaluators.metric_names import Better
from vit_jax.evaluators.picture_table import check_num_pictures, write_picture
from vit_jax.experiment.state import TrainState
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.losses import make_loss
from vit_jax.objectives.patches import Reconstruction, as_pixels
from vit_jax.tree import Batch, Params

FOLDER = "reconstructions"  # in the workdir

_METRICS: dict[str, Better] = {"loss": "lower", "num_examples": "neither"}


class ReconstructionLoss:
    """loss and num_examples over a split; the first `num_pictures` images are also drawn.

    What is hidden depends on an image's record id only, so that the losses of different steps
    compare. The picture `file_of(step)` has a row for each image: what the model sees, the
    reconstruction, the image. It is written once a step, with the weights evaluated first.

    Args:
      reconstruct: (params, uint8 images (B, H, W, C), record ids (B,)) -> a `Reconstruction` whose
        images are uint8.
      make_batches: one pass over the split.
      replicated: the sharding that puts a whole array on every process.
      file_of: the file of the picture of a step; None: no pictures.
      num_pictures: K.
    """

    metrics: Mapping[str, Better] = _METRICS

    def __init__(
        self,
        reconstruct: Callable[[Params, jax.Array, jax.Array], Reconstruction],
        make_batches: Callable[[], Iterable[Batch]],
        replicated: jax.sharding.Sharding,
        file_of: Callable[[int], epath.Path] | None,
        num_pictures: int,
    ):
        self._make_batches, self._file_of = make_batches, file_of
        self._num_pictures, self._drawn = num_pictures, -1

        def measure(params, batch):
            found = reconstruct(params, batch["image"], batch["id"])
            return (found.loss_B * batch["mask"]).sum(), batch["mask"].sum()

        def draw(params, batch):
            found = reconstruct(params, batch["image"], batch["id"])
            images = (found.hidden, found.restored, batch["image"])
            return jnp.stack(images, axis=1)[:num_pictures]

        self._measure = jax.jit(measure)
        self._draw = jax.jit(draw, out_shardings=replicated)

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the metrics of `state`, and write its pictures.

        Raises:
          InputError: on every process, if no image of the split can be read; names `split`.
        """
        sums = np.zeros(2)
        step = int(state.step)
        draws = self._file_of is not None and self._num_pictures > 0 and step != self._drawn

        def results():
            for i, batch in enumerate(self._make_batches()):
                if draws and i == 0:
                    self._write(step, jax.device_get(self._draw(state.params, batch)))
                yield self._measure(state.params, batch)

        for found in fetch(results()):
            sums += np.asarray(found, np.float64)
        need_images(int(sums[1]), "split")
        self._drawn = step
        return {"loss": float(sums[0] / sums[1]), "num_examples": int(sums[1])}

    def _write(self, step: int, images_K3HWC: np.ndarray) -> None:
        if jax.process_index() == 0:
            assert self._file_of is not None
            write_picture(self._file_of(step), images_K3HWC)


def reconstruction(
    *,
    split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
    num_pictures: int = 8,
) -> ConfigDict:
    """Make an entry of `evals`: the loss of an objective that hides patches, and pictures.

    During training the first `num_pictures` images of the split are written as
    WORKDIR/reconstructions/NAME_STEP.png: what the model sees, its reconstruction, the image. The
    objective is that of the run. All other arguments are as in `classification`.
    """
    return typed_entry("reconstruction", locals())


def make_reconstruction(inputs: EvalInputs) -> ReconstructionLoss:
    """Make the evaluator for an entry from `reconstruction`.

    Raises:
      InputError: the objective of the run hides no patches.
    """
    channels = inputs.model.channels if hasattr(inputs.model, "channels") else 3
    mean, std = (per_channel(values, channels) for values in (inputs.mean, inputs.std))
    own = inputs.objective or ConfigDict({"name": "supervised"})
    reconstruct = None
    if own.get("teacher") is None:
        loss = make_loss(**inputs.loss)
        objective = OBJECTIVES.make(own).bind(inputs.model, loss, RunFacts(mean, std))
        reconstruct = objective.reconstruct
    if reconstruct is None:
        raise InputError(
            f"type='reconstruction': objective.name={own.name!r} hides no patches; leave the "
            "evaluator out, or train with objective.name=mae or masked_patches"
        )

    def of_pixels(params, images, id_B):
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), id_B)
        found = reconstruct(params, to_value_range(images, mean, std), keys_B)
        hidden, restored = (
            as_pixels(values, mean, std).astype(jnp.uint8)
            for values in (found.hidden, found.restored)
        )
        return Reconstruction(found.loss_B, hidden, restored)

    folder, name = inputs.folder, inputs.name
    return ReconstructionLoss(
        of_pixels,
        inputs.batches,
        NamedSharding(inputs.mesh, P()),
        None if folder is None else lambda step: folder / FOLDER / f"{name}_{step:08d}.png",
        inputs.entry.num_pictures,
    )


EVALUATOR = Evaluator(
    reconstruction,
    make_reconstruction,
    check=lambda entry: check_num_pictures(entry.num_pictures),
    output="features",
    metrics=lambda entry: _METRICS,
)
