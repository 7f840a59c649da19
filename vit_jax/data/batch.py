"""What a global batch holds, described once for the input, the training step and its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from vit_jax.data.crops import Crops
from vit_jax.data.ops import Op


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What every batch of a pass over the data holds; pipeline.py lists its arrays.

    size: B, the number of rows over all processes.
    crops: {key of a batch: its images}: `image`, views, or both.
    channels: of the images.
    label_size: C if labels are float32 (B, C); None: they are int32 (B,).
    """

    size: int
    crops: Mapping[str, Crops]
    channels: int = 3
    label_size: int | None = None

    def arrays(
        self, sharding: jax.sharding.Sharding | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """{key: the shape and dtype of its array}, with `sharding` if it is given."""

        def array(dtype, *shape):
            return jax.ShapeDtypeStruct((self.size, *shape), dtype, sharding=sharding)

        crops = self.crops.items()
        images = {name: array(jnp.uint8, *crop.shape(self.channels)) for name, crop in crops}
        label = array(jnp.int32)
        if self.label_size is not None:
            label = array(jnp.float32, self.label_size)
        return {**images, "label": label, "mask": array(jnp.float32), "id": array(jnp.int32)}


def image_batch(
    size: int, image_size: tuple[int, int], host_ops: Sequence[Op] = (), key: str = "data.ops"
) -> BatchSpec:
    """A batch with one image (H, W) a row, made by `host_ops`; `key` is the ops' config key."""
    return BatchSpec(size, {"image": Crops(key, image_size, (tuple(host_ops),))})
