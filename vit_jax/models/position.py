"""Position embeddings.

Axes: B images, H heads, N tokens, S patches, P prefix tokens (before the patches), D width, K width
of a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.errors import InputError, nearest
from vit_jax.base.pictures import Pictures
from vit_jax.config import POSITIONS
from vit_jax.models.contract import CONSTANTS
from vit_jax.models.own_shapes import look_up, resample
from vit_jax.models.relative import Relative

SINCOS_1D = "sincos_1d"  # of T2T-ViTs, which keep its table as a constant
PLACES = ("stem", "layers", "layers_shared")

# Why no vectors belong to the patches; see `PositionEmbedding.acts_on`.
_NO_VECTORS = {
    "logits": "its positions are relative: they belong to pairs of patches, not to a patch",
    "turns": "its positions turn queries and keys: they have no vectors",
    "nothing": "the model has no position embedding",
}

_INIT = nn.initializers.normal(0.02)


class Resize(NamedTuple):
    """How tables are resampled: functions (table, old, new) -> the table for the size `new`.

    grid: for tables (P, prefix + rows * columns, D) of grids (rows, columns); the prefix stays.
    axis: for tables (1, n, D) of n rows, or of n columns.
    offsets: for tables (2 rows * columns - 1, K), indexed as `Relative.offsets`, of grids.
    """

    grid: Callable[[Any, tuple[int, int], tuple[int, int]], Any]
    axis: Callable[[Any, int, int], Any]
    offsets: Callable[[Any, tuple[int, int], tuple[int, int]], Any]


@dataclasses.dataclass(frozen=True)
class PositionEmbedding:
    """The position embedding of a grid of patches: its tables, and what is built from them.

    One class is one value of `model.pos_embed`, by its name in `config.registries.POSITIONS`. It
    has no keys of its own.

    Fields:
      grid: rows and columns of patches.
      num_prefix: number of prefix tokens.
      num_placed: number of the first prefix tokens that have positions too; 0 without tables.
      width: width of the model.
      num_heads: heads of attention, each of width K = width / num_heads.

    Class attributes:
      collection: of the variables that hold its tables: "params", which learn; CONSTANTS, only in
        models that keep some; "": it has no tables.
      acts_on: "tokens", "logits", "turns" or "nothing"; see `build`.
      takes_pictures: whether `of_pictures` gives the vectors of the patches.
    """

    grid: tuple[int, int]
    num_prefix: int
    num_placed: int
    width: int
    num_heads: int = 1

    collection: ClassVar[str] = "params"
    acts_on: ClassVar[str] = "tokens"
    takes_pictures: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.acts_on not in ("tokens", "logits", "turns", "nothing"):
            raise InputError(
                f"{cls.__name__}.acts_on={cls.acts_on!r}: needs tokens, logits, turns or nothing"
            )

    @property
    def num_patches(self) -> int:
        """S."""
        return math.prod(self.grid)

    @classmethod
    def is_table_of_stem(cls) -> bool:
        """Whether a `learned_1d` table can take its place where positions are added at the stem."""
        return cls.acts_on in ("tokens", "nothing") and cls.collection != CONSTANTS

    @classmethod
    def find_faults(cls, model: Any) -> list[str]:
        """The faults of a model's fields with these positions, each starting with its field."""
        faults, kind, place = [], model.pos_embed, model.pos_embed_at
        if place is not None and cls.acts_on in ("nothing", "turns"):
            faults.append(
                f"pos_embed_at={place!r}: pos_embed={kind!r} adds nothing; set it to None"
            )
        if place == "stem" and cls.acts_on == "logits":
            faults.append(
                "pos_embed_at='stem': relative positions act inside the layers' attention; choose "
                "layers or layers_shared"
            )
        if cls.acts_on == "turns" and model.rotary is not None:
            faults.append(
                f"rotary={model.rotary!r}: pos_embed={kind!r} turns queries and keys too; leave "
                "one out"
            )
        if cls.acts_on == "logits" and model.registers and model.num_prefix_positions:
            faults.append(
                f"registers={model.registers}: they have no relative positions; set "
                "pos_embed_class_token=False"
            )
        if cls.collection and model.image_size is None:
            faults.append(f"image_size=None: pos_embed={kind!r} needs a size; give one")
        return faults

    def init(self, key: jax.Array) -> Any:
        """The tables, float32: an array or {name: array}."""
        raise InputError(f"{type(self).__name__} needs a method init, which makes its tables")

    def build(self, tables: Any = None) -> Any:
        """The input of the layers, by `acts_on`.

        tokens: (1, P + S, D), added to the tokens. logits: a `flax.struct` with a method `logits`,
        see `Relative`. turns: (1, P + S, K), see `rotary.turn`. nothing: None.
        """
        raise InputError(f"{type(self).__name__} needs a method build, see `PositionEmbedding`")

    def build_checked(
        self, tables: Any = None, pictures: Pictures | None = None, filter: str = "bilinear"
    ) -> Any:
        """The result of `build`, or for pictures of `build_of_pictures`, unless it is None.

        Raises:
          InputError: it has another shape than `acts_on` needs.
        """
        if pictures is not None and self.acts_on != "nothing":
            return self.build_of_pictures(tables, pictures, filter)
        tokens, width = self.num_prefix + self.num_patches, self.width // self.num_heads
        needed: tuple[int, ...] | None = {
            "tokens": (1, tokens, self.width),
            "turns": (1, tokens, width),
            "logits": (2, self.num_heads, tokens, tokens),
        }.get(self.acts_on)
        found = adds = self.build(tables)
        if self.acts_on == "logits" and hasattr(found, "logits"):
            adds = _trace_logits(self)
        got = getattr(adds, "shape", None if adds is None else type(adds).__name__)
        if got != needed:
            raise InputError(
                f"pos_embed: {type(self).__name__}.build, which acts on {self.acts_on}, gave "
                f"{got}; needs {needed}" + " as logits of 2 images" * (self.acts_on == "logits")
            )
        return found

    def resampled(self, tables: Any, grid: tuple[int, int], resize: Resize) -> Any:
        """The tables for another grid; raises InputError if there are none."""
        del tables, resize
        raise InputError(
            f"pos_embed: {type(self).__name__} cannot go from a grid of {self.grid} to {grid}; "
            "keep the image size"
        )

    def of_pictures(self, tables: Any, pictures: Pictures, filter: str) -> jax.Array:
        """The vectors (B, N, D) of the patches of each picture; `filter`: see `own_shapes`."""
        del tables, pictures, filter
        raise InputError(
            f"pos_embed: {type(self).__name__} knows one grid only; choose learned_1d or sincos_2d"
        )

    def build_of_pictures(self, tables: Any, pictures: Pictures, filter: str) -> jax.Array:
        """`build` for pictures of different grids: (B, P + N, D)."""
        of_patches_BND = self.of_pictures(tables, pictures, filter)
        rows, _, width = of_patches_BND.shape
        of_prefix_1PD = jnp.zeros((1, self.num_prefix, width))
        if self.num_placed:
            of_prefix_1PD = of_prefix_1PD.at[:, : self.num_placed].set(tables[:, : self.num_placed])
        of_prefix_BPD = jnp.broadcast_to(of_prefix_1PD, (rows, *of_prefix_1PD.shape[1:]))
        return jnp.concatenate([of_prefix_BPD, of_patches_BND], axis=1)

    def with_prefix(self, added_1ND: jax.Array) -> jax.Array:
        """The vectors (1, P + S, D) of all tokens.

        They are `added_1ND` for placed tokens and patches, and 0 for the others.
        """
        num_without = self.num_prefix + self.num_patches - added_1ND.shape[1]
        if num_without not in range(self.num_prefix + 1) or added_1ND.shape[::2] != (1, self.width):
            raise InputError(
                f"pos_embed: {type(self).__name__} gave the shape {added_1ND.shape}; needs (1, N, "
                f"{self.width}) with N={self.num_patches} patches, and placed tokens before them"
            )
        none_1ND = jnp.zeros((1, num_without, self.width), added_1ND.dtype)
        of_prefix, of_patches = added_1ND[:, : -self.num_patches], added_1ND[:, -self.num_patches :]
        return jnp.concatenate([of_prefix, none_1ND, of_patches], axis=1)


