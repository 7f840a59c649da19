"""NaFlexVit of `timm`: a ViT for pictures in their own shape, whose patches are flattened."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.config import image_hw
from vit_jax.data.native import PatchRule
from vit_jax.models.own_shapes import FILTERS
from vit_jax.models.vit import ViT
from vit_jax.transfer import timm_blocks
from vit_jax.transfer.names import Row, find_unheld
from vit_jax.transfer.pretrained import Pretrained, with_rule
from vit_jax.transfer.source import Source
from vit_jax.transfer.timm_config import Config

PATCHES = "embeds.proj.weight"  # the embedding of flattened patches
_TO_NAFLEX = {
    timm_blocks.PATCHES_WEIGHT: PATCHES, "patch_embed.proj.bias": "embeds.proj.bias",
    "cls_token": "embeds.cls_token", "reg_token": "embeds.reg_token",
    "pos_embed": "embeds.pos_embed",
}  # fmt: skip
_HELD: dict[str, Sequence] = {
    "channels": range(1, 100), "hidden_head": (False,), "head_batch_norm": (False,),
    "registers": range(100), "pos_embed": ("learned_1d",), "norm_eps": (1e-6,),
}  # fmt: skip


def read_naflex(source: Source, args: Mapping[str, Any]) -> tuple[int, int] | None:
    """Give the arrays of a NaFlexVit the names and axes of a VisionTransformer's, in place.

    Returns the image size whose grid the positions have; None if it has none.
    """
    source.require({PATCHES: 2}, {"embeds.pos_embed": 4})
    width, values = source.arrays[PATCHES].shape
    channels = int(args.get("in_chans", 3))
    p, q = image_hw(args.get("patch_size", math.isqrt(values // channels)), "patch_size")
    if p * q * channels != values:
        source.refuse([f"{PATCHES}: {values} values a patch are not {p} x {q} x {channels}"])
    of_channels = source.arrays.pop(PATCHES).reshape(width, p, q, channels)
    source.arrays[timm_blocks.PATCHES_WEIGHT] = of_channels.transpose(0, 3, 1, 2)
    source.rename({r"embeds\.proj\.bias": "patch_embed.proj.bias",
                   r"embeds\.(cls_token|reg_token|pos_embed)": r"\1"})  # fmt: skip
    if "pos_embed" not in source.arrays:
        return None
    _, rows, columns, _ = source.arrays["pos_embed"].shape
    source.arrays["pos_embed"] = source.arrays["pos_embed"].reshape(1, rows * columns, width)
    return rows * p, columns * q


def naflex_kind(source: Source, args: Mapping[str, Any], architecture: str) -> timm_blocks.Kind:
    """The kind of a NaFlexVit by its arguments and its name in timm.

    Raises: InputError for positions that are not supported.
    """
    is_siglip, rope = "siglip" in architecture, args.get("rope_type") or "none"
    filter = args.get("pos_embed_interp_mode", "bilinear" if is_siglip else "bicubic")
    faults = Faults()
    faults.need(
        rope in ("none", "axial"), f"rope_type={rope!r} is not supported; needs axial, or none"
    )
    faults.need(
        filter in FILTERS,
        f"pos_embed_interp_mode={filter!r} is not supported; needs {' or '.join(FILTERS)}",
    )
    source.refuse(faults)
    fields = {"pos_filter": filter} | (timm_blocks.ROTARY_2D if rope == "axial" else {})
    return timm_blocks.Kind(act="gelu_tanh" if is_siglip else "gelu", fields=fields)


def of_pictures(found: Pretrained, config: Config) -> Pretrained:
    """The model for pictures in their own shape, if `config` states their `max_tokens`.

    Raises:
      InputError: the file states pixels that are not computed for such pictures.
    """
    if (most := config.stated.get("max_tokens")) is None:
        return found
    faults, filter = Faults(), config.pixels.get("interpolation", "bilinear")
    faults.need(
        filter == "bilinear",
        f"interpolation={filter!r}: needs bilinear, because max_tokens={most} keeps the shape of "
        "pictures; leave out max_tokens for images of one size",
    )
    spec = with_rule(found.spec, PatchRule(found.model.patch_size, most), faults)
    collect_faults(faults, f"init_from={found.source!r}")
    return found._replace(model=found.model.clone(max_tokens=most), spec=spec)


def is_naflex(model: nn.Module) -> bool:
    """Whether `model` takes pictures in their own shape, and is written as a NaFlexVit."""
    return type(model) is ViT and model.max_tokens is not None


def check(model: nn.Module) -> list[str]:
    """The reasons why the format cannot hold `model`."""
    return find_unheld(model, (ViT,), _HELD)


def to_naflex(rows: Sequence[Row]) -> list[Row]:
    """The rows of a VisionTransformer, for the names and axes of a NaFlexVit."""
    renamed = [row._replace(theirs=_TO_NAFLEX.get(row.theirs, row.theirs)) for row in rows]
    return [row._replace(axes="i o -> o i") if row.theirs == PATCHES else row for row in renamed]


def to_args(args: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], str]:
    """NaFlexVit's arguments, given VisionTransformer's, and a registered architecture."""
    kept = {k: v for k, v in args.items() if k not in ("img_size", "no_embed_class")}
    own = {"pos_embed_grid_size": list(model.grid), "pos_embed_interp_mode": model.pos_filter}
    return kept | own, f"naflexvit_base_patch16_{'siglip' if model.pool == 'map' else 'gap'}"
