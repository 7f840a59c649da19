"""Options of XLA's compilers by platform, each with the measurement behind it; their cache."""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import platform
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from vit_jax.base import files

logger = logging.getLogger("vit_jax")

_TPU = {
    # By default the compiler replaces the product with a weight gathered over fsdp by one product
    # per device with sends in between. For a ViT's layers that is slower than the gather: L/16,
    # fsdp 16 on v5e:4x4, 64 images per chip: 889 against 474 Mcycles by its own estimate.
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}

# Replaces kernels that add in no fixed order: XLA sorts scatters, and takes cuDNN's deterministic
# backward passes. It takes the first kernel that can compute a product or a convolution, and times
# none. By the kernels' rooflines it adds 8 % to a step with large scatters (masked_patches), else
# nothing (docs/explanation/plans.md).
_DETERMINISTIC = {"xla_gpu_deterministic_ops": True}

_MAX_CACHE_BYTES = 10 * 2**30  # beyond it, JAX removes the programs that were unused for longest
_MIN_COMPILE_S = 0.1  # what compiles faster takes as long to read


def compiler_options(
    mesh: Mesh, more: Mapping[str, bool] = MappingProxyType({}), deterministic: bool = False
) -> dict[str, bool]:
    """The argument `compiler_options` of `jax.jit` for programs that run on `mesh`.

    Options that its compiler does not know are left out, with a warning.

    Args:
      more: further options, {name: value}.
      deterministic: whether programs for GPUs must give the same bits every time.
    """
    devices = list(mesh.devices.flat)
    here = (device for device in devices if device.process_index == jax.process_index())
    device = next(here, devices[0])
    options = dict(more)
    if device.platform == "tpu":
        options |= _TPU
    if device.platform == "gpu" and deterministic:
        options |= _DETERMINISTIC
    if not isinstance(device, jax.Device):  # a plan's description, without a compiler
        return options
    return {name: value for name, value in options.items() if _is_known(name, value, device)}


@functools.cache
def _is_known(name: str, value: bool, device: jax.Device) -> bool:
    """Whether the compiler for `device` knows the option."""
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        logger.warning("left out: XLA for %s does not know the option %s", device.platform, name)
        return False
    return True


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder, where the next start finds them.

    Call it before the first program is compiled. A folder that the user chose by JAX's own setting,
    such as JAX_COMPILATION_CACHE_DIR, stays. Without a writable folder nothing is kept.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    backend = jax.default_backend()
    folder = files.cache_folder("compiled") / (_cpu_kind() if backend == "cpu" else backend)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        logger.debug("compiled programs are not kept: %s is not writable", folder)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)


def _cpu_kind() -> str:
    """A name for this type of CPU: a program compiled for another one may not run here."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    kinds = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    digest = hashlib.sha256("\n".join(sorted(kinds) or lines).encode()).hexdigest()
    return f"cpu-{digest[:12]}"
