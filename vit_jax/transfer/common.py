"""Checks and conversions that several formats share."""

import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from vit_jax import tree
from vit_jax.errors import InputError
from vit_jax.models.contract import CONSTANTS
from vit_jax.transfer.pretrained import Pretrained

logger = logging.getLogger("vit_jax")

POSITIONS = re.compile(rf"(encoder/layer_\d+/|{CONSTANTS}/)?pos_embedding(/(?P<table>\w+))?")


def refuse(faults: Sequence[str], where: str) -> None:
    """Raise one InputError for all `faults`, if there are any; `where` names the source."""
    if faults:
        raise InputError(join_faults(faults, where))


def join_faults(faults: Sequence[str], where: str) -> str:
    """One text for all `faults` (at least one); `where` names the source."""
    if len(faults) == 1:
        return f"{where}: {faults[0]}"
    return "\n  ".join([f"{where}: {len(faults)} faults", *faults])


def square_side(num_patches: int, source: str) -> int:
    """The side of a square grid of patches, for a source that does not state its rows.

    Raises:
      InputError: if the number of patches is not a square.
    """
    side = math.isqrt(max(num_patches, 0))
    if side < 1 or side**2 != num_patches:
        raise InputError(
            f"init_from={source!r}: its {num_patches} patches do not form a square grid; state "
            "the image size in the JSON file next to the weights"
        )
    return side


def to_json(content: dict[str, Any]) -> str:
    """Format a JSON object as the text of a file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def check_family(model: nn.Module, *held: type[nn.Module]) -> list[str]:
    """The reason why a format that holds only the families `held` cannot hold `model`, if any."""
    family = type(model).__name__
    article = "an" if family[0] in "AEIOU" else "a"
    return [] if type(model) in held else [f"it is {article} {family}"]


def check_blocks(model: nn.Module, **needed: Any) -> list[str]:
    """The fields of the blocks of `model` that no foreign format holds, or that are not `needed`.

    `needed`: {field: value} that the format requires in addition.
    """
    needed = {"parallel": False, "norm": "layer", "qk_norm": False} | needed
    return [
        f"{field}={getattr(model, field)!r}"
        for field, value in needed.items()
        if getattr(model, field) != value
    ]


def check_positions(model: nn.Module) -> list[str]:
    """The position fields of `model` that no foreign format holds."""
    if model.pos_embed == "relative":
        return ["pos_embed='relative'"]
    if model.positions_at != "stem":
        return [f"pos_embed_at={model.pos_embed_at!r}"]
    return []


def require_image_size(pretrained: Pretrained) -> None:
    """Raise InputError if the model has no image size, for formats that need one."""
    if pretrained.model.image_size is None:
        raise InputError(
            f"{pretrained.source}: has no image size, but the format needs one; give image_size"
        )


def with_learned_positions(pretrained: Pretrained, *, class_token_has_one: bool) -> Pretrained:
    """Convert positions at the stem to equivalent learned 1-D ones, for formats without others.

    With `class_token_has_one`, a class token without a position gets one of zeros.
    """
    require_image_size(pretrained)
    model, params = pretrained.model, dict(pretrained.params)
    if model.pos_embed != "learned_1d":
        has_some = model.num_prefix_positions > 0
        rows, columns = model.grid
        table = np.zeros((1, rows * columns, model.width), np.float32)
        if model.pos_embed != "none":
            tables = tree.unflatten_names(params).get("pos_embedding")
            table = np.asarray(model.positions(model.image_size).build(tables))
            table = table if has_some else table[:, model.num_prefix_tokens :]
        params = {name: leaf for name, leaf in params.items() if not POSITIONS.fullmatch(name)}
        params["pos_embedding"] = table
        logger.info("positions: writing %s as a table", model.pos_embed)
        model = model.clone(pos_embed="learned_1d", pos_embed_class_token=has_some)
    if class_token_has_one and not model.num_prefix_positions:
        none = np.zeros((1, model.num_prefix_tokens, model.width), np.float32)
        params["pos_embedding"] = np.concatenate([none, params["pos_embedding"]], axis=1)
        logger.info("positions: the class token's entry is written as zeros")
        model = model.clone(pos_embed_class_token=True)
    return pretrained._replace(model=model, params=params)
