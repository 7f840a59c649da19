"""The image size and the preprocessing ops of a config, parsed once."""

import copy
from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import image_hw
from vit_jax.data.ops import Op, do_the_same, parse_ops
from vit_jax.errors import InputError


class Preprocessing(NamedTuple):
    """The parsed preprocessing of a run.

    image_size: (height, width) of the model's input images.
    host_ops, device_ops: ops for training.
    eval_ops: {name: host ops} for each entry of `evals`.
    """

    image_size: tuple[int, int]
    host_ops: tuple[Op, ...]
    device_ops: tuple[Op, ...]
    eval_ops: Mapping[str, tuple[Op, ...]]


def parse_preprocessing(config: ConfigDict) -> Preprocessing:
    """Parse the preprocessing of a config that has passed its first check."""
    image_size, pad_crops = image_hw(config.data.image_size), config.data.pad_crops
    host_ops, device_ops = parse_ops(config.data.ops, image_size, pad_crops=pad_crops)
    eval_ops = {
        name: parse_ops(entry.ops, image_size, key=f"evals.{name}.ops", pad_crops=pad_crops)[0]
        for name, entry in config.evals.items()
    }
    return Preprocessing(image_size, host_ops, device_ops, eval_ops)


def keep_spelling(config: ConfigDict, stored: ConfigDict) -> ConfigDict:
    """`config` with its ops spelled as in `stored`, a run's config, wherever both do the same.

    A recipe may thus change the spelling of its ops, and older runs can still be resumed and
    compared.
    """
    if config.data.image_size is None or stored.data.image_size is None:
        return config
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    nodes = [(config.data, stored.data)]
    nodes += [(entry, stored.evals[n]) for n, entry in config.evals.items() if n in stored.evals]
    for ours, its in nodes:
        if ours.ops != its.ops and _do_the_same(config, ours.ops, stored, its.ops):
            ours.ops = its.ops
    return config


def _do_the_same(config: ConfigDict, ops: str, stored: ConfigDict, its_ops: str) -> bool:
    """Whether `ops` under `config` and `its_ops` under `stored` give the same images."""
    try:
        (host, device), (its_host, its_device) = (
            parse_ops(string, image_hw(c.data.image_size), pad_crops=c.data.pad_crops)
            for c, string in ((config, ops), (stored, its_ops))
        )
    except InputError:  # an op that this version does not have
        return False
    return do_the_same(host + device, its_host + its_device)
