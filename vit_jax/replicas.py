"""Finds copies of one array that are no longer equal.

What is replicated every device computes for itself, and nothing compares it: a bit that flips in
the memory of one stays flipped there, and its replica goes its own way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.checksums import checksum

_NAMED_AT_MOST = 10


class DivergedError(RuntimeError):
    """Copies of an array differ between devices."""


def check_replicas(state: Any, mesh: Mesh) -> None:
    """Compares the copies of every shard of `state`, over all devices; all processes call it.

    The only bytes that travel are one checksum a leaf and device.

    Args:
      state: a pytree of arrays, each with a NamedSharding over `mesh`.
      mesh: of `jax.set_mesh`.

    Raises:
      DivergedError: on every process, naming leaves, devices and their processes.
    """
    leaves = tree.flatten_names(state)
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}
    if all(_num_copies(shardings[name], leaf.shape) == 1 for name, leaf in leaves.items()):
        return
    specs = tuple(sharding.spec for sharding in shardings.values())
    checksums_DL = np.asarray(_make_checksums(mesh, specs)(list(leaves.values())))
    differing = []
    for name, of_device_D in zip(leaves, checksums_DL.T, strict=True):
        by_device = dict(zip(mesh.devices.flat, of_device_D, strict=True))
        differing += _describe(name, shardings[name], leaves[name].shape, by_device)
    if differing:
        more = len(differing) - _NAMED_AT_MOST
        raise DivergedError(
            "copies of the state differ between devices; one of these has computed or kept wrong "
            "bits, and should be taken out of service:\n  "
            + "\n  ".join(differing[:_NAMED_AT_MOST])
            + (f"\n  and {more} more" if more > 0 else "")
        )


def _num_copies(sharding: NamedSharding, shape: tuple[int, ...]) -> int:
    places = sharding.devices_indices_map(shape).values()
    return len(places) // len({str(place) for place in places})


@functools.cache
def _make_checksums(mesh: Mesh, specs: tuple[P, ...]) -> Callable:
    """Leaves laid out as `specs` say -> uint32 (devices of the mesh, leaves), on every device."""

    def own_checksums(leaves):
        return jnp.stack([checksum(leaf) for leaf in leaves])[None]

    by_device = jax.shard_map(
        own_checksums,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(by_device, out_shardings=NamedSharding(mesh, P()))


def _describe(name, sharding, shape, by_device) -> list[str]:
    """A text for each shard of a leaf whose copies differ: which device has what."""
    by_place: dict[str, dict[int, list[jax.Device]]] = {}
    for device, place in sharding.devices_indices_map(shape).items():
        by_value = by_place.setdefault(str(place), {})
        by_value.setdefault(int(by_device[device]), []).append(device)
    return [
        f"{name}: "
        + " / ".join(_devices(devices) for devices in sorted(by_value.values(), key=len))
        for by_value in by_place.values()
        if len(by_value) > 1
    ]


def _devices(devices: list[jax.Device]) -> str:
    """The fewer, the more they are to blame: those are named, of many the number."""
    if len(devices) > 8:
        return f"{len(devices)} others"
    by_process: dict[int, list[int]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device.id)
    return ", ".join(
        f"device {', '.join(map(str, ids))} of process {process}"
        for process, ids in sorted(by_process.items())
    )
