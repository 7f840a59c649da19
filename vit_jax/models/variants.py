"""The sizes of Vision Transformers by name, and the grammar of the names.

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929) table 1 for B, L, H; Steiner et al. 2021
(arXiv:2106.10270) for Ti, S; Zhai et al. 2021 (arXiv:2106.04560) table 2 for g, G, e (Chen et al.
2022, arXiv:2209.06794) and mu, M; Alabdulmohsin et al. 2023 (arXiv:2305.13035) for So400m;
Dehghani et al. 2023 (arXiv:2302.05442) table 1 and section 2 for 22B.
"""

import re
from typing import Any, NamedTuple

from vit_jax.base.errors import InputError, nearest


class Variant(NamedTuple):
    """Sizes of an encoder: token width D, number of blocks, hidden width of the MLP, heads."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int


VIT_VARIANTS = {
    "mu": Variant(32, 1, 128, 2),
    "Ti": Variant(192, 12, 768, 3),
    "S": Variant(384, 12, 1536, 6),
    "M": Variant(512, 12, 2048, 8),
    "B": Variant(768, 12, 3072, 12),
    "L": Variant(1024, 24, 4096, 16),
    "So400m": Variant(1152, 27, 4304, 16),
    "H": Variant(1280, 32, 5120, 16),
    "g": Variant(1408, 40, 6144, 16),
    "G": Variant(1664, 48, 8192, 16),
    "e": Variant(1792, 56, 15360, 16),
    "22B": Variant(6144, 48, 24576, 48),
}

# Further model fields in which a variant differs from the default.
VARIANT_FIELDS: dict[str, dict[str, Any]] = {
    "22B": {"parallel": True, "norm": "rms", "qk_norm": True, "qkv_bias": False, "pool": "map"},
}


# Each variant with the patch sizes of its paper; other patch sizes are valid too.
VIT_NAMES = tuple(
    f"ViT-{size}"
    for size in (
        "mu/16", "Ti/16", "S/16", "S/32", "M/16", "B/16", "B/32", "L/16", "L/32", "So400m/14",
        "H/14", "g/14", "G/14", "e/14", "22B/14",
    )
)  # fmt: skip


def vit_fields(name: str) -> dict[str, Any]:
    """The fields of the model called `name`, e.g. "ViT-L/16" or "DeiT-B/16"."""
    of_variant, patch_size = parse_vit_name(name)
    return {"patch_size": patch_size} | of_variant


def parse_vit_name(name: str) -> tuple[dict[str, Any], int]:
    """(the fields of variant L, 16) for "ViT-L/16", "DeiT-L/16" or "Axial-ViT-L/16".

    Raises:
      InputError: if `name` has another form, or the variant is unknown.
    """
    prefix = "Axial-" if name.startswith("Axial-") else ""
    family = prefix + name.removeprefix(prefix).partition("-")[0]
    match = re.fullmatch(rf"{re.escape(family)}-(\w+)/([1-9]\d*)", name)
    if match is None:
        raise InputError(f"name={name!r}: needs {family}-VARIANT/PATCH, e.g. {family}-B/16")
    variant, patch_size = match.groups()
    if variant not in VIT_VARIANTS:
        hint = nearest(variant, list(VIT_VARIANTS))
        raise InputError(f"name={name!r}: no variant {variant!r}; {hint}")
    fields = VIT_VARIANTS[variant]._asdict() | VARIANT_FIELDS.get(variant, {})
    return fields, int(patch_size)
