"""Random keys of a cheap hash for tests, whose models take longer to initialise than to run.

Four fifths of what XLA compiles to initialise a small ViT is threefry, JAX's generator. Here a draw
takes ten operations in place of about a hundred. As with threefry, it is a function of the key and
the position, also under `vmap`, and whatever the layout over devices. Processes that tests start
use threefry.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl


def use_cheap_keys() -> None:
    """Let `jax.random.key` make such keys unless it is given another implementation."""
    jax.random.key = functools.partial(jax.random.key, impl=_CHEAP)


def _mix(x):
    """Spread every bit over 32: the finalizer of a hash (github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _hash(key, x):
    return _mix(_mix(x ^ key[0]) + key[1])


def _seed(seed):
    low = jnp.asarray(seed).astype(jnp.uint32)
    return _mix(jnp.stack([low, ~low]))


def _split(key, shape):
    places = jax.lax.iota(np.uint32, 2 * math.prod(shape)).reshape(*shape, 2)
    return _hash(key, ~places)


def _fold_in(key, data):
    return _hash(key, _mix(jnp.stack([data, ~data])))


def _random_bits(key, bit_width, shape):
    bits = _hash(key, jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape))
    return bits if bit_width == 32 else (bits >> (32 - bit_width)).astype(f"uint{bit_width}")


_CHEAP = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="cheap",
    tag="cheap",
)
