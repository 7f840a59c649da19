"""Checksums of arrays by their bits, independent of their sharding."""

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import tree


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit affects half of the output bits."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def checksum(leaf: jax.Array) -> jax.Array:
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    # A 64-bit number becomes two words, along a new axis.
    bits = jax.lax.bitcast_convert_type(leaf, word).astype(jnp.uint32)
    for axis in range(bits.ndim):  # axis by axis: a flat index would overflow in large leaves
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        bits = _mix(bits ^ _mix(index + jnp.uint32(axis + 1)))
    return bits.sum(dtype=jnp.uint32)


_checksum = jax.jit(checksum)


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(checksum, leaves)


def checksums(state: tree.PyTree) -> dict[str, int]:
    """{leaf name: 32-bit checksum of its bits and their positions}, the same on any mesh.

    It is a sum over elements, so it can be computed shard by shard; a change of any single element
    changes it.

    On one device each shape is a program of its own, which compiles faster than one program for all
    leaves. On several, all leaves are one program: exchanges of many programs at once can block
    each other on CPUs.
    """
    leaves = tree.flatten_names(state)
    on_devices = [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    if all(len(leaf.devices()) == 1 for leaf in on_devices):
        found = {name: _checksum(leaf) for name, leaf in leaves.items()}
    else:
        found = _checksums(leaves)
    return {name: int(value) for name, value in jax.device_get(found).items()}


def hash_params(params: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the names, shapes and float32 values of all parameters, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = params[name]
        digest.update(f"{name} {array.shape}\n".encode())
        rows = array.shape[0] if len(array.shape) > 2 else 1  # a scanned leaf is large
        for part in (array[i : i + 1] if rows > 1 else array for i in range(rows)):
            digest.update(np.ascontiguousarray(part, np.float32).tobytes())
    return digest.hexdigest()
