"""The inputs of evaluators: the data, and a model's outputs on them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import flax.linen as nn
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data import Source, eval_batches, image_batch, to_value_range
from vit_jax.data.ops import HostOp
from vit_jax.devices.mesh import batch_sharding
from vit_jax.experiment.state import TrainState
from vit_jax.tree import Batch

# (state, uint8 images (B, H, W, 3)) -> logits (B, C) or features (B, D).
OutputFn = Callable[[TrainState, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class EvalInputs:
    """The data of one entry of `config.evals`, and the model.

    entry: from `config.evals`.
    sources: {key of the entry: source} for the splits that it names.
    host_ops: ops applied to its images.
    image_size: (height, width) after the ops.
    batch_size: images, over all devices.
    mean, std: the model's input is (image / 255 - mean) / std.
    loss: the section `loss` of the config.
    objective: its section `objective`; None: there is none.
    name: of the entry.
    folder: the workdir of a run that trains, for files; None: nothing is written.
    """

    entry: ConfigDict
    model: nn.Module
    mesh: Mesh
    sources: Mapping[str, Source]
    host_ops: Sequence[HostOp]
    image_size: tuple[int, int]
    batch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    loss: ConfigDict
    objective: ConfigDict | None = None
    name: str = ""
    folder: epath.Path | None = None

    def apply(self, state: TrainState, images: jax.Array, method: str = "__call__") -> jax.Array:
        """Output of a method of the model for uint8 images (B, H, W, 3); to be jitted."""
        variables = {"params": state.params, **state.model_state}
        values = to_value_range(images, self.mean, self.std)
        output = self.model.apply(variables, values, train=False, method=method)
        assert isinstance(output, jax.Array)
        return output

    def source(self, split_key: str = "split") -> Source:
        """The source of the split that the entry names under `split_key`."""
        return self.sources[split_key]

    def batches(
        self, split_key: str = "split", record_ids: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Global batches of one pass over a split, or over some of its records.

        Raises:
          InputError: at an image smaller than a crop; names `ops`.
        """
        return eval_batches(
            self.source(split_key),
            image_batch(self.batch_size, self.image_size, self.host_ops, "ops"),
            sharding=batch_sharding(self.mesh),
            record_ids=record_ids,
            refuse_small=True,
        )
