"""Shared parts of the kernels that process tokens in blocks of rows, with parameters in VMEM.

Axes: R rows (the tokens of all images), D width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # of a vector register
_FEWEST_ROWS, MOST_ROWS = 256, 512  # of a block; with fewer XLA's products are faster
_ROWS_MULTIPLE = 32  # rows of a tile of bytes
_SHARE_OF_VMEM = 0.9  # most of VMEM that a kernel may use


class Blocks(NamedTuple):
    """How a kernel goes through arrays of so many rows in all: blocks of rows, one a program."""

    rows: int
    block_rows: int
    vmem_bytes: int

    @classmethod
    def fitting(cls, rows: int, fixed: int, of_row: int, vmem_bytes: int) -> "Blocks | None":
        """The largest that fit with `fixed` bytes and `of_row` bytes a row; None if none fit."""
        for block in range(MOST_ROWS, _FEWEST_ROWS - 1, -_ROWS_MULTIPLE):
            if rows and rows % block == 0 and fixed + block * of_row <= _SHARE_OF_VMEM * vmem_bytes:
                return cls(rows, block, vmem_bytes)
        return None

    def of(self, columns: int, piece: int = 0) -> pl.BlockSpec:
        """The blocks of so many columns, of the `piece`-th group of these columns."""
        return pl.BlockSpec((self.block_rows, columns), lambda i: (i, piece))

    def options(self) -> dict[str, Any]:
        """Arguments of `pl.pallas_call`; programs run one after the other, to sum gradients."""
        params = pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=int(_SHARE_OF_VMEM * self.vmem_bytes),
        )
        return {"grid": (self.rows // self.block_rows,), "compiler_params": params}


def whole(*shape: int, axis: int | None = None, piece: int = 0, pieces: int = 1) -> pl.BlockSpec:
    """The block of an array that stays in VMEM, or of one of its pieces along `axis`."""
    size = tuple(n // pieces if i == axis else n for i, n in enumerate(shape))
    place = tuple(piece if i == axis else 0 for i in range(len(shape)))
    return pl.BlockSpec(size, lambda i: place, pipeline_mode=pl.Buffered(1))


def whole_sum(*shape: int) -> jax.ShapeDtypeStruct:
    """The output (whole) of a kernel that sums it in float32 over all rows."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dot(x: jax.Array, y: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices over these axes, in float32."""
    over = (axes[:1], axes[1:])
    return lax.dot_general(x, y, (over, ((), ())), preferred_element_type=jnp.float32)


def at_first(*sums: jax.Ref) -> None:
    """Before a kernel's first block, set these references to 0."""

    @pl.when(pl.program_id(0) == 0)
    def start() -> None:
        for each in sums:
            each[...] = jnp.zeros_like(each)


def at_last(sums: Sequence[jax.Ref], outputs: Sequence[jax.Ref]) -> None:
    """After a kernel's last block, write these sums to its outputs, in their dtype."""

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def end() -> None:
        for each, output in zip(sums, outputs, strict=True):
            output[...] = each[...].astype(output.dtype)


class Normed(NamedTuple):
    """Rows h = (x - mean) / deviation, float32, and 1 / deviation; an RMSNorm has no mean.

    Source: Ba et al. 2016 (arXiv:1607.06450).
    """

    h_RD: jax.Array
    factor_R1: jax.Array
    has_mean: bool

    @classmethod
    def of(cls, x: jax.Ref, norm: str, eps: float) -> "Normed":
        """Of the rows of a reference; `norm` is "layer" or "rms"."""
        x_RD = x[...].astype(jnp.float32)
        square_R1 = (x_RD * x_RD).mean(1, keepdims=True)
        if norm == "layer":
            mean_R1 = x_RD.mean(1, keepdims=True)
            x_RD = x_RD - mean_R1
            square_R1 = jnp.maximum(square_R1 - mean_R1 * mean_R1, 0)
        factor_R1 = lax.rsqrt(square_R1 + eps)
        return cls(x_RD * factor_R1, factor_R1, norm == "layer")

    def gradient(self, d_RD: jax.Array) -> jax.Array:
        """The gradient of x, given d of h: (d - mean(d) - h mean(d h)) / deviation."""
        mean_R1 = d_RD.mean(1, keepdims=True) if self.has_mean else 0
        along_R1 = (d_RD * self.h_RD).mean(1, keepdims=True)
        return (d_RD - mean_R1 - self.h_RD * along_R1) * self.factor_R1
