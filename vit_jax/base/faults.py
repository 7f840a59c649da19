"""Faults on purpose, by `job.inject`, to test what must find them.

    flip:weight:device=3:step=12      before step 12 one bit of a parameter flips on device 3
    flip:activation:device=3:step=12  in a replay of step 12 one bit of a layer's output, in the
    flip:gradient:device=3:step=12    first of the two computations, or one bit of a gradient

A flipped bit is the highest of the mantissa of an array's first number.
"""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.base import tree
from vit_jax.base.errors import Faults, InputError

_FLIP = re.compile(r"flip:(?P<what>weight|activation|gradient):device=(\d+):step=(\d+)")
_WORDS = {2: jnp.uint16, 4: jnp.uint32}  # by the bytes of a float


class Flip(NamedTuple):
    """A flipped bit: of a weight, an activation or a gradient, on a device, at a step.

    device: its place in the mesh, from 0.
    """

    what: str
    device: int
    step: int


def parse_fault(text: str | None) -> Flip | None:
    """The fault that `job.inject` asks for; None: none. Raises InputError if it is unknown."""
    if text is None:
        return None
    match = _FLIP.fullmatch(text)
    if match is None:
        raise InputError(f"job.inject={text!r}: no such fault; write "
                         "flip:weight:device=3:step=12, or activation or gradient")  # fmt: skip
    return Flip(match["what"], int(match[2]), int(match[3]))


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check `job.inject`."""
    faults.check(parse_fault, config.job.inject)


def flip_bit(x: jax.Array, where: jax.Array) -> jax.Array:
    """`x`, of a float dtype, with the bit flipped if `where`; gradients pass as if it were not."""
    word, first = _WORDS[x.dtype.itemsize], (0,) * x.ndim
    mask = jnp.asarray(where, word) << (8 * x.dtype.itemsize - 10)
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x), word)
    bits = bits.at[first].set(bits[first] ^ mask)
    flipped = jax.lax.bitcast_convert_type(bits, x.dtype)
    return x + jax.lax.stop_gradient(flipped - x)  # exact: one is at most twice the other


def flip_weight(params: tree.Params, device: jax.Device) -> tree.Params:
    """`params` with the bit flipped in the copy of the largest parameter on one device."""
    leaves = tree.flatten_names(params)
    name = max(leaves, key=lambda name: leaves[name].size)
    leaf = leaves[name]
    shards = [shard.data for shard in leaf.addressable_shards]
    for i, shard in enumerate(shards):
        if {device} == shard.devices():
            wrong = np.array(shard)
            wrong.reshape(-1).view(np.uint32)[0] ^= 1 << 22
            shards[i] = jax.device_put(wrong, shard.sharding)
    leaves[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    return tree.unflatten_names(leaves)


def flip_activation(where: jax.Array) -> Any:
    """A context in which the output of the first layer of a Linen model has the bit flipped."""
    chosen: list[tuple[str, ...]] = []

    def intercept(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if not isinstance(out, jax.Array):
            return out
        chosen[:] = chosen or [context.module.path]  # the same in every trace
        return flip_bit(out, where) if chosen == [context.module.path] else out

    return nn.intercept_methods(intercept)
