"""Devices and processes: the backend, the mesh, the signal to stop.

The mesh has the axes replica (across slices), data, fsdp and tensor, all of type Auto; the batch is
split over the first three.
"""

import glob
import importlib.util
import logging
import math
import os
import signal
import types

import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.config import InputError

logger = logging.getLogger("vit_jax")

AXES = ("replica", "data", "fsdp", "tensor")
BATCH_AXES = ("replica", "data", "fsdp")
PLATFORMS = ("cpu", "gpu", "tpu")

# Device files by which a host shows an accelerator, whether JAX can use it or not.
_DEVICE_FILES = {
    "NVIDIA GPU": ("/dev/nvidia[0-9]*",),
    "AMD GPU": ("/dev/kfd",),
    "TPU": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),
}


def accelerators_on_host() -> list[str]:
    """The kinds of accelerators whose device files this host has."""
    return [kind for kind, files in _DEVICE_FILES.items() if any(map(glob.glob, files))]


def start_backend(platform: str | None = None) -> None:
    """Chooses JAX's backend; call it before anything asks JAX for a device.

    Where libtpu is installed on a host without TPU, as the planner needs it, JAX would try it and
    print alarming errors: it is left out there.

    Args:
      platform: "cpu", "gpu" or "tpu", which must then be there; None for the best that is.

    Raises:
      InputError: if `platform` is not what JAX finds.
    """
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif not accelerators_on_host() and importlib.util.find_spec("libtpu"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        if platform is None and not jax.config.jax_platforms:
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
            "running on the CPU, though this host has: %s. Install with pip install -e '.[cuda]' "
            "or '.[tpu]', or say --config.mesh.platform=cpu",
            ", ".join(unused),
        )


def start_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins the processes of one job by `jax.distributed`, where the three say so.

    Raises:
      InputError: if only some of them are given.
    """
    given = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise InputError(f"{', '.join(missing)}: missing; give all of {', '.join(given)}")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def make_mesh(*, replica: int, data: int, fsdp: int, tensor: int, devices=None) -> Mesh:
    """A mesh of all devices (or of `devices`); one axis may be -1, what the others leave.

    Raises:
      InputError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
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
        raise InputError(
            f"{given}: needs {needed} devices, and there are {len(devices)}; "
            "change the sizes so that their product is that number, e.g. --config.mesh.data=-1 and "
            "--config.mesh.fsdp=1"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How the first axis of a batch is laid out."""
    return NamedSharding(mesh, P(BATCH_AXES))


def check_batch_size(mesh: Mesh, size: int, key: str) -> None:
    """Raises InputError, naming `key`, if a batch of `size` cannot be split over the mesh."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if size < 1 or size % ways:
        raise InputError(
            f"{key}={size}: must be a multiple of the {ways} ways in which the mesh splits a "
            f"batch; try {max(size // ways, 1) * ways}"
        )


def check_accum_steps(mesh: Mesh, size: int, accum_steps: int) -> None:
    """Raises InputError if `accum_steps` does not divide each device's share of a batch of `size`.

    A microbatch is a part of every device's own rows.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    share = size // ways
    if size % ways == 0 and share % accum_steps:
        good = max(n for n in range(1, min(accum_steps, share) + 1) if share % n == 0)
        raise InputError(
            f"optimizer.accum_steps={accum_steps}: must divide the {share} rows of "
            f"global_batch_size={size} on each of the {ways} ways in which the mesh splits a "
            "batch; choose mesh sizes that split it otherwise, or, for a new run, "
            f"optimizer.accum_steps={good}"
        )


class PreemptionGuard:
    """Turns SIGTERM into an answer that is the same on every process.

    with PreemptionGuard() as guard:
        for step in ...:
            if guard.should_stop(step): ...
    """

    def __enter__(self):
        self._signalled = False
        # With several processes JAX's own handler tells them all, and they agree on a step.
        self._single = jax.process_count() == 1
        if self._single:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind, error, traceback: types.TracebackType | None):
        if self._single:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number, frame):
        self._signalled = True

    def should_stop(self, step: int) -> bool:
        """Whether to save and stop after `step`; every process asks after every step."""
        if self._single:
            return self._signalled
        return multihost_utils.reached_preemption_sync_point(step)
