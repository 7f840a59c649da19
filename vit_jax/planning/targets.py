"""The hardware that a run is planned for: descriptions of devices that this machine lacks."""

import dataclasses
import functools
import importlib.util
import itertools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from vit_jax.config import Settings
from vit_jax.devices.chips import CHIPS, SLICES, Chip, Slice, count_chips, memory_limit
from vit_jax.devices.gpus import GPUS, describe_to_xla, has_cuda
from vit_jax.devices.mesh import (
    AXES,
    BATCH_AXES,
    check_accum_steps,
    check_batch_size,
    count_slices,
    make_mesh,
)
from vit_jax.run.setup.opener import Tables
from vit_jax.run.setup.resolve import resolve

logger = logging.getLogger("vit_jax")

_CUDA_EXTRA = "'.[cuda]' (Linux; 6 GB, no GPU is needed)"


class Target(NamedTuple):
    """The hardware that a run is planned for: `num_slices` slices of one kind.

    may_compile: whether to use its compiler, which takes minutes.
    measured: the chip by a certificate, or with the memory that JAX may take; None: by its vendor.
    scale: of activations, by a certificate; see `kept.peak_bytes`.
    """

    slice: Slice
    num_slices: int = 1
    may_compile: bool = True
    measured: Chip | None = None
    scale: float = 1.0

    @property
    def chip(self) -> Chip:
        return self.measured or CHIPS[self.slice.chip]

    @property
    def num_chips(self) -> int:
        return self.slice.num_chips * self.num_slices

    @property
    def is_compiled_for(self) -> bool:
        """Whether its compiler, libtpu or JAX's plugin for CUDA, is used; else it is calculated."""
        if not self.may_compile or self.chip.platform == "cpu":
            return False
        return has_cuda() if self.chip.is_gpu else importlib.util.find_spec("libtpu") is not None


def start_planning(target: Target) -> None:
    """Set JAX up to compile on the CPU for other devices; call it before JAX starts its backend."""
    jax.config.update("jax_platforms", "cpu")
    if target.may_compile and not target.is_compiled_for:
        compiler, extra = "libtpu, which compiles for TPUs,", "'.[plan]' (Linux on x86-64)"
        if target.chip.is_gpu:
            compiler, extra = "JAX's plugin for CUDA, which compiles for GPUs,", _CUDA_EXTRA
        logger.warning(
            "%s is not installed: memory and collectives are calculated; for the compiler's "
            "figures: pip install -e %s", compiler, extra,
        )  # fmt: skip
    # Other programs may use libtpu on this host, and there may be no metadata server.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # any value stops a complaint
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
    """A device's attributes that sharding a run needs; nothing can be compiled for it.

    The last three are for TPUs: the chip's coordinates in its slice, the device's index on the
    chip, and the index of the slice.
    """

    id: int
    process_index: int
    device_kind: str
    platform: str
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    slice_index: int = 0


@dataclasses.dataclass(frozen=True)
class DescribedGpu(DescribedDevice):
    """A GPU's description also has its compute capability."""

    compute_capability: str = ""


