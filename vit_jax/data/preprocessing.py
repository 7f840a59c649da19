"""The image size and the preprocessing ops of a config, parsed once."""

from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.batch import BatchSpec
from vit_jax.data.crops import Crops
from vit_jax.data.device_ops import MIXING_OPS, DeviceTransform, make_device_transform
from vit_jax.data.ops import Op, parse_ops
from vit_jax.data.order import check_order, pair_distance, resolve_order
from vit_jax.data.views import Views, parse_views


class Preprocessing(NamedTuple):
    """The parsed preprocessing of a run.

    image_size: (height, width) of the model's input images.
    host_ops, device_ops: ops for training.
    eval_ops: {name: host ops} for each entry of `evals`.
    views: {key of a batch: its views}; see views.py.
    """

    image_size: tuple[int, int]
    host_ops: tuple[Op, ...]
    device_ops: tuple[Op, ...]
    eval_ops: Mapping[str, tuple[Op, ...]]
    views: Mapping[str, Views] = {}

    @property
    def mixes(self) -> bool:
        """Whether a device op mixes pairs of images."""
        return any(op.name in MIXING_OPS for op in self.device_ops)


def parse_preprocessing(config: ConfigDict) -> Preprocessing:
    """Parse the preprocessing of a config that has passed its first check."""
    image_size = image_hw(config.data.image_size)
    host_ops, device_ops = parse_ops(config.data.ops, image_size)
    eval_ops = {
        name: parse_ops(entry.ops, image_size, key=f"evals.{name}.ops")[0]
        for name, entry in config.evals.items()
    }
    return Preprocessing(image_size, host_ops, device_ops, eval_ops, parse_views(config))


def describe_batch(config: ConfigDict, preprocessing: Preprocessing) -> BatchSpec:
    """The training batches of a resolved config: `image`, made by `data.ops`, views, or both."""
    d, (image_size, host_ops, device_ops, _, views) = config.data, preprocessing
    crops = {name: kind.crops for name, kind in views.items()}
    if host_ops or device_ops or not views:
        crops["image"] = Crops("data.ops", image_size, (host_ops,))
    label_size = d.num_classes if d.multi_label or d.soft_labels else None
    return BatchSpec(config.global_batch_size, crops, d.channels, label_size)


def make_transform(config: ConfigDict, preprocessing: Preprocessing) -> DeviceTransform:
    """The device part of the preprocessing of a resolved config.

    Raises:
      InputError: an op mixes images, and the order of the data has no pairs for it.
    """
    d, ops = config.data, preprocessing.device_ops
    rows = {"global_batch_size": config.global_batch_size, "repeats": d.repeats}
    order, streams = resolve_order(d.order, d.streams, num_examples=d.num_examples, **rows)
    mixes = preprocessing.mixes
    check_order(order, chunk_size=d.chunk_size, streams=streams, **rows, mixes=mixes)
    return make_device_transform(
        ops,
        d.mean,
        d.std,
        num_classes=d.num_classes,
        distance=pair_distance(order, streams, **rows),
        views=preprocessing.views,
    )
