"""The image size and the preprocessing ops of a config, parsed once."""

from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.ops import Op, parse_ops


class Preprocessing(NamedTuple):
    """How a run makes its images.

    image_size: (height, width) of every image that a model sees.
    host_ops, device_ops: of training.
    eval_ops: {name: host ops} of each entry of `evals`.
    """

    image_size: tuple[int, int]
    host_ops: tuple[Op, ...]
    device_ops: tuple[Op, ...]
    eval_ops: Mapping[str, tuple[Op, ...]]


def parse_preprocessing(config: ConfigDict) -> Preprocessing:
    """The preprocessing of a config that is valid as far as its first check sees."""
    image_size, pad_crops = image_hw(config.data.image_size), config.data.pad_crops
    host_ops, device_ops = parse_ops(config.data.ops, image_size, pad_crops=pad_crops)
    eval_ops = {
        name: parse_ops(entry.ops, image_size, key=f"evals.{name}.ops", pad_crops=pad_crops)[0]
        for name, entry in config.evals.items()
    }
    return Preprocessing(image_size, host_ops, device_ops, eval_ops)
