"""ViTC: a Vision Transformer on the map of a few convolutions.

Axes: B images, H rows, W columns, C channels.
Source: Xiao et al. 2021 (arXiv:2106.14881), section 4 and appendix A.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import key
from vit_jax.models import fields
from vit_jax.models.attention import NORMS
from vit_jax.models.patches import extract_patches
from vit_jax.models.variants import VIT_VARIANTS, Variant
from vit_jax.models.vit import ViT

_LARGE = (64, 128, 128, 256, 256, 512)
# name: (the Transformer, stem_channels).
VITC_VARIANTS = {
    "ViTC-1GF": (Variant(192, 11, 576, 3), (24, 48, 96, 192)),
    "ViTC-4GF": (Variant(384, 11, 1152, 6), (48, 96, 192, 384)),
    "ViTC-18GF": (Variant(768, 11, 3072, 12), _LARGE),
    "ViTC-36GF": (Variant(1024, 13, 4096, 16), _LARGE),
}


def vitc_fields(name: str) -> dict[str, Any]:
    """The fields of the model called `name`, e.g. "ViTC-4GF".

    Raises:
      InputError: if it is not one of VITC_VARIANTS.
    """
    if name not in VITC_VARIANTS:
        raise InputError(f"name={name!r}: no such ViTC; {nearest(name, list(VITC_VARIANTS))}")
    variant, channels = VITC_VARIANTS[name]
    return variant._asdict() | {"patch_size": 16, "stem_channels": channels}


class ConvStem(nn.Module):
    """Convolutions of 3 x 3, each followed by a norm over the channels and a ReLU.

    A convolution has stride 2 if it changes the number of channels, and stride 1 if not. The norm
    departs from the paper, whose batch normalisation makes the images of a batch depend on each
    other.

    Shapes: (B, H, W, C) -> (B, H / stride, W / stride, last of `channels`), in `dtype`.
    """

    channels: tuple[int, ...]
    norm: Callable[..., nn.Module]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        for i, channels in enumerate(self.channels):
            stride = 1 if channels == x_BHWC.shape[-1] else 2
            conv = nn.Conv(
                channels, (3, 3), stride, padding=1, use_bias=False, dtype=self.dtype,
                name=f"conv_{i}",
            )  # fmt: skip
            x_BHWC = nn.relu(self.norm(name=f"norm_{i}")(conv(x_BHWC)))
        return x_BHWC


class ViTC(ViT):
    """ViT whose tokens are embedded from patches of the map of a `ConvStem`.

    `patch_size` is the area of a token in pixels of the image; the stride of the stem divides it.
    Where both are equal, the embedding is the paper's last convolution of 1 x 1. `ViT` describes
    the other fields.

    Raises: InputError for fields that contradict each other, or images of another size.
    """

    stem_channels: tuple[int, ...] = key(
        VITC_VARIANTS["ViTC-1GF"][1], "ViTC: of each convolution; a change halves the map",
        within=fields.FROM_1,
    )  # fmt: skip

    split_params = ((r"stem/conv_\d+/kernel", (None, None, None, "fsdp")),)

    names = tuple(VITC_VARIANTS)
    parse = staticmethod(vitc_fields)
    possible_names = names
    embeds_patches = False
    flops_by_sizes = None

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        return {"name": name, "stem_channels": (4, 8, 12, 16)} | VIT_VARIANTS["mu"]._asdict()

    def setup(self) -> None:
        super().setup()
        norm = partial(NORMS[self.norm], epsilon=self.norm_eps, dtype=self.dtype)
        self.stem = ConvStem(self.stem_channels, norm, self.dtype)

    def _embed(self, images: jax.Array) -> jax.Array:
        height, width = (side // self.stem_stride for side in self.patch_size)
        return self.embedding(extract_patches(self.stem(images), (height, width)))

    @property
    def stem_stride(self) -> int:
        """The distance of neighbours in the stem's map, in pixels of the image."""
        steps = itertools.pairwise((self.channels, *self.stem_channels))
        return 2 ** sum(before != after for before, after in steps)

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The kernel of the first convolution."""
        return jnp.asarray(params["stem/conv_0/kernel"])

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults()
        if any(side % self.stem_stride for side in self.patch_size):
            faults.append(
                f"patch_size={self.patch_size}: stem_channels={self.stem_channels} halve the map "
                f"to a stride of {self.stem_stride}; choose a multiple of it"
            )
        return faults
