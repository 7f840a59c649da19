"""Position embeddings: what a model knows of where a token is.

Axes: B images, H heads, N tokens, S patches, P tokens before them, D width, K width of a head.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import struct

from vit_jax.errors import nearest

LEARNED = ("learned_1d", "learned_2d", "relative")
POS_EMBEDS = (*LEARNED, "sincos_2d", "none")
PLACES = ("stem", "layers", "layers_shared")

_INIT = nn.initializers.normal(0.02)


@struct.dataclass
class Relative:
    """Vectors with which queries are multiplied as with keys, one for each offset between tokens.

    offsets: (2 S - 1, K), by how many patches, in raster order, the query stands behind the key;
      the entry S - 1 is that of no offset.
    to_patches: (P, S, K), of the queries of the tokens before the patches for each patch;
      from_patches: (P, S, K), of each patch's query for those tokens; prefix: (P, P, K), of those
      tokens' queries for each other. All None: those tokens have no positions.
    block: how many patches' queries are multiplied with the same vectors; it divides S.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4, after Shaw et al. 2018
      (arXiv:1803.02155), Eq. 5.
    """

    block: int = struct.field(pytree_node=False)
    offsets: jax.Array
    to_patches: jax.Array | None = None
    from_patches: jax.Array | None = None
    prefix: jax.Array | None = None

    def logits(self, q_BHNK):
        """What is added to the logits of attention, in the dtype of the queries.

        Shapes: (B, H, N, K) -> (B, H, N, N); the queries are scaled as for the keys.
        """
        num_patches = (self.offsets.shape[0] + 1) // 2
        num_prefix = q_BHNK.shape[2] - num_patches
        tables = jax.tree.map(lambda table: table.astype(q_BHNK.dtype), self)
        q_BHPK, q_BHSK = q_BHNK[:, :, :num_prefix], q_BHNK[:, :, num_prefix:]
        logits_BHSS = _logits_by_offset(q_BHSK, tables.offsets, self.block)
        logits_BHNN = _pad(logits_BHSS, above=num_prefix, left=num_prefix)
        if self.prefix is None:
            return logits_BHNN
        from_BHSP = jnp.einsum("bhsk,psk->bhsp", q_BHSK, tables.from_patches)
        to_BHPS = jnp.einsum("bhpk,psk->bhps", q_BHPK, tables.to_patches)
        among_BHPP = jnp.einsum("bhpk,pok->bhpo", q_BHPK, tables.prefix)
        to_BHPN = jnp.concatenate([among_BHPP, to_BHPS], axis=3)
        logits_BHNN += _pad(from_BHSP, above=num_prefix, right=num_patches)
        return logits_BHNN + _pad(to_BHPN, below=num_patches)


def _pad(x_BHNM, above=0, below=0, left=0, right=0):
    return jnp.pad(x_BHNM, ((0, 0), (0, 0), (above, below), (left, right)))


def _logits_by_offset(q_BHSK, offsets_OK, block):
    """The product of each query with the vectors of its offsets to all patches.

    Pairs never have vectors. To the queries of a block of R patches S + R - 1 offsets occur, and
    each query is multiplied with the vectors of all these, from the least on. Of its products S are
    wanted, which begin one further left in each row of a block. Rows that are one longer, by a
    product with 0, read as if they were not, lie so.

    Shapes: (B, H, S, K), (O, K), O = 2 S - 1 -> (B, H, S, S).
    """
    num = q_BHSK.shape[2]
    firsts = range(num - block, -1, -block)
    blocks_TOK = jnp.stack([offsets_OK[::-1][first : first + num + block - 1] for first in firsts])
    blocks_TOK = jnp.pad(blocks_TOK, ((0, 0), (0, 1), (0, 0)))
    q_BHTRK = rearrange(q_BHSK, "b h (t r) k -> b h t r k", r=block)
    x_BHTRO = jnp.einsum("bhtrk,tok->bhtro", q_BHTRK, blocks_TOK)
    x = rearrange(x_BHTRO, "b h t r o -> b h t (r o)")[..., block - 1 : -1]
    x_BHTRO = rearrange(x, "b h t (r o) -> b h t r o", r=block)
    return rearrange(x_BHTRO[..., :num], "b h t r s -> b h (t r) s")


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of a grid of patches: their tables, and what these make.

    kind: one of POS_EMBEDS, not "none".
    grid: rows and columns of patches.
    num_prefix: the tokens before the patches.
    prefix_has_some: whether they have positions too.
    width: that of the model; of relative positions that of a head.
    """

    kind: str
    grid: tuple[int, int]
    num_prefix: int
    prefix_has_some: bool
    width: int

    def init(self, key: jax.Array) -> Any:
        """The tables of a kind that is learned, float32.

        learned_1d: (1, P + S, D). learned_2d: {"rows": (1, rows, D / 2), "columns": (1, columns,
        D / 2), "prefix": (1, P, D)}. relative: those of `Relative`. What belongs to the tokens
        before the patches is left out where they have no positions.
        """
        (rows, columns), width = self.grid, self.width
        num_prefix = self.num_prefix if self.prefix_has_some else 0
        if self.kind == "learned_1d":
            return _INIT(key, (1, num_prefix + rows * columns, width))
        shapes: dict[str, tuple[int, ...]]
        of_prefix: dict[str, tuple[int, ...]]
        if self.kind == "learned_2d":
            shapes = {"rows": (1, rows, width // 2), "columns": (1, columns, width // 2)}
            of_prefix = {"prefix": (1, num_prefix, width)}
        else:
            shapes = {"offsets": (2 * rows * columns - 1, width)}
            of_prefix = {
                "to_patches": (num_prefix, rows * columns, width),
                "from_patches": (num_prefix, rows * columns, width),
                "prefix": (num_prefix, num_prefix, width),
            }
        shapes |= of_prefix if num_prefix else {}
        keys = jax.random.split(key, len(shapes))
        return {
            name: _INIT(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def build(self, tables: Any = None) -> jax.Array | Relative:
        """What is added to the tokens, (1, N, D), or of relative positions `Relative`.

        Source: learned_2d: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4.
        """
        if self.kind == "relative":
            return Relative(block=max(self.grid), **tables)
        if self.kind == "sincos_2d":
            added_1ND = jnp.asarray(sincos_2d(self.grid, self.width))[None]
        elif self.kind == "learned_2d":
            (rows, columns), half = self.grid, self.width // 2
            x_1YXD = jnp.broadcast_to(tables["columns"][:, None], (1, rows, columns, half))
            y_1YXD = jnp.broadcast_to(tables["rows"][:, :, None], (1, rows, columns, half))
            added_1ND = jnp.concatenate([x_1YXD, y_1YXD], axis=3).reshape(1, -1, self.width)
            if "prefix" in tables:
                added_1ND = jnp.concatenate([tables["prefix"], added_1ND], axis=1)
        else:
            added_1ND = tables
        num_without = self.num_prefix + self.grid[0] * self.grid[1] - added_1ND.shape[1]
        return jnp.pad(added_1ND, ((0, 0), (num_without, 0), (0, 0)))


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """Fixed sine-cosine embedding of a grid's positions, in raster order.

    For the column x and the row y of a patch: [sin(x w), cos(x w), sin(y w), cos(y w)] with the
    width/4 frequencies w_i = 10000^(-i / (width/4 - 1)).

    Shapes: -> (grid[0] * grid[1], width), float32; 4 divides the width, which is at least 8.
    Source: Beyer et al. 2022 (arXiv:2205.01580), after Chen et al. 2021 (arXiv:2104.02057).
    """
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4 - 1))
    x = columns.reshape(-1, 1) * frequencies
    y = rows.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def find_position_faults(kind: str, place: str | None, width: int) -> list[str]:
    """Faults of a model's fields pos_embed=`kind`, pos_embed_at=`place` and width."""
    faults = []
    if kind == "sincos_2d" and (width % 4 or width < 8):
        faults.append(f"pos_embed='sincos_2d' needs a width that 4 divides, from 8 on; got {width}")
    if kind == "learned_2d" and width % 2:
        faults.append(f"pos_embed='learned_2d' needs a width that 2 divides; got {width}")
    if place not in (None, *PLACES):
        faults.append(f"pos_embed_at={place!r}: {nearest(str(place), PLACES)}")
    elif place is not None and kind == "none":
        faults.append(f"pos_embed_at={place!r}: pos_embed='none' adds nothing; set it to None")
    elif place == "stem" and kind == "relative":
        faults.append(
            "pos_embed_at='stem': relative positions are in the attention of the layers; choose "
            "layers or layers_shared"
        )
    return faults