@functools.cache  # each layer asks for it, and tracing takes time
def _trace_logits(positions: PositionEmbedding) -> Any:
    """The shape of the logits of two images."""
    tokens = positions.num_prefix + positions.num_patches
    shape = 2, positions.num_heads, tokens, positions.width // positions.num_heads

    def logits(key: jax.Array, q_BHNK: jax.Array) -> jax.Array:
        tables = positions.init(key) if positions.collection else None
        return positions.build(tables).logits(q_BHNK)

    return jax.eval_shape(logits, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))


class NoPositions(PositionEmbedding):
    """No positions: the order of the patches has no effect."""

    collection = ""
    acts_on = "nothing"

    def build(self, tables: Any = None) -> None:
        return None


class Learned1D(PositionEmbedding):
    """A vector for each token: a table (1, P + S, D)."""

    takes_pictures = True

    def init(self, key: jax.Array) -> Any:
        return _INIT(key, (1, self.num_placed + self.num_patches, self.width))

    def build(self, tables: Any = None) -> Any:
        return self.with_prefix(tables)

    def resampled(self, tables: Any, grid: tuple[int, int], resize: Resize) -> Any:
        return resize.grid(tables, self.grid, grid)

    def of_pictures(self, tables: Any, pictures: Pictures, filter: str) -> jax.Array:
        return resample(tables[0, self.num_placed :], self.grid, pictures, filter)


