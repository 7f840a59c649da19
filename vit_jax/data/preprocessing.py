"""The image size and the preprocessing ops of a config, parsed once."""

import copy
import logging
from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.ops import Op, at_full_size, do_the_same, parse_ops
from vit_jax.data.views import Views, parse_views
from vit_jax.errors import InputError

logger = logging.getLogger("vit_jax")


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
    image_size, pad_crops = image_hw(config.data.image_size), config.data.pad_crops
    host_ops, device_ops = parse_ops(config.data.ops, image_size, pad_crops=pad_crops)
    eval_ops = {
        name: parse_ops(entry.ops, image_size, key=f"evals.{name}.ops", pad_crops=pad_crops)[0]
        for name, entry in config.evals.items()
    }
    return Preprocessing(image_size, host_ops, device_ops, eval_ops, parse_views(config))


def keep_ops(config: ConfigDict, stored: ConfigDict) -> ConfigDict:
    """`config` with the ops of `stored`, a run's config, wherever a recipe only improves on them.

    That is where both do the same and are spelled differently, or where the run decodes JPEGs at
    their full size and the recipe scales them now. Older runs can thus still be resumed and
    compared.
    """
    if config.data.image_size is None or stored.data.image_size is None:
        return config
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    nodes = [(config.data, stored.data)]
    nodes += [(entry, stored.evals[n]) for n, entry in config.evals.items() if n in stored.evals]
    full_size = []
    for ours, its in nodes:
        if ours.ops == its.ops:
            continue
        if _do_the_same(config, ours.ops, stored, its.ops):
            ours.ops = its.ops
        elif _do_the_same(config, ours.ops, stored, its.ops, full_size=True):
            full_size.append(its.ops)
            ours.ops = its.ops
    if full_size:
        logger.warning(
            "this run goes on to decode JPEGs at their full size, as it began: %s",
            "; ".join(dict.fromkeys(full_size)),
        )
    return config


def _do_the_same(
    config: ConfigDict, ops: str, stored: ConfigDict, its_ops: str, *, full_size: bool = False
) -> bool:
    """Whether `ops` under `config` and `its_ops` under `stored` give the same images.

    `full_size`: whether `ops` does at the full size of JPEGs.
    """
    try:
        (host, device), (its_host, its_device) = (
            parse_ops(string, image_hw(c.data.image_size), pad_crops=c.data.pad_crops)
            for c, string in ((config, ops), (stored, its_ops))
        )
    except InputError:  # an op that this version does not have
        return False
    if full_size:
        host = at_full_size(host)
    return do_the_same(host + device, its_host + its_device)
