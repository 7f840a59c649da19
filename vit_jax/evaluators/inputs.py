"""The inputs of evaluators: the data, and a model's outputs on them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.pictures import Images, Pictures, cut_out
from vit_jax.base.tree import Batch, PyTree
from vit_jax.config.plugins import warn_of_removal
from vit_jax.config.settings import Settings
from vit_jax.data import Source, eval_batches, order, to_value_range
from vit_jax.data.ops import HostOp
from vit_jax.data.preprocessing import eval_batch
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.mesh import BATCH_AXES, batch_sharding
from vit_jax.experiment.state import TrainState
from vit_jax.models.watched import as_map
from vit_jax.models.zero_shot import TextSide

# What `Evaluator.bind` gives: state -> {metric: value}.
Measure = Callable[[TrainState], dict[str, float]]

_RESULTS_BEHIND = 2  # each may hold its batch on the devices


@dataclasses.dataclass(frozen=True)
class EvalInputs:
    """The data of one entry of `evals`, and the model.

    name: of the entry.
    settings: of the run.
    sources: {key of the entry: source} for the splits that it names.
    host_ops: ops applied to its images.
    image_size: (height, width) after the ops.
    folder: the workdir of a run that trains, for files; None: nothing is written.
    see: gets the predictions for all images of a pass; None: they are not needed.
    read_text_side: reads the text side of the model; None: it has none.
    """

    name: str
    settings: Settings
    model: nn.Module
    mesh: Mesh
    sources: Mapping[str, Source]
    host_ops: Sequence[HostOp]
    image_size: tuple[int, int]
    folder: epath.Path | None = None
    see: Callable[[Any], Any] | None = None
    read_text_side: Callable[[], TextSide] | None = None

    @property
    def config(self) -> Any:
        """The config of the run, for plug-ins of earlier versions."""
        warn_of_removal("inputs.config", "inputs.settings")
        return self.settings.to_config()

    @property
    def batch_size(self) -> int:
        """Images of a batch, over all devices."""
        return self.settings.evals[self.name].batch_size or self.settings.run.global_batch_size

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """The sharding that puts a whole array on every process."""
        return NamedSharding(self.mesh, P())

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, jitted as the step is; whole results on every process."""
        options = compiler_options(self.mesh, deterministic=self.settings.mesh.deterministic)
        return jax.jit(function, out_shardings=self.replicated, compiler_options=options)

    def apply(self, state: TrainState, images: Images, method: str = "__call__") -> jax.Array:
        """Output of a method of the model for uint8 images (B, H, W, 3), pictures too; jit it."""
        variables = {"params": state.params, **state.model_state}
        values = to_value_range(images, self.settings.data.mean, self.settings.data.std)
        output = self.model.apply(variables, values, train=False, method=method)
        assert isinstance(output, jax.Array)
        return output

    def maps(self, state: TrainState, images: Images) -> Images:
        """The features of patches as float32 maps (B, rows, columns, D); jit it.

        Pictures in their own shape give `Pictures`: each patch is one "pixel" of D channels, so
        `cut_out` gives the maps.
        """
        x_BND = self.apply(state, images, "tokens").astype(np.float32)
        if isinstance(images, Pictures):
            return Pictures(x_BND[:, self.model.num_prefix_tokens :, None, None], images.grid)
        return as_map(self.model, x_BND, self.image_size)

    def source(self, split_key: str = "split") -> Source:
        """The source of the split that the entry names under `split_key`."""
        return self.sources[split_key]

    def batches(
        self,
        split_key: str = "split",
        record_ids: np.ndarray | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Batch]:
        """Global batches of one pass over a split, or over some of its records.

        Every process makes as many. `batch["mask"]` (B,) is 0 for rows that do not count.

        Raises:
          InputError: at an image smaller than a crop; names `ops`.
        """
        return eval_batches(
            self.source(split_key),
            eval_batch(self.settings.data, batch_size or self.batch_size, self.host_ops, "ops"),
            sharding=batch_sharding(self.mesh),
            record_ids=record_ids,
            refuse_small=True,
        )

    def some(self, split_key: str, record_ids: np.ndarray) -> Iterator[Batch]:
        """`batches` of a few records, which are no larger than these need."""
        ways = math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)
        batch_size = min(self.batch_size, ways * math.ceil(len(record_ids) / ways))
        return self.batches(split_key, record_ids, batch_size)

    def spread(self, number: int) -> Iterator[Batch]:
        """`batches` of `number` images of the split, evenly spaced; of all if it has fewer."""
        return self.some("split", order.spread(number, self.source().num_examples))

    def images(self, split_key: str, record_ids: np.ndarray) -> dict[int, np.ndarray]:
        """{record id: uint8 (H, W, C)} on every process; of images that can be read."""

        @self.jit
        def gather(batch: Batch) -> tuple[jax.Array, Images, jax.Array]:
            return batch["id"], batch["image"], batch["mask"]

        parts = fetch(map(gather, self.some(split_key, record_ids)))
        rows = (zip(ids, cut_out(images), mask, strict=True) for ids, images, mask in parts)
        return {int(at): image for part in rows for at, image, mask in part if mask > 0}


def fetch(results: Iterable[PyTree]) -> Iterator[PyTree]:
    """Yield each of `results`, pytrees of arrays from a jitted function, on the host.

    The devices compute the next ones meanwhile.
    """
    pending: collections.deque = collections.deque()
    for result in results:
        pending.append(result)
        if len(pending) > _RESULTS_BEHIND:
            yield jax.device_get(pending.popleft())
    yield from jax.device_get(list(pending))
