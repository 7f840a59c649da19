"""Pictures in their own shape: the fields of a model that takes them, and rows of several.

Axes: B pictures, N patches of one with padding, P tokens before them, R rows of several pictures
and T tokens each, D width.
Sources: Tschannen et al. 2025 (arXiv:2502.14786), section 2.4.2; rows: Dehghani et al. 2023
  (arXiv:2307.06304), section 2.
"""

import dataclasses
from itertools import groupby
from typing import Any

import jax
from einops import rearrange
from flax.linen import nowrap

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures
from vit_jax.config import key
from vit_jax.models.fields import FROM_1
from vit_jax.models.layers import Context
from vit_jax.models.own_shapes import FILTERS
from vit_jax.models.packing import cut_pictures, cut_rows, join_pictures, join_rows, pad_tokens
from vit_jax.models.patches import count_kept_of


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PictureFields:
    """The fields of a model that also takes `Pictures`.

    Its learned positions have the grid of `image_size`, and each picture gets them resampled to its
    own grid.
    """

    max_tokens: int | None = key(
        None, "patches of a picture in its own shape, at most; None: images have image_size",
        within=FROM_1,
    )  # fmt: skip
    pack: tuple[int, ...] | None = key(
        None, "training: patches of each picture of a row, at most; None: one a row"
    )
    pos_filter: str = key(
        "bilinear", "how pictures in their own shape resample positions", choices=tuple(FILTERS)
    )

    @nowrap
    def find_picture_faults(self) -> list[str]:
        """The fields, with `max_tokens`, by which the model takes images of one size only."""
        model: Any = self  # the other fields of a ViT
        if self.max_tokens is None:
            return []
        kind, at = model.position_class, model.positions_at
        faults = (
            []
            if model.embeds_patches and not model.needs_grid
            else [
                f"name: a {type(self).__name__} takes images of one size, not pictures of "
                "data.max_tokens; choose a ViT, or set data.image_size instead"
            ]
        )
        if at == "layers" or not (kind.takes_pictures or kind.acts_on == "nothing"):
            faults.append(
                f"pos_embed={model.pos_embed!r}, pos_embed_at={at!r}: pictures of "
                "data.max_tokens need learned_1d, sincos_2d or none, in one place, or rotary"
            )
        return faults

    @nowrap
    def encode_all(self, images: Images, train: bool) -> tuple[jax.Array, jax.Array | None]:
        """The encoder's output (B, P + N, D), and each picture's number of patches; None: N.

        Training packs pictures, by `pack`, into rows that the encoder computes.
        """
        model: Any = self  # the other fields and the methods of a ViT
        if train and self.pack and isinstance(images, Pictures):
            return self._encode_packed(images, self.pack)
        x_BND, more, counts_B = self._embed_all(images, train)
        return model.encode(x_BND, **more, train=train), counts_B

    @nowrap
    def _encode_packed(
        self, pictures: Pictures, pack: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """`encode_all` of pictures in the order of the rows that hold them."""
        model: Any = self
        sizes, rows = [(len([*of]), n) for n, of in groupby(pack)], len(pictures.grid) // len(pack)
        if rows * len(pack) != len(pictures.grid):
            raise InputError(f"pack={pack}: {len(pictures.grid)} pictures are not whole rows")
        groups = (cut_pictures(x_B, tuple(sizes)) for x_B in pictures)
        begun, counts = [], list[Any]()
        for (_, most), patches, grid in zip(sizes, *groups, strict=True):
            x_BND, more, counts_B = self._embed_all(Pictures(patches[:, :most], grid), train=True)
            given = {"keep": None, "image_size": model.image_size, "counts_B": None} | more
            x_BND, context = model.place_all(x_BND, **given, train=True)
            begun.append(_pad_to_multiple(x_BND, context, model.ops.token_multiple))
            counts.append(counts_B)
        xs, contexts = zip(*begun, strict=True)
        parts = tuple((number, x.shape[1]) for (number, _), x in zip(sizes, xs, strict=True))
        *of_tokens, keys, _ = zip(*contexts, strict=True)
        positions, turns = (None if x[0] is None else join_rows(x, rows) for x in of_tokens)
        context = Context(positions, turns, join_pictures(keys, rows))
        x_RTD = model.encoder(join_rows(xs, rows), context=context, parts=parts, train=True)
        most = max(tokens for _, tokens in parts)
        tokens = [pad_tokens(x, most) for x in cut_rows(x_RTD, parts)]
        return join_pictures(tokens, rows), join_pictures(counts, rows)

    @nowrap
    def _embed_all(
        self, images: Images, train: bool
    ) -> tuple[jax.Array, dict[str, Any], jax.Array | None]:
        """The patches as tokens, arguments of `encode`, and each picture's number of patches."""
        model: Any = self
        x_BND, counts_B, more = model.embed(images), None, dict[str, Any]()
        if isinstance(images, Pictures):
            more, counts_B = {"pictures": images}, images.counts
        if model.image_size is None:
            more["image_size"] = images.shape[-3:-1]  # of a picture one patch
        more["keep"] = model.draw_keep(*x_BND.shape[:2], counts_B=counts_B, train=train)
        if more["keep"] is not None and counts_B is not None:
            more["counts_B"] = counts_B = count_kept_of(counts_B, x_BND.shape[1], model.keep_tokens)
        return x_BND, more, counts_B

    @nowrap
    def flat_patches(
        self, pictures: Pictures, patch_size: tuple[int, int], channels: int
    ) -> jax.Array:
        """The patches (B, N, p q channels), as `patches.extract_patches` orders their values."""
        found, needed = pictures.patches.shape[2:], (*patch_size, channels)
        if found != needed:
            raise InputError(f"pictures in patches of {found}: this model needs {needed}")
        return rearrange(pictures.patches, "b n p q c -> b n (p q c)")


def _pad_to_multiple(
    x_BND: jax.Array, context: Context, multiple: int
) -> tuple[jax.Array, Context]:
    """Tokens, and what their context has for tokens, of a length that attention kernels take."""
    total = x_BND.shape[1] + -x_BND.shape[1] % multiple
    positions, turns = (None if x is None else pad_tokens(x, total) for x in context[:2])
    return pad_tokens(x_BND, total), context._replace(positions=positions, turns=turns)
