"""Detects copies of an array that are no longer equal.

Every device computes replicated values for itself, and nothing compares them: after a bit flip in
the memory of one device its copy silently diverges.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import tree
from vit_jax.base.errors import RaisedByAll
from vit_jax.checkpoints.checksums import checksum

_NAMED_AT_MOST = 10


class DivergedError(RuntimeError, RaisedByAll):
    """Devices hold different copies of an array, or compute different ones from one input."""


def check_replicas(state: tree.PyTree, mesh: Mesh) -> None:
    """Compare the copies of every shard of `state` over all devices; all processes call it.

    Only one checksum per leaf and device is communicated.

    Args:
      state: a pytree of arrays, each with a NamedSharding over `mesh`.
      mesh: the mesh of `jax.set_mesh`.

    Raises:
      DivergedError: on every process; names the leaves, the devices and their processes.
    """
    leaves = tree.flatten_names(state)
    specs = tuple(leaf.sharding.spec for leaf in leaves.values())
    if mesh.size == 1:
        return
    checksums = np.asarray(_make_checksums(mesh, specs)(list(leaves.values())))
    by_place = checksums.reshape(*mesh.devices.shape, len(leaves))
    differing = []
    for i in _differing(mesh, specs, by_place):
        (name, leaf), values = list(leaves.items())[i], by_place[..., i].flat
        by_device = dict(zip(mesh.devices.flat, values, strict=True))
        differing += _describe(name, leaf.sharding, leaf.shape, by_device)
    if differing:
        raise DivergedError(
            f"copies of {len(differing)} arrays or their shards differ between devices; one of "
            "these devices has computed or stored wrong bits, and should be taken out of service. "
            "The last save is good: the same command goes on from it; to find the device, add "
            "--config.job.replay_every='1 steps'. The copies:"
            + "".join(f"\n  {each}" for each in differing[:_NAMED_AT_MOST])
        )


def _differing(mesh: Mesh, specs: Sequence[P], checksums: np.ndarray) -> list[int]:
    """Indices of the leaves whose copies differ; `checksums` has shape (*mesh, leaves)."""
    found = []
    for spec in set(specs):
        rows = np.array([i for i, other in enumerate(specs) if other == spec])
        of_spec = checksums[..., rows]
        split = {axis for e in spec for axis in (e if isinstance(e, tuple) else (e,))}
        # Numbers of the mesh axes along which an array with `spec` is replicated.
        axes = tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in split)
        differ = of_spec.max(axis=axes) != of_spec.min(axis=axes)
        found += rows[differ.reshape(-1, len(rows)).any(axis=0)].tolist()
    return sorted(found)


@functools.cache
def _make_checksums(mesh: Mesh, specs: tuple[P, ...]) -> Callable:
    """Make leaves sharded by `specs` -> uint32 (devices of the mesh, leaves), on every device."""

    def own_checksums(leaves: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(leaf) for leaf in leaves])[None]

    by_device = jax.shard_map(
        own_checksums,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(by_device, out_shardings=NamedSharding(mesh, P()))


def _describe(
    name: str,
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    by_device: Mapping[jax.Device, np.uint32],
) -> list[str]:
    """One text per shard whose copies differ: the groups of devices with equal copies."""
    by_place: dict[str, dict[int, list[jax.Device]]] = {}
    for device, place in sharding.devices_indices_map(shape).items():
        by_value = by_place.setdefault(str(place), {})
        by_value.setdefault(int(by_device[device]), []).append(device)
    return [
        f"{name}: {' / '.join(map(name_devices, sorted(by_value.values(), key=len)))}"
        for by_value in by_place.values()
        if len(by_value) > 1
    ]


def name_devices(devices: list[jax.Device]) -> str:
    """Devices with equal copies: by name if few, since a minority is likely wrong; else a count."""
    if len(devices) > 8:
        return f"{len(devices)} others"
    return ", ".join(f"device {d.id} of process {d.process_index}" for d in devices)
