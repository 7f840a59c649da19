"""Images of patch features: their first three principal components as colours.

Axes: B images of a batch, H height, W width, C channels, R rows and S columns of the patches, D
features.
"""

from collections.abc import Sequence

import jax
import numpy as np

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, cut_out
from vit_jax.base.tree import Batch
from vit_jax.config import POSITIVE, SplitEvaluator, key
from vit_jax.config.evals import Better
from vit_jax.evaluators.features import need_images, principal_components
from vit_jax.evaluators.image_table import TableWriter
from vit_jax.evaluators.inputs import EvalInputs, Measure, fetch
from vit_jax.experiment.state import TrainState

FOLDER = "patch_features"  # in the workdir
_COLOURS = 3


def as_colours(maps: Sequence[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """The first three principal components of all patches as red, green and blue.

    Args:
      maps: the features of each image, (R, S, D); R and S may differ.

    Returns:
      uint8 (R, S, 3) of each, a component from its smallest value, 0, to its largest, 255; mid-grey
      where the features have fewer components. And the share of the variance in the three.
    """
    rows = np.concatenate([x_RSD.reshape(-1, x_RSD.shape[-1]) for x_RSD in maps]).astype(np.float64)
    components, shares = principal_components(rows, _COLOURS)
    values = (rows - rows.mean(axis=0)) @ components.T
    colours = np.full((len(rows), _COLOURS), 127.5)
    for i, component in enumerate(values.T):
        colours[:, i] = 255 * (component - component.min()) / max(np.ptp(component), 1e-30)
    ends = np.cumsum([x_RSD.shape[0] * x_RSD.shape[1] for x_RSD in maps])
    of_each = np.split(colours.round().astype(np.uint8), ends[:-1])
    return [
        c.reshape(*x_RSD.shape[:2], _COLOURS) for c, x_RSD in zip(of_each, maps, strict=True)
    ], float(shares.sum())


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

        @inputs.jit
        def compute(state: TrainState, batch: Batch) -> tuple[Images, Images, jax.Array]:
            found = (batch["image"], inputs.maps(state, batch["image"]), batch["mask"])
            return jax.tree.map(lambda rows: rows[:number], found)

        def measure(state: TrainState) -> dict[str, float]:
            found = fetch(compute(state, batch) for batch in inputs.spread(number))
            pairs = [
                pair
                for images, maps, mask in found
                for *pair, weight in zip(cut_out(images), cut_out(maps), mask, strict=True)
                if weight > 0
            ]
            need_images(len(pairs), "split")
            draws = table.begin(int(state.step))
            images, maps = zip(*pairs, strict=True)
            if not all(np.isfinite(x_RSD).all() for x_RSD in maps):
                return {"share": float("nan")}
            colours, share = as_colours(maps)
            if draws and jax.process_index() == 0:
                table.write(map(_beside, images, colours))
            return {"share": share}

        return measure


def _beside(image_HWC: np.ndarray, colours_RSC: np.ndarray) -> np.ndarray:
    """uint8 (2, H, W, 3): an image and its colours.

    Of more than three channels the first three are shown, of fewer the first, as grey.
    """
    height, width, channels = image_HWC.shape
    image = image_HWC[..., :3] if channels >= 3 else image_HWC[..., :1].repeat(3, axis=-1)
    rows = np.arange(height) * colours_RSC.shape[0] // height
    columns = np.arange(width) * colours_RSC.shape[1] // width
    return np.stack([image, colours_RSC[rows][:, columns]])
