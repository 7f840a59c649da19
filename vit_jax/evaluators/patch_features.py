"""Pictures of patch features: their first three principal components as colours.

Axes: B images of a batch, K pictures, H height, W width, C channels, R rows and S columns of the
patches, D features.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax.config.evals import Evaluator, typed_entry
from vit_jax.devices.mesh import BATCH_AXES
from vit_jax.errors import InputError
from vit_jax.evaluators.features import need_images, principal_components
from vit_jax.evaluators.fetching import fetch
from vit_jax.evaluators.inputs import EvalInputs, OutputFn
from vit_jax.evaluators.metric_names import Better
from vit_jax.evaluators.picture_table import check_num_pictures, write_picture
from vit_jax.experiment.state import TrainState
from vit_jax.models.watched import as_map
from vit_jax.tree import Batch

FOLDER = "patch_features"  # in the workdir
_COLOURS = 3

_METRICS: dict[str, Better] = {"share": "neither"}


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


class PatchFeatures:
    """Draws the features of the patches of some images beside the images.

    `share` is the share of their variance in the three components that are drawn. The picture
    `file_of(step)` has a row for each image. It is written once a step, with the weights evaluated
    first.

    Args:
      features_fn: (state, uint8 images (B, H, W, C)) -> (B, R, S, D), the features of the patches.
      batches: one pass over the images.
      gathered: the sharding that puts a whole array on every process.
      num_pictures: the rows of a batch that may hold an image; the others are not gathered.
      file_of: the file of the picture of a step; None: no picture.
    """

    metrics: Mapping[str, Better] = _METRICS

    def __init__(
        self,
        features_fn: OutputFn,
        batches: Callable[[], Iterable[Batch]],
        gathered: jax.sharding.Sharding,
        num_pictures: int,
        file_of: Callable[[int], epath.Path] | None,
    ):
        def compute(state, batch):
            x_BRSD = features_fn(state, batch["image"]).astype(jnp.float32)
            found = (batch["image"], x_BRSD, batch["mask"])
            return jax.tree.map(lambda rows: rows[:num_pictures], found)

        self._batches, self._file_of, self._drawn = batches, file_of, -1
        self._compute = jax.jit(compute, out_shardings=gathered)

    def run(self, state: TrainState) -> dict[str, float]:
        """Compute the share with `state`, and draw.

        Raises:
          InputError: on every process, if no image can be read; names the key `split`.
        """
        found = list(fetch(self._compute(state, batch) for batch in self._batches()))
        images, features = (
            np.concatenate([part[i][part[2] > 0] for part in found]) for i in range(2)
        )
        need_images(len(images), "split")
        first, self._drawn = int(state.step) != self._drawn, int(state.step)
        if not np.isfinite(features).all():
            return {"share": float("nan")}
        colours, share = as_colours(features)
        if self._file_of is not None and first and jax.process_index() == 0:
            write_picture(self._file_of(self._drawn), _beside(images, colours))
        return {"share": share}


def _beside(images_KHWC: np.ndarray, colours_KRSC: np.ndarray) -> np.ndarray:
    """uint8 (K, 2, H, W, 3): each image and its colours.

    Of more than three channels the first three are shown, of fewer the first, as grey.
    """
    height, width, channels = images_KHWC.shape[1:]
    images = images_KHWC[..., :3] if channels >= 3 else images_KHWC[..., :1].repeat(3, axis=-1)
    rows = np.arange(height) * colours_KRSC.shape[1] // height
    columns = np.arange(width) * colours_KRSC.shape[2] // width
    return np.stack([images, colours_KRSC[:, rows][:, :, columns]], axis=1)


def patch_features(
    *,
    split: str,
    every: str,
    ops: str = "",
    batch_size: int | None = None,
    data_name: str | None = None,
    data_dir: str | None = None,
    num_pictures: int = 8,
) -> ConfigDict:
    """Make an entry of `evals`: pictures of the patch features, as in the papers on DINO.

    During training the first `num_pictures` images of the split are written as
    WORKDIR/patch_features/NAME_STEP.png, each beside the first three principal components of the
    encoder's output for its patches, as colours. The components are those of all these patches,
    so the same colour means the same feature in each row. It reads no labels. All other arguments
    are as in `classification`.
    """
    return typed_entry("patch_features", locals())


def make_patch_features(inputs: EvalInputs) -> PatchFeatures:
    """Make the evaluator for an entry from `patch_features`.

    Raises:
      InputError: the model has no patches.
    """
    if not hasattr(inputs.model, "tokens"):
        raise InputError(
            f"type='patch_features': a {type(inputs.model).__name__} has no features of patches; "
            "leave the evaluator out"
        )

    def of_patches(state, images):
        x_BND = inputs.apply(state, images, method="tokens")
        return as_map(inputs.model, x_BND, inputs.image_size)

    number = min(inputs.entry.num_pictures, inputs.source().num_examples)
    ways = math.prod(inputs.mesh.shape[axis] for axis in BATCH_AXES)
    rows = min(inputs.batch_size, ways * math.ceil(number / ways))
    small = dataclasses.replace(inputs, batch_size=rows)
    folder, name = inputs.folder, inputs.name
    return PatchFeatures(
        of_patches,
        lambda: small.batches(record_ids=np.arange(number)),
        NamedSharding(inputs.mesh, P()),
        number,
        None if folder is None else lambda step: folder / FOLDER / f"{name}_{step:08d}.png",
    )


EVALUATOR = Evaluator(
    patch_features,
    make_patch_features,
    check=lambda entry: check_num_pictures(entry.num_pictures, least=1),
    learns_classes=True,
    output="features",
    multi_label=None,
    metrics=lambda entry: _METRICS,
)
