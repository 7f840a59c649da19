"""Images of patch features: their first three principal components as colours.

Axes: B images of a batch, K images of the table, H height, W width, C channels, R rows and
S columns of the patches, D features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.base.tree import Batch
from vit_jax.config import POSITIVE, SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.evaluators.features import need_images, principal_components
from vit_jax.evaluators.image_table import TableWriter
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.experiment.state import TrainState
from vit_jax.models.watched import as_map

FOLDER = "patch_features"  # in the workdir
_COLOURS = 3


def as_colours(x_KRSD: np.ndarray) -> tuple[np.ndarray, float]:
    """The first three principal components of all patches as red, green and blue.

    Returns:
      uint8 (K, R, S, 3), each component from its smallest value, 0, to its largest, 255; mid-grey
      where the features have fewer components. And the share of the variance in the three.
    """
    rows = x_KRSD.reshape(-1, x_KRSD.shape[-1]).astype(np.float64)
    components, shares = principal_components(rows, _COLOURS)
    values = (rows - rows.mean(axis=0)) @ components.T
    colours = np.full((len(rows), _COLOURS), 127.5)
    for i, component in enumerate(values.T):
        colours[:, i] = 255 * (component - component.min()) / max(np.ptp(component), 1e-30)
    return colours.round().astype(np.uint8).reshape(*x_KRSD.shape[:3], 3), float(shares.sum())


class PatchFeatures(SplitEvaluator):
    """Images of the patch features, as in the papers on DINO; no labels.

    During training `num_images` images, spread over the split, are written as
    WORKDIR/patch_features/NAME_STEP.png, each beside the first three principal components of the
    encoder's output for its patches, as colours. The components are taken over all these patches,
    so the same colour means the same feature in each row. `share` is their share of the variance.
    """

    num_images: int = key(8, "images to draw, spread over the split", within=POSITIVE)

    learns_classes = True
    output = "features"
    multi_label = None
    takes_pictures = False
    shows_worth = False

    def reports(self) -> dict[str, Better]:
        return {"share": "neither"}

    def bind(self, inputs: EvalInputs) -> Measure:
        if not hasattr(inputs.model, "tokens"):
            raise InputError(
                f"type='patch_features': a {type(inputs.model).__name__} has no features of "
                "patches; leave the evaluator out"
            )
        number = min(self.num_images, inputs.source().num_examples)
        table = TableWriter(inputs, FOLDER)

        @functools.partial(jax.jit, out_shardings=inputs.replicated)
        def compute(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
            x_BND = inputs.apply(state, batch["image"], "tokens")
            x_BRSD = as_map(inputs.model, x_BND, inputs.image_size).astype(jnp.float32)
            found = (batch["image"], x_BRSD, batch["mask"])
            return jax.tree.map(lambda rows: rows[:number], found)

        def measure(state: TrainState) -> dict[str, float]:
            found = list(fetch(compute(state, batch) for batch in inputs.spread(number)))
            images, features = (
                np.concatenate([part[i][part[2] > 0] for part in found]) for i in range(2)
            )
            need_images(len(images), "split")
            draws = table.begin(int(state.step))
            if not np.isfinite(features).all():
                return {"share": float("nan")}
            colours, share = as_colours(features)
            if draws and jax.process_index() == 0:
                table.write(_beside(images, colours))
            return {"share": share}

        return measure


def _beside(images_KHWC: np.ndarray, colours_KRSC: np.ndarray) -> np.ndarray:
    """uint8 (K, 2, H, W, 3): each image and its colours.

    Of more than three channels the first three are shown, of fewer the first, as grey.
    """
    height, width, channels = images_KHWC.shape[1:]
    images = images_KHWC[..., :3] if channels >= 3 else images_KHWC[..., :1].repeat(3, axis=-1)
    rows = np.arange(height) * colours_KRSC.shape[1] // height
    columns = np.arange(width) * colours_KRSC.shape[2] // width
    return np.stack([images, colours_KRSC[:, rows][:, :, columns]], axis=1)
