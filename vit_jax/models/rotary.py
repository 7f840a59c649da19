"""Rotary positions: queries and keys are turned by angles that grow with the place of their token.

Axes: B images, N tokens, H heads, K width of a head.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import nowrap

from vit_jax.base.pictures import Pictures
from vit_jax.config import key
from vit_jax.models.fields import DTYPES, POSITIVE

KINDS = ("normalised", "indices")


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class RotaryFields:
    """The fields of a model's rotary positions.

    Half of a head's angles belong to the row of a token, half to its column: coordinate / period,
    with the periods base^(4 j / K) for j = 0, ..., K / 4 - 1. The coordinates are `normalised`:
    centres of patches from -1 to 1 along each side, times 2 pi; or `indices`: the number of the
    row and of the column, from 0. Tokens before the patches are not turned.

    Sources: Su et al. 2021 (arXiv:2104.09864), section 3.2.2; normalised, and the changes of
      coordinates in training: Simeoni et al. 2025 (arXiv:2508.10104), section 3.2; indices and
      their side: Fang et al. 2023 (arXiv:2303.11331).
    """

    rotary: str | None = key(None, "rotary positions (RoPE), by these coordinates", choices=KINDS)
    rotary_base: float = key(100.0, "ratio of longest and shortest period", within="(1, inf)")
    rotary_side: float | None = key(
        None, "each side of the grid counts so many indices; None: its patches", within=POSITIVE
    )
    rotary_registers: float | None = key(
        None, "base for registers on a square grid of their own; None: they are not turned",
        within="(1, inf)",
    )  # fmt: skip
    rotary_dtype: str = key("float32", "to which periods are rounded", choices=DTYPES)
    rotary_shift: float | None = key(
        None, "training adds up to so much to all coordinates of a side", within=POSITIVE
    )
    rotary_jitter: float | None = key(
        None, "training multiplies each side by a factor up to this one", within="[1, inf)"
    )
    rotary_rescale: float | None = key(
        None, "training multiplies both sides by a factor up to this one", within="[1, inf)"
    )

    @property
    def rotary_is_random(self) -> bool:
        """Whether training changes the coordinates, for all images of a step alike."""
        return any((self.rotary_shift, self.rotary_jitter, self.rotary_rescale))

    @nowrap
    def find_rotary_faults(self, head_width: int, registers: int) -> list[str]:
        """The faults of these fields for heads of that width and so many registers."""
        if self.rotary is None:
            set_fields = [
                f"{f.name}={getattr(self, f.name)!r}: without rotary positions it does nothing; "
                f"set rotary, to {' or '.join(KINDS)}"
                for f in dataclasses.fields(RotaryFields)
                if f.name != "rotary" and getattr(self, f.name) != f.default
            ]
            return set_fields
        faults = []
        if head_width % 4:
            faults.append(
                f"rotary={self.rotary!r}: heads are {head_width} wide, which 4 does not divide; "
                "choose another num_heads"
            )
        if self.rotary_side is not None and self.rotary != "indices":
            faults.append(
                f"rotary_side={self.rotary_side!r}: rotary={self.rotary!r} counts no indices; "
                "leave it at None"
            )
        if self.rotary_registers is not None and (
            not registers or math.isqrt(registers) ** 2 != registers
        ):
            faults.append(
                f"rotary_registers={self.rotary_registers!r}: registers={registers} form no square "
                "grid; choose 4, 9 or 16 registers"
            )
        return faults

    @nowrap
    def make_turns(
        self, of: tuple[int, int] | Pictures, prefix: int, registers: int, head_width: int,
        train: bool,
    ) -> jax.Array | None:  # fmt: skip
        """The turns of a grid (rows, columns), or of pictures; None without rotary positions."""
        if self.rotary is None:
            return None
        module: Any = self
        rng = module.make_rng("dropout") if train and self.rotary_is_random else None
        turns: Any = self.turns_of_pictures if isinstance(of, Pictures) else self.turns
        return turns(of, prefix, registers, head_width, rng)

    @nowrap
    def turns(
        self,
        grid: tuple[int, int],
        prefix: int,
        registers: int,
        head_width: int,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """The turns of an image's tokens, for `turn`; float32.

        Args:
          grid: rows and columns of patches.
          prefix: number of tokens before the patches; the registers are the last ones.
          head_width: K.
          rng: the random key of the changes in training; None: the coordinates stay as they are.

        Shapes: -> (1, prefix + rows * columns, K): cosines of the K / 2 angles, then sines.
        """
        sides = self._coordinates(grid)
        if rng is not None and self.rotary_is_random:
            sides = self._changed(sides, rng)
        angles = [self._angles(sides, self.rotary_base, head_width)]
        angles = [*self._of_registers(registers, head_width), *angles]
        angles_NA = jnp.concatenate(angles)
        still = prefix + math.prod(grid) - len(angles_NA)
        angles_NA = jnp.pad(angles_NA, ((still, 0), (0, 0)))
        return jnp.concatenate([jnp.cos(angles_NA), jnp.sin(angles_NA)], axis=1)[None]

    @nowrap
    def turns_of_pictures(
        self, pictures: Pictures, prefix: int, registers: int, head_width: int,
        rng: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """`turns` for pictures of different grids: (B, prefix + N, K)."""
        sides: list[Any] = []
        for place_BN, side_B1 in zip(pictures.places, pictures.grid.T[..., None], strict=True):
            if self.rotary == "normalised":
                sides.append(4 * np.pi * (place_BN + 0.5) / side_B1 - 2 * np.pi)
            else:
                sides.append(place_BN * (self.rotary_side / side_B1 if self.rotary_side else 1.0))
        if rng is not None and self.rotary_is_random:
            sides = [*self._changed(sides, rng)]
        periods = self.periods(self.rotary_base, head_width)
        angles_BNA = jnp.concatenate(
            [side[..., None] / periods[None, None] for side in sides], axis=2
        )
        rows = len(angles_BNA)
        own = [jnp.broadcast_to(angles_RA, (rows, *angles_RA.shape))
               for angles_RA in self._of_registers(registers, head_width)]  # fmt: skip
        angles_BNA = jnp.concatenate([*own, angles_BNA], axis=1)
        still = prefix + pictures.patches.shape[1] - angles_BNA.shape[1]
        angles_BNA = jnp.pad(angles_BNA, ((0, 0), (still, 0), (0, 0)))
        return jnp.concatenate([jnp.cos(angles_BNA), jnp.sin(angles_BNA)], axis=2)

    @nowrap
    def _of_registers(self, registers: int, head_width: int) -> list[jax.Array]:
        """The angles of the registers, (registers, K / 2); [] if they are not turned."""
        if self.rotary_registers is None:
            return []
        own = [np.arange(math.isqrt(registers), dtype=np.float32)] * 2
        return [self._angles(own, self.rotary_registers, head_width)]

    @nowrap
    def _coordinates(self, grid: tuple[int, int]) -> Sequence[jax.typing.ArrayLike]:
        """The coordinates of the rows, and of the columns."""
        if self.rotary == "normalised":
            places = [(np.arange(side) + 0.5) / side for side in grid]
            return [(4 * np.pi * p - 2 * np.pi).astype(np.float32) for p in places]
        scales = [1 if self.rotary_side is None else self.rotary_side / side for side in grid]
        return [
            (np.arange(s) * scale).astype(np.float32) for s, scale in zip(grid, scales, strict=True)
        ]

    @nowrap
    def _changed(
        self, sides: Sequence[jax.typing.ArrayLike], rng: jax.Array
    ) -> Sequence[jax.typing.ArrayLike]:
        """The coordinates with a random shift and jitter of each side, and a rescale of both."""
        unit = 2 * np.pi if self.rotary == "normalised" else 1.0
        shift, jitter, rescale = (
            jax.random.uniform(k, (2,), minval=-1.0) for k in jax.random.split(rng, 3)
        )
        factors = jnp.exp(
            jitter * math.log(self.rotary_jitter or 1)
            + rescale[0] * math.log(self.rotary_rescale or 1)
        )
        shifts = shift * unit * (self.rotary_shift or 0)
        return [(side + shifts[i]) * factors[i] for i, side in enumerate(sides)]

    @nowrap
    def periods(self, base: float, head_width: int) -> jax.Array:
        """The periods of the angles of a row, and of a column; (K / 4,) float32."""
        exponents = 4 * np.arange(head_width // 4) / head_width
        return jnp.asarray(base**exponents, self.rotary_dtype).astype(jnp.float32)

    @nowrap
    def _angles(
        self, sides: Sequence[jax.typing.ArrayLike], base: float, head_width: int
    ) -> jax.Array:
        """The angles of a grid's tokens in raster order, (tokens, K / 2): of rows, then columns."""
        periods = self.periods(base, head_width)
        of_rows, of_columns = (jnp.asarray(side)[:, None] / periods[None] for side in sides)
        shape = (len(of_rows), len(of_columns), len(periods))
        y = jnp.broadcast_to(of_rows[:, None], shape)
        x = jnp.broadcast_to(of_columns[None], shape)
        return jnp.concatenate([y, x], axis=2).reshape(-1, head_width // 2)


def turn(x_BNHK: jax.Array, turns_BNK: jax.Array) -> jax.Array:
    """Queries or keys turned by their tokens' angles: entries j and j + K / 2 by angle j.

    Computes in float32 and keeps the dtype of `x_BNHK`; `turns_BNK` is from `RotaryFields.turns`
    and may be of one image for all.
    """
    cos, sin = jnp.split(turns_BNK[:, :, None], 2, axis=3)
    first, second = jnp.split(x_BNHK.astype(jnp.float32), 2, axis=3)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=3).astype(x_BNHK.dtype)
