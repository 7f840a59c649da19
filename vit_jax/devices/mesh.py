"""JAX's backend and the device mesh.

The mesh has the axes replica (across slices), data, fsdp and tensor, all of type Auto. The first
three split the batch.
"""

import glob
import importlib.util
import logging
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.errors import InputError
from vit_jax.devices.compiler import keep_programs

logger = logging.getLogger("vit_jax")

AXES = ("replica", "data", "fsdp", "tensor")
BATCH_AXES = ("replica", "data", "fsdp")

# Device files of accelerators; they exist even if JAX cannot use the accelerator.
_DEVICE_FILES = {
    "NVIDIA GPU": ("/dev/nvidia[0-9]*",),
    "AMD GPU": ("/dev/kfd",),
    "TPU": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),
}


def accelerators_on_host() -> list[str]:
    """The kinds of accelerators on this host, by their device files."""
    return [kind for kind, files in _DEVICE_FILES.items() if any(map(glob.glob, files))]


def start_backend(platform: str | None = None) -> None:
    """Choose JAX's backend and keep its programs; call it before anything asks JAX for a device.

    The planner needs libtpu also on hosts without a TPU. There JAX would try to use it and print
    alarming errors, so this function disables it.

    Args:
      platform: "cpu", "gpu" or "tpu"; None for the best platform available.

    Raises:
      InputError: if JAX finds another platform than `platform`.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif not accelerators_on_host() and importlib.util.find_spec("libtpu"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if platform is None and not jax.config.values["jax_platforms"]:
            jax.config.update("jax_platforms", "cpu")
    if platform is not None and jax.default_backend() != platform:
        extra = {"gpu": "cuda", "tpu": "tpu"}.get(platform)
        hint = f"install with pip install -e '.[{extra}]', or " if extra else ""
        raise InputError(
            f"mesh.platform={platform}: JAX finds only {jax.default_backend()} devices here; "
            f"{hint}set --config.mesh.platform={jax.default_backend()}"
        )
    unused = accelerators_on_host() if jax.default_backend() == "cpu" and platform is None else []
    if unused:
        logger.warning(
            "running on the CPU, although this host has: %s. Install with pip install -e '.[cuda]' "
            "or '.[tpu]', or set --config.mesh.platform=cpu",
            ", ".join(unused),
        )
    keep_programs()


def make_mesh(
    *,
    replica: int | None = None,
    data: int | None = None,
    fsdp: int | None = None,
    tensor: int = 1,
    devices: Sequence | None = None,
) -> Mesh:
    """Make a mesh of all devices (or of `devices`); one axis may be -1 for all remaining devices.

    With several TPU slices, each slice holds whole replicas, so the other axes use the fast links
    inside a slice. `replica` None makes one replica per slice, `data` None is -1, `fsdp` None 1.

    Raises:
      InputError: if the product of the sizes is not the number of devices, or `replica` is not a
        multiple of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    num_slices = count_slices(devices)
    replica = num_slices if replica is None else replica
    data, fsdp = -1 if data is None else data, 1 if fsdp is None else fsdp
    sizes = dict(zip(AXES, (replica, data, fsdp, tensor), strict=True))
    given = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(f"{given}: needs positive sizes, at most one of them -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        needed = f"a multiple of {fixed}" if open_axes else fixed
        works = {"data": -1, "fsdp": 1}
        if len(devices) % (replica * tensor):
            works["tensor"] = 1
        flags = " and ".join(f"--config.mesh.{axis}={size}" for axis, size in works.items())
        raise InputError(
            f"{given}: needs {needed} devices, but there are {len(devices)}; "
            f"make the product of the sizes equal to that number, e.g. {flags}"
        )
    if sizes["replica"] % num_slices:
        raise InputError(
            f"mesh.replica={sizes['replica']}: there are {num_slices} slices, and each must hold "
            f"whole replicas; set --config.mesh.replica={num_slices} or a multiple of it"
        )
    in_slice = (sizes["replica"] // num_slices, *list(sizes.values())[1:])
    over_slices = (num_slices, 1, 1, 1)
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(in_slice, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            in_slice, over_slices, devices, allow_split_physical_axes=True
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def count_slices(devices: Sequence) -> int:
    """Number of TPU slices among `devices`; 1 for other devices, whose index may mean the host."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its first axis is split over the batch axes."""
    return NamedSharding(mesh, P(BATCH_AXES))


def check_batch_size(mesh: Mesh, size: int, key: str) -> None:
    """Raise InputError, naming `key`, if a batch of `size` cannot be split over the mesh."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if size < 1 or size % ways:
        raise InputError(
            f"{key}={size}: must be a multiple of {ways}, because the mesh splits a batch "
            f"{ways} ways; try {max(size // ways, 1) * ways}"
        )


def check_accum_steps(mesh: Mesh, size: int, accum_steps: int) -> None:
    """Raise InputError if `accum_steps` does not divide each device's rows of a batch of `size`.

    A microbatch consists of a part of every device's own rows.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    share = size // ways
    if size % ways == 0 and share % accum_steps:
        good = max(n for n in range(1, min(accum_steps, share) + 1) if share % n == 0)
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: must divide {share}, the rows per device of "
            f"global_batch_size={size}, which the mesh splits {ways} ways; choose other mesh "
            f"sizes, or, for a new run, optimizer.accum_steps={good}"
        )
