"""What files of other formats do not have is merged into the kernels: LoRA, a norm of the head."""

import re
from collections.abc import Mapping

import flax.linen as nn
import numpy as np

from vit_jax.models.batch_norm import BATCH_STATS
from vit_jax.models.contract import with_known
from vit_jax.models.dense import adapter_update
from vit_jax.models.vit import HEAD_NORM_EPS

_HEAD_NORM = f"{BATCH_STATS}/head_norm/"
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


def merge_head_norm(
    model: nn.Module, params: Mapping[str, np.ndarray], model_state: Mapping[str, np.ndarray]
) -> tuple[nn.Module, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`model`, `params` and `model_state` with the batch norm before the head in the head.

    The norm has no scale and shift of its own, so a linear head with other numbers gives the same
    logits. Leaves are named as in the unrolled model.
    """
    if not getattr(model, "head_batch_norm", False):
        return model, dict(params), dict(model_state)
    state = {name: x for name, x in model_state.items() if not is_of_head_norm(name)}
    merged = dict(params)
    if model.num_classes is not None:
        mean, var = (model_state[f"{_HEAD_NORM}{name}"] for name in ("mean", "var"))
        kernel = params["head/kernel"] / np.sqrt(var + HEAD_NORM_EPS)[:, None]
        merged |= {"head/kernel": kernel, "head/bias": params["head/bias"] - mean @ kernel}
    return model.clone(head_batch_norm=False), merged, state


def is_of_head_norm(name: str) -> bool:
    """Whether the variable `name` belongs to the batch norm before a ViT's head."""
    return name.startswith(_HEAD_NORM)
