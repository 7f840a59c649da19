"""GPUs as XLA's compiler describes them: programs compile for them on machines without one."""

import importlib.util
from typing import NamedTuple

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class Gpu(NamedTuple):
    """The description of a GPU for XLA's compiler.

    capability: compute capability, (major, minor).
    cores: streaming multiprocessors.
    fpus_per_core: units for float32 in each.
    clock_ghz: the largest.
    memory_bytes, memory_bytes_per_s: as the driver reports them.
    l2_bytes: size of the cache that all cores share.
    shared_bytes: shared memory of a core.
    block_shared_bytes: how much of it one block can have.
    threads: the most threads on a core.
    """

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    shared_bytes: int
    block_shared_bytes: int
    threads: int

    @property
    def float32_flops(self) -> float:
        """FLOP/s of products in full float32, by its ordinary units."""
        return 2e9 * self.cores * self.fpus_per_core * self.clock_ghz


MIB, GB = 2**20, 10**9

# By the keys of CHIPS. A100 to B200: https://github.com/openxla/xla,
# xla/backends/gpu/target_config/specs. The others: NVIDIA's data sheets and white papers named in
# CHIPS (for T4 the Turing architecture's); memory of a core and threads: CUDA C++ Programming
# Guide, technical specifications per compute capability.
GPUS: dict[str, Gpu] = {
    "A100": Gpu((8, 0), 108, 64, 1.41, 85_100_068_864, 2039.04e9, 40 * MIB, 167_936, 166_912, 2048),
    "A100-40GB": Gpu(
        (8, 0), 108, 64, 1.41, 42_331_013_120, 1555.2e9, 40 * MIB, 167_936, 166_912, 2048
    ),
    "H100": Gpu(
        (9, 0), 132, 128, 1.98, 84_942_979_072, 3352.32e9, 50 * MIB, 233_472, 232_448, 2048
    ),
    "H200": Gpu((9, 0), 132, 128, 1.98, 151_397_597_184, 4800e9, 50 * MIB, 233_472, 232_448, 2048),
    "B200": Gpu(
        (10, 0), 148, 128, 1.965, 191_514_411_008, 7672.32e9, 132_644_864, 233_472, 232_448, 2048
    ),
    "L4": Gpu((8, 9), 58, 128, 2.04, 24 * GB, 300e9, 48 * MIB, 102_400, 101_376, 1536),
    "T4": Gpu((7, 5), 40, 64, 1.59, 16 * GB, 320e9, 4 * MIB, 65_536, 65_536, 1024),
    "A10": Gpu((8, 6), 72, 128, 1.695, 24 * GB, 600e9, 6 * MIB, 102_400, 101_376, 1536),
    "RTX4090": Gpu((8, 9), 128, 128, 2.52, 24 * GB, 1008e9, 72 * MIB, 102_400, 101_376, 1536),
    "RTX5090": Gpu((12, 0), 170, 128, 2.407, 32 * GB, 1792e9, 96 * MIB, 102_400, 101_376, 1536),
}

# Cards for PCIe, and AWS's A10G: the GPU of the same architecture, but for these figures. Those of
# H100-PCIe, and A100-PCIe's memory, are from XLA's specs; the others are nominal, and no card has
# been asked.
GPUS |= {
    "A100-PCIe": GPUS["A100"]._replace(memory_bytes=79_050_250_240, memory_bytes_per_s=1935e9),
    "A100-40GB-PCIe": GPUS["A100-40GB"],
    "H100-PCIe": GPUS["H100"]._replace(cores=114, clock_ghz=1.755, memory_bytes_per_s=2039.04e9),
    "H100-NVL": GPUS["H100"]._replace(
        clock_ghz=1.785, memory_bytes=94 * GB, memory_bytes_per_s=3938e9
    ),
    "H200-NVL": GPUS["H200"]._replace(clock_ghz=1.785),
    "A10G": GPUS["A10"]._replace(cores=80, clock_ghz=1.71),
}

# The same for all of them; cuDNN is the oldest that JAX takes.
_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "shared_memory_per_block": 49_152,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}
_VERSIONS = "dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }"


def has_cuda() -> bool:
    """Whether JAX's plugin for CUDA is installed, which holds XLA's compiler for GPUs."""
    return any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)


def describe_to_xla(gpu: Gpu, device_kind: str) -> str:
    """The GPU as the text of XLA's message GpuTargetConfigProto, with `device_kind` as its name."""
    major, minor = gpu.capability
    numbers = _COMMON | {
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus_per_core,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
        "memory_bandwidth": int(gpu.memory_bytes_per_s),
        "l2_cache_size": gpu.l2_bytes,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block_optin": gpu.block_shared_bytes,
        "threads_per_core_limit": gpu.threads,
    }
    # From Hopper on, programs are for one architecture only, with all of its instructions.
    extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = [f"{name}: {number}" for name, number in numbers.items()]
    lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}")
    return (
        f'gpu_device_info {{ {" ".join(lines)} }} platform_name: "CUDA" {_VERSIONS} '
        f'device_description_str: "{device_kind}"'
    )
