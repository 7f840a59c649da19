"""The image size and the preprocessing ops of a config, parsed once."""

from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.ops import Op, parse_ops
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
    def has_image(self) -> bool:
        """Whether a training batch has `image`, made by `data.ops`."""
        return bool(self.host_ops or self.device_ops or not self.views)


def parse_preprocessing(config: ConfigDict) -> Preprocessing:
    """Parse the preprocessing of a config that has passed its first check."""
    image_size = image_hw(config.data.image_size)
    host_ops, device_ops = parse_ops(config.data.ops, image_size)
    eval_ops = {
        name: parse_ops(entry.ops, image_size, key=f"evals.{name}.ops")[0]
        for name, entry in config.evals.items()
    }
    return Preprocessing(image_size, host_ops, device_ops, eval_ops, parse_views(config))
