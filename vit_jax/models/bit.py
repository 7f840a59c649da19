"""Big Transfer's ResNet-v2, with group normalisation and weight standardisation.

Axes: B images, H rows, W columns, C channels, N = H W positions, D width.
Source: Kolesnikov et al. 2019 (arXiv:1912.11370), after He et al. 2016 (arXiv:1603.05027).
"""

import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange

from vit_jax.base.errors import InputError
from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.block_ops import Constrain, unconstrained
from vit_jax.models.contract import SplitLayer
from vit_jax.models.fields import check_image_shape
from vit_jax.models.resnet import (
    BIT,
    EXPANSION,
    RESNET_STAGES,
    STEM_WIDTH,
    ResNetModel,
    find_stage_faults,
    map_stride,
)

BIT_NAMES = tuple(
    f"BiT-{size}"
    for size in (
        "R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3",
    )
)  # fmt: skip


def bit_fields(name: str) -> dict[str, Any]:
    """The fields of the ResNet called `name`; "BiT-R50x3" is a ResNet-50 with triple width.

    Raises:
      InputError: if it is not one of BIT_NAMES.
    """
    match = re.fullmatch(r"BiT-R(\d+)x(\d+)", name)
    if match is None or name not in BIT_NAMES:
        raise InputError(f"name={name!r}: no such ResNet; known: {', '.join(BIT_NAMES)}")
    layers, factor = map(int, match.groups())
    return {"stages": RESNET_STAGES[layers], "stem_width": STEM_WIDTH * factor}


class BiT(ResNetModel):
    """ResNet-v2: images (B, H, W, 3) in its value range -> logits (B, C), float32.

    With `num_classes` None the model has no head and `__call__` returns the features. With
    `image_size` None it takes images of any size. `stages` holds the number of units of each stage,
    `stem_width` is the number of channels of the root. `scan` and `remat` are as in `ViT`, for
    each unit, but a scan keeps the parameters of each unit apart; see `resnet.Stage`.

    Methods: "tokens" -> (B, N, D), the last feature map in raster order, normalised; "features" ->
      (B, D), its mean; "pre_logits" -> (B, D), the same as the features.
    Raises: InputError for fields that are out of range, or images of another size.
    """

    num_classes: int | None = key(..., **fields.NUM_CLASSES)
    image_size: tuple[int, int] | None = key(..., "of the images")
    stages: tuple[int, ...] = key(..., **fields.STAGES)
    stem_width: int = key(STEM_WIDTH, **fields.STEM_WIDTH)
    head_bias: float = key(0.0, **fields.HEAD_BIAS)
    scan: bool = key(False, **fields.SCAN)
    remat: str = key("none", **fields.REMAT)
    channels: int = key(3, "of the images", within=fields.FROM_1)
    dtype: Any = jnp.float32
    constrain: Constrain = unconstrained

    names = BIT_NAMES
    parse = staticmethod(bit_fields)
    stacks_layers = False

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        """At most one unit and half the width."""
        return {"name": name, "stem_width": STEM_WIDTH // 2, "stages": (1,)}

    def setup(self) -> None:
        self.trunk = self.make_trunk(BIT)
        if self.num_classes is not None:
            self.head = nn.Dense(
                self.num_classes,
                kernel_init=nn.initializers.zeros,
                bias_init=nn.initializers.constant(self.head_bias),
            )

    def tokens(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        """The last feature map (B, N, D), normalised."""
        del train
        check_image_shape(images.shape, self.image_size, self.channels)
        return rearrange(self.trunk(images.astype(self.dtype)), "b h w d -> b (h w) d")

    def features(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        """The mean (B, D) of the last feature map."""
        return self.tokens(images, train=train).mean(axis=1)

    def pre_logits(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        """The features: the head is linear."""
        return self.features(images, train=train)

    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        x_BD = self.features(images, train=train)
        return x_BD if self.num_classes is None else self.head(x_BD)

    @property
    def width(self) -> int:
        """D, the number of channels of the last feature map."""
        return EXPANSION * self.stem_width * 2 ** (len(self.stages) - 1)

    @property
    def token_stride(self) -> tuple[int, int]:
        """Stride of the last feature map in pixels, vertically and horizontally."""
        return (map_stride(self.stages),) * 2

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The standardised kernel of the root convolution."""
        return BIT.standardize(jnp.asarray(params["trunk/conv_root/kernel"]))

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer]:
        del tokens
        return [unit._replace(part=1 + i) for i, unit in enumerate(self.split_units())]

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults() + find_stage_faults(self.stages, self.stem_width)
        if not self.stages:
            faults.append("stages=(): needs the units of each stage, e.g. (3, 4, 6, 3)")
        return faults
