"""Where a run is planned: chips that are not there, described well enough to lay a run out on."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.errors import InputError
from vit_jax.mesh import AXES, BATCH_AXES, check_accum_steps, check_batch_size, make_mesh
from vit_jax.topologies import CHIPS, GPUS_PER_HOST, Chip, Slice


class Target(NamedTuple):
    """Where a run is planned: so many slices, each alike."""

    slice: Slice
    num_slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.slice.chip]

    @property
    def num_chips(self) -> int:
        return self.slice.num_chips * self.num_slices


def start_planning(target: Target) -> None:
    """Sets JAX up to compile on the CPU for others; call it before anything asks for a device.

    Raises:
      InputError: libtpu, which compiles for TPUs, is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    if target.chip.is_gpu:
        return
    # Other programs may use libtpu on this host, and there may be no metadata server to ask.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "--topology: libtpu, which compiles for TPUs, is not installed; "
            "pip install -e '.[plan]' (Linux on x86-64)"
        )


@dataclasses.dataclass(frozen=True)
class DescribedGpu:
    """Of a GPU what laying a run out needs; nothing can be compiled for it."""

    id: int
    process_index: int
    device_kind: str
    platform: str = "gpu"


def find_devices(target: Target) -> list[Any]:
    """Descriptions of the target's devices; those of TPUs are as good as devices to compile."""
    if target.chip.is_gpu:
        kind = target.chip.device_kinds[0]
        return [DescribedGpu(i, i // GPUS_PER_HOST, kind) for i in range(target.num_chips)]
    options: dict[str, Any] = {}
    if target.slice.chip in ("v4", "v5p"):  # a chip's two cores are one device to JAX
        options["chip_config_name"] = "megacore"
    if target.num_slices > 1:
        options["num_slices"] = target.num_slices
    name = target.slice.name
    return list(topologies.get_topology_desc(name, "tpu", **options).devices)


def target_mesh(config: ConfigDict, target: Target) -> Mesh:
    """The mesh of `config.mesh` over the target.

    Raises:
      InputError: the sizes do not suit its devices.
    """
    axes = {axis: size for axis, size in config.mesh.items() if axis != "platform"}
    return make_mesh(**axes, devices=find_devices(target))


def plan_mesh(config: ConfigDict, target: Target) -> Mesh:
    """`target_mesh`, over which the config's batch can be split.

    Raises:
      InputError: it cannot, or the sizes do not suit the devices.
    """
    mesh = target_mesh(config, target)
    check_batch_size(mesh, config.global_batch_size, "global_batch_size")
    check_accum_steps(mesh, config.global_batch_size, config.optimizer.accum_steps)
    return mesh


def batch_ways(shape: Mapping[str, int]) -> int:
    """In how many ways a mesh of that shape splits a batch."""
    return math.prod(shape[axis] for axis in BATCH_AXES)


def readable_mesh(shape: Mapping[str, int]) -> str:
    """'data 2 x fsdp 8': the axes that split anything."""
    split = [f"{axis} {shape[axis]}" for axis in AXES if shape[axis] > 1]
    return " x ".join(split) or "one device"