class Sincos1D(Learned1D):
    """Fixed sines and cosines of a token's number, as a constant (1, P + S, D)."""

    collection = CONSTANTS

    def init(self, key: jax.Array) -> Any:
        return jnp.asarray(sincos_1d(self.num_placed + self.num_patches, self.width))[None]


class Sincos2D(PositionEmbedding):
    """Fixed sines and cosines of column and row; see `sincos_2d`."""

    collection = ""
    takes_pictures = True

    @classmethod
    def find_faults(cls, model: Any) -> list[str]:
        fault = f"pos_embed='sincos_2d': width={model.width} must be a multiple of 4, at least 8"
        own = [fault] if model.width % 4 or model.width < 8 else []
        return super().find_faults(model) + own

    def build(self, tables: Any = None) -> Any:
        return self.with_prefix(jnp.asarray(sincos_2d(self.grid, self.width))[None])

    def of_pictures(self, tables: Any, pictures: Pictures, filter: str) -> jax.Array:
        return sincos_of_pictures(pictures, self.width)


class Learned2D(PositionEmbedding):
    """A vector of D / 2 for each column and each row, and whole vectors of prefix tokens.

    Tables: "rows" (1, rows, D / 2), "columns" (1, columns, D / 2), "prefix" (1, P, D).
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), appendix D.4.
    """

    @classmethod
    def find_faults(cls, model: Any) -> list[str]:
        fault = f"pos_embed='learned_2d': width={model.width} must be a multiple of 2"
        return super().find_faults(model) + ([fault] if model.width % 2 else [])

    def init(self, key: jax.Array) -> Any:
        (rows, columns), half = self.grid, self.width // 2
        shapes = {"rows": (1, rows, half), "columns": (1, columns, half)}
        if self.num_placed:
            shapes["prefix"] = (1, self.num_placed, self.width)
        return _init_tables(key, shapes)

    def build(self, tables: Any = None) -> Any:
        (rows, columns), half = self.grid, self.width // 2
        x_1YXD = jnp.broadcast_to(tables["columns"][:, None], (1, rows, columns, half))
        y_1YXD = jnp.broadcast_to(tables["rows"][:, :, None], (1, rows, columns, half))
        added_1ND = jnp.concatenate([x_1YXD, y_1YXD], axis=3).reshape(1, -1, self.width)
        if "prefix" in tables:
            added_1ND = jnp.concatenate([tables["prefix"], added_1ND], axis=1)
        return self.with_prefix(added_1ND)

    def resampled(self, tables: Any, grid: tuple[int, int], resize: Resize) -> Any:
        sides = zip(("rows", "columns"), self.grid, grid, strict=True)
        return tables | {name: resize.axis(tables[name], old, new) for name, old, new in sides}