def describe_devices(target: Target) -> list[DescribedDevice]:
    """Describe the target's devices, without its compiler."""
    kind = target.chip.device_kinds[0]
    if target.chip.platform == "cpu":
        return [DescribedDevice(i, 0, kind, "cpu") for i in range(target.num_chips)]
    if target.chip.is_gpu:
        major, minor = GPUS[target.slice.chip].capability
        describe = functools.partial(DescribedGpu, compute_capability=f"{major}.{minor}")
        on_host = target.slice.chips_per_host
        return [describe(i, i // on_host, kind, "gpu") for i in range(target.num_chips)]
    x, y, z = (*map(int, target.slice.name.partition(":")[2].split("x")), 1)[:3]
    places = [
        (slice_index, (i, j, k), core)
        for slice_index in range(target.num_slices)
        for k, j, i in itertools.product(range(z), range(y), range(x))
        for core in range(target.chip.devices)
    ]
    hosts: dict[tuple, int] = {}  # host -> index; of several, each has 2 x 2 x 1 chips
    devices = []
    for number, (slice_index, (i, j, k), core) in enumerate(places):
        host = (i // 2, j // 2, k) if target.slice.num_hosts > 1 else ()
        process = hosts.setdefault((slice_index, *host), len(hosts))
        devices.append(DescribedDevice(number, process, kind, "tpu", (i, j, k), core, slice_index))
    return devices


def find_devices(target: Target) -> list[Any]:
    """The target's devices; programs can be compiled for them if its compiler is installed."""
    if not target.is_compiled_for:
        return describe_devices(target)
    options: dict[str, Any] = {}
    if target.chip.is_gpu:
        kind = target.chip.device_kinds[0]
        options["target_config"] = describe_to_xla(GPUS[target.slice.chip], kind)
        options["topology"] = f"1x{target.slice.num_hosts}x{target.slice.chips_per_host}"
        return list(topologies.get_topology_desc("", "cuda", **options).devices)
    if target.chip.has_two_cores and target.chip.devices == 1:  # both are one device to JAX
        options["chip_config_name"] = "megacore"
    if target.num_slices > 1:
        options["num_slices"] = target.num_slices
    return list(topologies.get_topology_desc(target.slice.name, "tpu", **options).devices)


def host_of_gpu(device: Any) -> int:
    """The index of a GPU's host, or of the hosts that share its NVLink.

    With several processes it is JAX's slice, because one host may run a process for each GPU.
    Described GPUs have no slice, and are planned by one process.
    """
    return device.process_index if jax.process_count() == 1 else device.slice_index


def target_of(devices: Sequence[Any]) -> Target | None:
    """The hardware that `devices` are; None if its peaks and its memory are not known."""
    kind = devices[0].device_kind
    chip = next((name for name, facts in CHIPS.items() if kind in facts.device_kinds), None)
    if chip is None or devices[0].platform == "cpu":
        return None
    number, num_slices = count_chips(devices), count_slices(devices)
    if CHIPS[chip].is_gpu:
        hosts = len({host_of_gpu(device) for device in devices})
        target = Target(Slice(f"{chip}:{number}", chip, number, hosts))
        # Several processes plan by the usual share, as each must choose the same layout.
        limit = memory_limit(devices[0]) if jax.process_count() == 1 else None
        own = None if limit is None else CHIPS[chip]._replace(usable_bytes=limit)
        return target._replace(measured=own)
    sides = [max(at) - min(at) + 1 for at in zip(*(d.coords for d in devices), strict=True)]
    name = f"{chip}:{'x'.join(map(str, sides))}"
    found = SLICES.get(name) or SLICES.get(name.removesuffix("x1"))
    return None if found is None else Target(found, num_slices)


def target_mesh(settings: Settings, target: Target, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the section `mesh` over the target's `devices`; None: by `find_devices`.

    Raises:
      InputError: the sizes do not suit the devices.
    """
    axes = {axis: getattr(settings.mesh, axis) for axis in AXES}
    return make_mesh(**axes, devices=find_devices(target) if devices is None else devices)


def settle(asked: Settings, target: Target) -> Settings:
    """The resolved settings of a run on the target; no data are read, but for `Tables`.

    Raises:
      InputError: the settings lack something, or do not suit the target.
    """
    return resolve(asked, Tables(described_mesh(asked, target))).settings


def described_mesh(settings: Settings, target: Target) -> Mesh:
    """`target_mesh` over descriptions of devices, for which nothing can be compiled."""
    return target_mesh(settings, target, describe_devices(target))


def plan_mesh(settings: Settings, target: Target, devices: Sequence[Any] | None = None) -> Mesh:
    """`target_mesh`, after a check that it can split the config's batch.

    Raises:
      InputError: it cannot split the batch, or the sizes do not suit the devices.
    """
    mesh = target_mesh(settings, target, devices)
    check_batch_size(mesh, settings.run.global_batch_size, "global_batch_size")
    check_accum_steps(mesh, settings.run.global_batch_size, settings.optimizer.accum_steps)
    return mesh


def batch_ways(shape: Mapping[str, int]) -> int:
    """The number of parts into which a mesh of that shape splits a batch."""
    return math.prod(shape[axis] for axis in BATCH_AXES)


def readable_mesh(shape: Mapping[str, int]) -> str:
    """Format the mesh axes larger than 1, e.g. 'data 2 x fsdp 8'."""
    split = [f"{axis} {shape[axis]}" for axis in AXES if shape[axis] > 1]
    return " x ".join(split) or "one device"
