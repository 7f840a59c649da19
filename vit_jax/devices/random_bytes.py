"""Random bytes, for dropout, that each device draws for its own share of an array."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.devices.mesh import BATCH_AXES


def draw_bytes_by_device(
    key: jax.Array, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh
) -> jax.Array:
    """`dropout.DrawBytes` by XLA's own generator ("rbg"), the fastest on accelerators.

    Each device draws the bytes of its share of `shape` by a key of its own, because XLA's
    partitioner would draw all devices' bytes on each. So the bytes depend on the mesh, and on the
    version of XLA. Where each device computes its own rows already (`experiment.exchange`), `key`
    and `shape` are its own.
    """

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        halves = [jax.random.key_data(key)[:2]] * 2
        rbg_key = jax.random.wrap_key_data(jnp.concatenate(halves), impl="rbg")
        return jax.random.bits(rbg_key, shape, jnp.uint8)

    if jax.sharding.get_abstract_mesh().manual_axes:
        return draw(key, shape)
    spec = [
        BATCH_AXES if axis == "batch" else axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    split = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES or axis in spec)
    share = NamedSharding(mesh, P(*spec)).shard_shape(shape)

    def draw_share(key_data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return draw(jax.random.fold_in(key, jax.lax.axis_index(split)), share)

    drawn = jax.shard_map(draw_share, mesh=mesh, in_specs=P(), out_specs=P(*spec), check_vma=False)
    return drawn(jax.random.key_data(key)[:2])
