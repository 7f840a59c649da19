"""Axial-ViT: a Vision Transformer with attention within rows, then within columns.

Axes: B images, N tokens in raster order, Y rows, X columns, D width.
Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.6, after Ho et al. 2019
(arXiv:1912.12180) and Wang et al. 2020 (arXiv:2003.07853).
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from einops import rearrange

from vit_jax.models.layers import NO_CONTEXT, BlockFields, Context, EncoderBlock
from vit_jax.models.vit import ViT


class AxisBlock(EncoderBlock):
    """An encoder block whose tokens attend to the tokens of the same row, or of the same column.

    `grid` is the number of rows and columns. Attention takes each row or column as an image of its
    own; everything else sees all tokens of an image, as in `EncoderBlock`.
    """

    grid: tuple[int, int] = (1, 1)
    within: str = "row"

    @nn.nowrap
    def mix(
        self, attention: Callable[..., jax.Array], y_BND: jax.Array, **kwargs: Any
    ) -> jax.Array:
        line = {"row": "(b y) x d", "column": "(b x) y d"}[self.within]
        sides = dict(zip("yx", self.grid, strict=True))
        y = rearrange(y_BND, f"b (y x) d -> {line}", **sides)
        return rearrange(attention(y, y, **kwargs), f"{line} -> b (y x) d", **sides)


class AxialBlock(BlockFields, nn.Module):
    """Row attention and an MLP, then column attention and an MLP: two blocks, `row` and `column`.

    It has the fields and arguments of `EncoderBlock`, and `grid`. Both blocks drop their branches
    with `drop_rate`. Shared positions are added to the input of the first. `positions` is None and
    `num_tokens` is not used: the blocks have no tables of their own, and no padding.

    Shapes: (B, N, D) -> ((B, N, D), None).
    """

    stochastic_depth: bool = False
    positions: None = None
    num_tokens: int | None = None
    grid: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(
        self,
        x_BND: jax.Array,
        drop_rate: float | jax.Array,
        train: bool,
        context: Context = NO_CONTEXT,
    ) -> tuple[jax.Array, None]:
        assert context.turns is context.num_keys_B is None  # checked by AxialViT.find_faults
        fields = self.block_fields() | {
            "stochastic_depth": self.stochastic_depth,
            "grid": self.grid,
        }
        if context.positions is not None:
            x_BND += context.positions.astype(x_BND.dtype)
        x_BND, _ = AxisBlock(**fields, within="row", name="row")(x_BND, drop_rate, train)
        return AxisBlock(**fields, within="column", name="column")(x_BND, drop_rate, train)


class AxialViT(ViT):
    """ViT with an `AxialBlock` for each of its `depth` blocks, and no class token.

    It has the other fields of `ViT`, with mean pooling as the default.

    Raises: InputError for fields that contradict each other, or images of another size.
    """

    pool: str = "gap"

    names = ("Axial-ViT-B/32", "Axial-ViT-B/16")
    block_class = AxialBlock
    attention_shape = "it runs within single rows and columns"
    why_no_weights = (
        "an Axial-ViT attends within rows and within columns, so there are no weights between all "
        "tokens"
    )
    flops_by_sizes = None
    sums_of_block = 4

    @nn.nowrap
    def find_faults(self) -> list[str]:
        faults = super().find_faults()
        if "token" in self.pool:
            faults.append(f"pool={self.pool!r}: an Axial-ViT has no class token; choose gap or map")
        if self.class_token:
            faults.append("class_token=True: an Axial-ViT has none; choose None")
        if self.has_positions_in_layers or self.position_class.acts_on == "turns":
            faults.append(
                f"pos_embed={self.pos_embed!r} with pos_embed_at={self.pos_embed_at!r}: the blocks "
                "of an Axial-ViT have no tables of their own; choose stem or layers_shared, and a "
                "kind that is added to the tokens"
            )
        if self.rotary is not None or self.registers:
            faults.append(
                f"rotary={self.rotary!r}, registers={self.registers}: an Axial-ViT has only "
                "the tokens of its grid, in rows and columns; leave them out"
            )
        return faults
