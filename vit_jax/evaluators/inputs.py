"""What evaluators are made from: the data, and a model's outputs on them."""

import dataclasses
from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.config import SplitKey, eval_splits, image_hw
from vit_jax.data import Source, eval_batches, parse_ops, to_value_range
from vit_jax.devices.mesh import batch_sharding


@dataclasses.dataclass(frozen=True)
class EvalInputs:
    """The data of one entry of `config.evals`, and the model.

    config: resolved.
    entry: of `config.evals`.
    sources: by what `config.eval_splits` gives.
    """

    config: ConfigDict
    entry: ConfigDict
    model: nn.Module
    mesh: Mesh
    sources: Mapping[SplitKey, Source]

    def apply(self, state, images: jax.Array, method: str = "__call__") -> jax.Array:
        """What a method of the model gives for uint8 images (B, H, W, 3), to be jitted."""
        variables = {"params": state.params, **state.model_state}
        values = to_value_range(images, self.config.data.mean, self.config.data.std)
        return self.model.apply(variables, values, train=False, method=method)

    def source(self, split_key: str = "split") -> Source:
        """The source of the split that the entry's key `split_key` names."""
        return self.sources[eval_splits(self.config, self.entry)[split_key]]

    def batches(
        self, split_key: str = "split", record_ids: np.ndarray | None = None
    ) -> Iterator[dict[str, jax.Array]]:
        """Global batches of one pass over that split, or over some of its records."""
        image_size = image_hw(self.config.data.image_size)
        host_ops, _ = parse_ops(self.entry.ops, image_size, pad_crops=self.config.data.pad_crops)
        return eval_batches(
            self.source(split_key),
            host_ops,
            global_batch_size=self.entry.batch_size or self.config.global_batch_size,
            image_size=image_size,
            sharding=batch_sharding(self.mesh),
            record_ids=record_ids,
        )
