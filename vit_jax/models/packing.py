"""Rows of tokens that hold several pictures, and attention within each picture.

All rows of a batch have the same parts: some pictures of n tokens each, padding included, then some
of another number, and so on. Layers that act on single tokens see whole rows. Attention is
block-diagonal: each part computes its own pictures, and no product of two pictures is made.

Axes: B pictures, R rows of K = B / R pictures and T tokens each, m pictures of a part in a row, n
tokens of one.
Source: Dehghani et al. 2023 (arXiv:2307.06304), section 2.1.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Parts = tuple[tuple[int, int], ...]  # (m, n) of each part, in the order of a row


def cut_rows(x_RT: jax.Array, parts: Parts) -> list[jax.Array]:
    """The pictures of each part, (R m, n, ...), of rows (R, T, ...); the rows may be longer."""
    found, begin = [], 0
    for number, tokens in parts:
        own = x_RT[:, begin : (begin := begin + number * tokens)]
        found.append(own.reshape(-1, tokens, *x_RT.shape[2:]))
    return found


def join_rows(pictures: Sequence[jax.Array], rows: int) -> jax.Array:
    """Rows (R, T, ...) of the pictures (R m, n, ...) of each part."""
    return jnp.concatenate([x.reshape(rows, -1, *x.shape[2:]) for x in pictures], axis=1)


def cut_pictures(x_B: jax.Array, parts: Parts) -> list[jax.Array]:
    """The values of each part's pictures, (R m, ...), of (B, ...) in the order of the rows."""
    singles = tuple((number, 1) for number, _ in parts)
    rows = x_B.reshape(-1, sum(number for number, _ in parts), *x_B.shape[1:])
    return [x[:, 0] for x in cut_rows(rows, singles)]


def join_pictures(values: Sequence[jax.Array], rows: int) -> jax.Array:
    """The inverse of `cut_pictures`: (B, ...)."""
    joined = join_rows([x[:, None] for x in values], rows)
    return joined.reshape(-1, *joined.shape[2:])


def spread(x_B1: jax.Array, parts: Parts, total: int) -> jax.Array:
    """A picture's value, (B, 1), for each of its tokens: (R, total, 1), 0 behind the parts."""
    repeated = [
        jnp.broadcast_to(x_M1[:, None], (len(x_M1), tokens, 1))
        for (_, tokens), x_M1 in zip(parts, cut_pictures(x_B1, parts), strict=True)
    ]
    rows = len(x_B1) // sum(number for number, _ in parts)
    return pad_tokens(join_rows(repeated, rows), total)


def pad_tokens(x_BN: jax.Array, total: int) -> jax.Array:
    """x (B, N, ...) with zeros up to `total` tokens."""
    return jnp.pad(x_BN, ((0, 0), (0, total - x_BN.shape[1]), *[(0, 0)] * (x_BN.ndim - 2)))


def attend_apart(
    attend: Callable[..., jax.Array],
    parts: Parts,
    arrays: Sequence[jax.Array | None],
    num_keys: int | jax.Array | None,
) -> jax.Array:
    """Attention within each picture of the rows (R, T, ...); without `parts` within each row.

    Args:
      attend: attend(*arrays, num_keys) -> (B, N, ...), of pictures with N tokens, padding included.
      arrays: queries, keys, values, and what else belongs to tokens, each (R, T, ...) or None.
      num_keys: of `attend`; with `parts` int32 (B,), how many first tokens of a picture count.
    """
    if not parts:
        return attend(*arrays, num_keys)
    assert arrays[0] is not None
    assert isinstance(num_keys, jax.Array)
    cut = [[None] * len(parts) if x is None else cut_rows(x, parts) for x in arrays]
    of_parts = zip(cut_pictures(num_keys, parts), *cut, strict=True)
    outs = [attend(*own, keys_B) for keys_B, *own in of_parts]
    rows, total = arrays[0].shape[:2]
    return pad_tokens(join_rows(outs, rows), total)
