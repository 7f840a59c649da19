"""LoRA adapters, which files of other formats do not have: they are merged into the kernels."""

import re
from collections.abc import Mapping

import flax.linen as nn
import numpy as np

from vit_jax.models.fields import with_known
from vit_jax.models.layers import adapter_update

ADAPTER = re.compile(r"(?P<layer>.*)/lora_[ab]")


def merge_adapters(
    model: nn.Module, params: Mapping[str, np.ndarray]
) -> tuple[nn.Module, dict[str, np.ndarray]]:
    """`model` without its LoRA adapters, and `params` with each adapter added to its kernel.

    `params`: {leaf name: array} of the unrolled model.
    """
    merged = {name: leaf for name, leaf in params.items() if not ADAPTER.fullmatch(name)}
    for layer in {match["layer"] for match in map(ADAPTER.fullmatch, params) if match}:
        factors = (np.asarray(params[f"{layer}/lora_{factor}"]) for factor in "ab")
        merged[f"{layer}/kernel"] = params[f"{layer}/kernel"] + adapter_update(*factors)
    return with_known(model, lora_rank=None), merged
