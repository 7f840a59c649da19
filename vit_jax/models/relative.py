"""Relative positions, which add to the logits of attention.

Axes: B images, H heads, N tokens, S patches, P prefix tokens (before the patches), K width of a
head.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct


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

    def logits(self, q_BHNK: jax.Array) -> jax.Array:
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


def _pad(
    x_BHNM: jax.Array, above: int = 0, below: int = 0, left: int = 0, right: int = 0
) -> jax.Array:
    return jnp.pad(x_BHNM, ((0, 0), (0, 0), (above, below), (left, right)))


def _logits_by_offset(q_BHSK: jax.Array, offsets_OK: jax.Array, block: int) -> jax.Array:
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