class RelativePositions(PositionEmbedding):
    """A vector for each offset between two patches, added to the logits of attention.

    Its tables are the fields of `Relative`.
    """

    acts_on = "logits"

    def init(self, key: jax.Array) -> Any:
        prefix, patches, width = self.num_placed, self.num_patches, self.width // self.num_heads
        shapes: dict[str, tuple[int, ...]] = {"offsets": (2 * patches - 1, width)}
        if prefix:
            shapes |= dict.fromkeys(("to_patches", "from_patches"), (prefix, patches, width))
            shapes["prefix"] = (prefix, prefix, width)
        return _init_tables(key, shapes)

    def build(self, tables: Any = None) -> Any:
        return Relative(block=max(self.grid), **tables)

    def resampled(self, tables: Any, grid: tuple[int, int], resize: Resize) -> Any:
        by_patch = [name for name in ("to_patches", "from_patches") if name in tables]
        new = {name: resize.grid(tables[name], self.grid, grid) for name in by_patch}
        return tables | new | {"offsets": resize.offsets(tables["offsets"], self.grid, grid)}


class PositionChoice:
    """What the fields `pos_embed` and `pos_embed_at` of a model choose."""

    pos_embed: str
    pos_embed_at: str | None

    @property
    def needs_grid(self) -> bool:
        """Whether layers need all patches of an image, in rows and columns."""
        return False

    @classmethod
    def pos_embeds(cls) -> tuple[str, ...]:
        """The names in POSITIONS that `pos_embed` may have."""
        return tuple(name for name in POSITIONS if POSITIONS.find(name).collection != CONSTANTS)

    @property
    def position_class(self) -> type[PositionEmbedding]:
        """The class called `pos_embed`; an unknown name is a fault of the model."""
        return POSITIONS.find(self.pos_embed) if self.pos_embed in POSITIONS else NoPositions

    @property
    def positions_at(self) -> str:
        """Where positions are added, one of PLACES; layers share those that have no tables."""
        at = self.pos_embed_at or ("layers" if self.position_class.acts_on == "logits" else "stem")
        has_own = self.position_class.collection == "params"
        return "layers_shared" if at == "layers" and not has_own else at

    @property
    def has_positions_in_layers(self) -> bool:
        """Whether they act on logits, or each layer has tables of its own."""
        return self.position_class.acts_on == "logits" or self.positions_at == "layers"

    @property
    def why_no_positions(self) -> str | None:
        return _NO_VECTORS.get(self.position_class.acts_on)

    @nn.nowrap
    def find_keep_faults(self) -> list[str]:
        """The fields for which `encode` needs all patches of an image."""
        if self.needs_grid:
            return [f"the layers of a {type(self).__name__} need all patches of an image"]
        if self.has_positions_in_layers:
            return [
                f"pos_embed={self.pos_embed!r} with pos_embed_at={self.pos_embed_at!r}: such "
                "layers need all patches of an image; choose stem or layers_shared, and another "
                "kind than relative"
            ]
        return []

    @nn.nowrap
    def find_position_faults(self) -> list[str]:
        """The faults of this choice, which also depend on other fields of the model."""
        if self.pos_embed not in self.pos_embeds():
            return [f"pos_embed={self.pos_embed!r}: {nearest(self.pos_embed, self.pos_embeds())}"]
        return self.position_class.find_faults(self)


def _init_tables(key: jax.Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return {name: _INIT(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


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


def sincos_of_pictures(pictures: Pictures, width: int, span: int | None = None) -> jax.Array:
    """`sincos_2d` of the grid of each picture, (B, N, width)."""
    row_BN, column_BN = pictures.places
    along = sincos_2d((1, pictures.shape[1]), width, span)[:, : width // 2]
    return jnp.concatenate([look_up(along, column_BN), look_up(along, row_BN)], axis=2)


def sincos_1d(num: int, width: int) -> np.ndarray:
    """Fixed sine-cosine embedding of the numbers 0 to num - 1.

    Entry 2 i is sin(n w_i) and entry 2 i + 1 cos(n w_i), w_i = 10000^(-2 i / width).

    Shapes: -> (num, width), float32.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    pairs = np.arange(width) // 2
    angles = np.arange(num)[:, None] * 10000.0 ** -(2 * pairs / width)
    return np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles)).astype(np.float32)
