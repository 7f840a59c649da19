"""Position embeddings.

Axes: B images, H heads, N tokens, S patches, P prefix tokens (before the patches), D width, K width
of a head.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import struct

LEARNED = ("learned_1d", "learned_2d", "relative")
POS_EMBEDS = (*LEARNED, "sincos_2d", "none")
SINCOS_1D = "sincos_1d"  # of T2T-ViTs, which keep its table as a constant
TABLES = (*LEARNED, SINCOS_1D)  # kinds with tables that belong to the variables of a model
PLACES = ("stem", "layers", "layers_shared")

_INIT = nn.initializers.normal(0.02)


@struct.dataclass
class Relative:
    """Relative positions: vectors multiplied with the queries, as keys are, one for each offset.

    offsets: (2 S - 1, K), indexed by the query's raster index minus the key's, plus S - 1; entry
      S - 1 is offset 0.
    to_patches: (P, S, K), for the queries of prefix tokens and the keys of patches.
    from_patches: (P, S, K), for the queries of patches and the keys of prefix tokens.
    prefix: (P, P, K), between prefix tokens. The last three are None if prefix tokens have no
      positions.
    block: number of patches whose queries are multiplied with the same vectors; it divides S.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4, after Shaw et al. 2018
      (arXiv:1803.02155), Eq. 5.
    """

    block: int = struct.field(pytree_node=False)
    offsets: jax.Array
    to_patches: jax.Array | None = None
    from_patches: jax.Array | None = None
    prefix: jax.Array | None = None

    @property
    def num_patches(self) -> int:
        """S."""
        return (self.offsets.shape[0] + 1) // 2

    def logits(self, q_BHNK):
        """The term added to the attention logits, in the dtype of the queries.

        Shapes: (B, H, N, K) -> (B, H, N, N); the queries must already be divided by sqrt(K).
        """
        num_patches = self.num_patches
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

    This avoids a table of vectors for all S x S pairs. A block of R queries has S + R - 1 different
    offsets; each of its queries is multiplied with the vectors of all of them. Row r of the result
    needs S of these products, starting one column further left than row r - 1. To align them, each
    row is padded by one zero, the block is flattened, R - 1 values are cut off in front and one
    behind, and the rest is reshaped into rows one value shorter.

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
    """The position embedding of a grid of patches: its tables, and the arrays built from them.

    kind: one of POS_EMBEDS except "none", or SINCOS_1D.
    grid: rows and columns of patches.
    num_prefix: number of prefix tokens.
    num_placed: number of the first prefix tokens that have positions too.
    width: width of the model; for relative positions the width of a head.
    """

    kind: str
    grid: tuple[int, int]
    num_prefix: int
    num_placed: int
    width: int

    def init(self, key: jax.Array) -> Any:
        """Initialise the tables of a learned kind, float32.

        learned_1d: (1, P + S, D). learned_2d: {"rows": (1, rows, D / 2), "columns": (1, columns,
        D / 2), "prefix": (1, P, D)}. relative: the fields of `Relative`. Prefix tokens without
        positions have no entries.
        """
        (rows, columns), width = self.grid, self.width
        num_prefix = self.num_placed
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
        """The array (1, N, D) that is added to the tokens; for relative positions a `Relative`.

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
        patches = self.grid[0] * self.grid[1]
        num_without = self.num_prefix + patches - added_1ND.shape[1]
        none_1ND = jnp.zeros((1, num_without, self.width), added_1ND.dtype)
        of_prefix, of_patches = added_1ND[:, :-patches], added_1ND[:, -patches:]
        return jnp.concatenate([of_prefix, none_1ND, of_patches], axis=1)


def sincos_2d(grid: tuple[int, int], width: int, span: int | None = None) -> np.ndarray:
    """Fixed sine-cosine embedding of a grid's positions, in raster order.

    A patch in column x and row y gets [sin(x w), cos(x w), sin(y w), cos(y w)] with the width/4
    frequencies w_i = 10000^(-i / span). `span` None is width/4 - 1, so that the lowest frequency is
    1/10000; masked autoencoders use width/4.

    Shapes: -> (grid[0] * grid[1], width), float32; the width is a multiple of 4, at least 8.
    Source: Beyer et al. 2022 (arXiv:2205.01580), after Chen et al. 2021 (arXiv:2104.02057).
    """
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4 - 1 if span is None else span))
    x = columns.reshape(-1, 1) * frequencies
    y = rows.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def sincos_1d(num: int, width: int) -> np.ndarray:
    """Fixed sine-cosine embedding of the numbers 0 to num - 1.

    Entry 2 i is sin(n w_i) and entry 2 i + 1 cos(n w_i), w_i = 10000^(-2 i / width).

    Shapes: -> (num, width), float32.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    pairs = np.arange(width) // 2
    angles = np.arange(num)[:, None] * 10000.0 ** -(2 * pairs / width)
    return np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles)).astype(np.float32)


def find_position_faults(kind: str, place: str | None, width: int) -> list[str]:
    """The faults of a model's fields pos_embed=`kind`, pos_embed_at=`place` and width."""
    faults = []
    if kind == "sincos_2d" and (width % 4 or width < 8):
        faults.append(f"pos_embed='sincos_2d': width={width} must be a multiple of 4, at least 8")
    if kind == "learned_2d" and width % 2:
        faults.append(f"pos_embed='learned_2d': width={width} must be a multiple of 2")
    if place is not None and kind == "none":
        faults.append(f"pos_embed_at={place!r}: pos_embed='none' adds nothing; set it to None")
    elif place == "stem" and kind == "relative":
        faults.append(
            "pos_embed_at='stem': relative positions act inside the layers' attention; choose "
            "layers or layers_shared"
        )
    return faults
