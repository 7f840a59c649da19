"""The hybrid: a Vision Transformer on the patches of a ResNet's feature map.

Axes: B images, H rows, W columns, C channels, N tokens, D width.
Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1 and appendix B.2; for R26 and R
Steiner et al. 2021 (arXiv:2106.10270).
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.contract import SplitLayer
from vit_jax.models.resnet import (
    HYBRID,
    RESNET_STAGES,
    STEM_WIDTH,
    ResNetModel,
    find_stage_faults,
    map_stride,
)
from vit_jax.models.variants import parse_vit_name
from vit_jax.models.vit import ViT

# The hybrids of the papers; `hybrid_fields` accepts others too.
HYBRID_NAMES = (
    "R+ViT-Ti/16",
    "R26+ViT-S/32",
    "R26+ViT-B/32",
    "R50+ViT-B/16",
    "R50+ViT-B/32",
    "R50+ViT-L/16",
    "R50+ViT-L/32",
)


def hybrid_fields(name: str) -> dict[str, Any]:
    """The fields of the hybrid called `name`.

    "R50+ViT-B/32" has all stages of a ResNet-50 and patches of 1 x 1 on its map of stride 32. At
    /16 there is no fourth stage; its units are added to the third. "R+ViT-Ti/16" has only the root,
    and patches of half the size in the name, as published: 8 x 8 on a map of stride 4.

    Raises:
      InputError: for an unknown ResNet, or a patch size that its stride does not divide.
    """
    stages: tuple[int, ...]
    resnet = name.partition("+")[0].removeprefix("R")
    of_variant, size = parse_vit_name(name)
    if not resnet:
        stages, needed = (), 2
        patch_size = size // 2
    elif int(resnet) not in RESNET_STAGES:
        known = ", ".join(f"R{layers}" for layers in RESNET_STAGES)
        raise InputError(f"name={name!r}: no ResNet R{resnet}; known: R, {known}")
    else:
        stages, needed = RESNET_STAGES[int(resnet)], 16
        if size % 32:
            stages = (*stages[:2], stages[2] + stages[3])
        patch_size = size // map_stride(stages)
    if size % needed:
        raise InputError(f"name={name!r}: the patch size {size} must be a multiple of {needed}")
    return of_variant | {"patch_size": patch_size, "stages": stages}


class HybridViT(ResNetModel, ViT):
    """ViT that cuts patches of `patch_size` from the feature map of a ResNet with these `stages`.

    `stem_width` is the number of channels of the ResNet's root; without stages the root is the
    whole ResNet. All other fields are as in `ViT`. `scan` applies to the Transformer's blocks and
    to the units of each stage; the parameters of units stay apart, see `resnet.Stage`.

    Raises: InputError for fields that contradict each other, or images of another size.
    """

    stages: tuple[int, ...] = key((), **fields.STAGES)
    stem_width: int = key(STEM_WIDTH, **fields.STEM_WIDTH)

    names = HYBRID_NAMES
    parse = staticmethod(hybrid_fields)
    possible_names = HYBRID_NAMES

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        """At most one unit and half the width of the ResNet, with the same stride."""
        tiny = ViT.tiny_fields(name) | {"stem_width": STEM_WIDTH // 2}
        if (of_name := hybrid_fields(name))["stages"]:
            stride = of_name["patch_size"] * map_stride(of_name["stages"])
            tiny |= {"stages": (1,), "patch_size": stride // map_stride((1,))}
        return tiny

    def setup(self) -> None:
        super().setup()
        self.stem = self.make_trunk(HYBRID)

    def _embed(self, images: jax.Array) -> jax.Array:
        return super()._embed(self.stem(images))

    @property
    def token_stride(self) -> tuple[int, int]:
        """Height and width in pixels of the image area behind one token."""
        stride = map_stride(self.stages)
        return self.patch_size[0] * stride, self.patch_size[1] * stride

    embeds_patches = False
    flops_by_sizes = None

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The standardised kernel of the root convolution."""
        return HYBRID.standardize(jnp.asarray(params["stem/conv_root/kernel"]))

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer]:
        """The units of the ResNet, which is all embedding, then the blocks."""
        blocks = super().split_layers(tokens)
        assert blocks is not None
        return self.split_units() + blocks

    @nn.nowrap
    def find_faults(self) -> list[str]:
        return super().find_faults() + find_stage_faults(self.stages, self.stem_width)
