"""Chips with their vendors' peaks, and slices for rent; the command `plan` accepts these.

Importing this module starts neither JAX's backend nor libtpu.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from vit_jax.base.errors import InputError
from vit_jax.devices.gpus import GPUS, Gpu

GIB = 2**30


class Chip(NamedTuple):
    """A chip's peaks as published by its vendor: dense products, bandwidth in one direction.

    The figures hold for the whole chip, which JAX may split into devices; see `count_chips`.

    peak_flops: bfloat16 FLOP/s; float32 for a T4, which computes no bfloat16.
    hbm_bytes: size of its memory, for a TPU nominal.
    usable_bytes: memory that a program can use: for a TPU the size its compiler reports, for a GPU
      the fraction that JAX takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75).
    hbm_bytes_per_s: bandwidth of its memory; a GPU's is in GPUS, as its size.
    fast_bytes_per_s: bandwidth to other chips over `fast_network`.
    slow_bytes_per_s: its share of the bandwidth of the host's network (DCN).
    cycles_per_s: the clock behind the compiler's cycle counts; None if it is not published.
    devices: number of JAX devices per chip; two for TPU7x.
    device_kinds: its names in `jax.Device.device_kind`.
    source: source of the peaks.
    has_nvlink: whether it is a GPU with NVLink; GPUs without it exchange over PCIe.
    """

    peak_flops: float
    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_s: float
    fast_bytes_per_s: float
    slow_bytes_per_s: float
    cycles_per_s: float | None
    device_kinds: tuple[str, ...]
    source: str
    devices: int = 1
    has_nvlink: bool = False

    @property
    def platform(self) -> str:
        """JAX's name of its platform: "tpu", "gpu" or, of a certificate only, "cpu"."""
        kind = self.device_kinds[0]
        return "tpu" if kind.startswith("TPU") else "cpu" if kind == "cpu" else "gpu"

    @property
    def is_gpu(self) -> bool:
        """Whether the chip is a GPU."""
        return self.platform == "gpu"

    @property
    def has_two_cores(self) -> bool:
        """Whether it is a TPU chip with two TensorCores, which Google's figures count."""
        return self.device_kinds[0] in ("TPU v4", "TPU v5", "TPU7x")

    @property
    def fast_network(self) -> str:
        """The network within a slice of TPUs or a host of GPUs: "ICI", "NVLink" or "PCIe"."""
        if not self.is_gpu:
            return "ICI"
        return "NVLink" if self.has_nvlink else "PCIe"


_TPU_DOCS = "https://cloud.google.com/tpu/docs/"

_SHARED_NETWORK = 1.5625e9  # a GPU's share of an assumed 100 Gbit/s per host of 8


def _gpu(
    gpu: Gpu, peak_flops: float, network: tuple[float, float], device_kinds: tuple[str, ...],
    source: str, *, has_nvlink: bool = False,
) -> Chip:  # fmt: skip
    """A GPU with the memory of its description; `network`: fast and slow bytes/s."""
    memory = gpu.memory_bytes, gpu.memory_bytes * 3 // 4, gpu.memory_bytes_per_s
    return Chip(peak_flops, *memory, *network, None, device_kinds, source, has_nvlink=has_nvlink)


# The clock of v4, v5e and v5p is their peak divided by the FLOPs of their matrix units per cycle:
# 128 x 128 multiply-adds in each of the four units of a core (the pages below). For v6e and TPU7x
# the compiler's cycles contradict the published units, so their clock is None.
CHIPS: dict[str, Chip] = {
    "v4": Chip(
        275e12, 32 * GIB, int(30.75 * GIB), 1200e9, 300e9, 6.25e9, 1.05e9, ("TPU v4",),
        f"{_TPU_DOCS}v4; ICI: Jouppi et al. 2023 (arXiv:2304.01433), 6 links of 50 GB/s; DCN: "
        "taken to be v5p's",
    ),
    "v5e": Chip(
        197e12, 16 * GIB, int(15.75 * GIB), 819e9, 200e9, 3.125e9, 1.5e9,
        ("TPU v5 lite", "TPU v5e"),
        f"{_TPU_DOCS}v5e; DCN: 6.4 Tbit/s by the 256 chips of a pod",
    ),
    "v5p": Chip(
        459e12, 96 * GIB, int(95.73 * GIB), 2765e9, 600e9, 6.25e9, 1.75e9, ("TPU v5", "TPU v5p"),
        f"{_TPU_DOCS}v5p",
    ),
    "v6e": Chip(
        918e12, 32 * GIB, int(31.24 * GIB), 1638e9, 400e9, 12.5e9, None,
        ("TPU v6 lite", "TPU v6e"),
        f"{_TPU_DOCS}v6e; DCN: taken to be 100 Gbit/s a chip",
    ),
    "tpu7x": Chip(
        2307e12, 192 * GIB, int(2 * 94.74 * GIB), 7380e9, 600e9, 12.5e9, None, ("TPU7x",),
        f"{_TPU_DOCS}tpu7x (peak, memory); memory's and ICI's speed and DCN: taken from reports, "
        "not from that page",
        devices=2,
    ),
    "A100": _gpu(
        GPUS["A100"], 312e12, (300e9, 25e9), ("NVIDIA A100-SXM4-80GB",),
        "NVIDIA A100 80GB SXM data sheet; network: DGX A100, 8 x 200 Gbit/s",
        has_nvlink=True,
    ),
    "A100-PCIe": _gpu(
        GPUS["A100-PCIe"], 312e12, (32e9, _SHARED_NETWORK), ("NVIDIA A100 80GB PCIe",),
        "NVIDIA A100 80GB PCIe data sheet; PCIe 4.0 x16; network: assumed",
    ),
    "A100-40GB-PCIe": _gpu(
        GPUS["A100-40GB-PCIe"], 312e12, (32e9, _SHARED_NETWORK), ("NVIDIA A100-PCIE-40GB",),
        "NVIDIA A100 40GB PCIe data sheet; PCIe 4.0 x16; network: assumed",
    ),
    "A100-40GB": _gpu(
        GPUS["A100-40GB"], 312e12, (300e9, 25e9), ("NVIDIA A100-SXM4-40GB",),
        "NVIDIA A100 40GB SXM data sheet; network: DGX A100, 8 x 200 Gbit/s",
        has_nvlink=True,
    ),
    "H100": _gpu(
        GPUS["H100"], 989e12, (450e9, 50e9), ("NVIDIA H100 80GB HBM3",),
        "NVIDIA H100 SXM data sheet; network: DGX H100, 8 x 400 Gbit/s",
        has_nvlink=True,
    ),
    "H100-PCIe": _gpu(
        GPUS["H100-PCIe"], 756e12, (64e9, _SHARED_NETWORK), ("NVIDIA H100 PCIe",),
        "NVIDIA H100 PCIe data sheet, half of its figure with sparsity; PCIe 5.0 x16; network: "
        "assumed",
    ),
    "H100-NVL": _gpu(
        GPUS["H100-NVL"], 835e12, (64e9, _SHARED_NETWORK), ("NVIDIA H100 NVL",),
        "NVIDIA H100 NVL data sheet, half of its figure with sparsity; PCIe 5.0 x16, as only pairs "
        "have NVLink; network: assumed",
    ),
    "H200": _gpu(
        GPUS["H200"], 989e12, (450e9, 50e9), ("NVIDIA H200",),
        "NVIDIA H200 SXM data sheet; network: DGX H200, 8 x 400 Gbit/s",
        has_nvlink=True,
    ),
    "H200-NVL": _gpu(
        GPUS["H200-NVL"], 835e12, (64e9, _SHARED_NETWORK), ("NVIDIA H200 NVL",),
        "NVIDIA H200 NVL data sheet, half of its figure with sparsity; PCIe 5.0 x16, as only "
        "some have NVLink; network: assumed",
    ),
    "B200": _gpu(
        GPUS["B200"], 2250e12, (900e9, 50e9), ("NVIDIA B200",),
        "NVIDIA DGX B200 data sheet, by its 8 GPUs; network: 8 x 400 Gbit/s",
        has_nvlink=True,
    ),
    "L4": _gpu(
        GPUS["L4"], 121e12, (32e9, _SHARED_NETWORK), ("NVIDIA L4",),
        "NVIDIA L4 data sheet, half of its figure with sparsity; PCIe 4.0 x16; network: assumed",
    ),
    "T4": _gpu(
        GPUS["T4"], 8.1e12, (16e9, _SHARED_NETWORK), ("Tesla T4",),
        "NVIDIA T4 data sheet; PCIe 3.0 x16; network: assumed",
    ),
    "A10": _gpu(
        GPUS["A10"], 125e12, (32e9, _SHARED_NETWORK), ("NVIDIA A10",),
        "NVIDIA A10 data sheet; PCIe 4.0 x16; network: assumed",
    ),
    "A10G": _gpu(
        GPUS["A10G"], 70e12, (32e9, _SHARED_NETWORK), ("NVIDIA A10G",),
        "NVIDIA A10G data sheet by AWS; PCIe 4.0 x16; network: assumed",
    ),
    "RTX4090": _gpu(
        GPUS["RTX4090"], 165.2e12, (32e9, _SHARED_NETWORK),
        ("NVIDIA GeForce RTX 4090",),
        "NVIDIA Ada architecture white paper, bfloat16 with float32 sums; PCIe 4.0 x16; network: "
        "assumed",
    ),
    "RTX5090": _gpu(
        GPUS["RTX5090"], 209.5e12, (64e9, _SHARED_NETWORK),
        ("NVIDIA GeForce RTX 5090",),
        "NVIDIA RTX Blackwell architecture white paper, bfloat16 with float32 sums; PCIe 5.0 x16; "
        "network: assumed",
    ),
}  # fmt: skip


def product_flops_per_s(chip: str, dtype: str, *, exact: bool = False) -> float:
    """FLOP/s of products of `dtype` (XLA's name) on the GPU `chip`.

    Products of float32 are computed in TF32, at half the speed of bfloat16, where the GPU has it
    and they are not `exact` (`precision="highest"`).
    """
    if dtype in ("bf16", "f16"):
        return CHIPS[chip].peak_flops
    gpu = GPUS[chip]
    in_tf32 = gpu.capability >= (8, 0) and not exact
    return CHIPS[chip].peak_flops / 2 if in_tf32 else gpu.float32_flops


def memory_limit(device: Any) -> int | None:
    """The bytes of a device that JAX may take; None: unknown, as of one that is only described."""
    try:
        stats: dict[str, int] = getattr(device, "memory_stats", dict)() or {}
    except RuntimeError:  # of a device for which JAX only compiles
        return None
    return stats.get("bytes_limit")


def count_chips(devices: Iterable[Any]) -> int:
    """The number of chips that hold `devices`, which are JAX's or a plan's.

    Vendors count, sell and rate chips; all figures of runs and plans do the same. On some TPU chips
    (v2, v3, TPU7x) JAX has a device for each core; these devices share the coordinates of their
    chip. Every other device is one chip.
    """

    def find_chip(device: Any) -> Any:
        if device.platform != "tpu":
            return device.id
        return getattr(device, "slice_index", None), *device.coords  # a single slice has no index

    return len({find_chip(device) for device in devices})


_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16",
          "8x16x16")  # fmt: skip
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# The shapes that Google Cloud rents, from each chip's source page; the compiler accepts others too.
_SHAPES = {
    "v4": _CUBES,
    "v5e": _SQUARES,
    "v5p": (*_CUBES, "16x16x16", "16x16x24"),
    "v6e": _SQUARES,
    "tpu7x": (*_CUBES, "16x16x16"),
}
GPUS_PER_HOST = 8


class Slice(NamedTuple):
    """Chips that are rented together: a slice of a TPU pod, or hosts with GPUs.

    name: its name for --topology.
    chip: a key of CHIPS.
    num_chips, num_hosts: number of chips and hosts in one slice.
    """

    name: str
    chip: str
    num_chips: int
    num_hosts: int

    @property
    def chips_per_host(self) -> int:
        return self.num_chips // self.num_hosts


def _tpu_slice(chip: str, shape: str) -> Slice:
    num_chips = math.prod(int(side) for side in shape.split("x"))
    # A 2x4 of v5e or v6e is one host with eight chips; larger slices have hosts with four chips.
    on_one_host = num_chips <= (8 if shape in _SQUARES else 4)
    return Slice(f"{chip}:{shape}", chip, num_chips, 1 if on_one_host else num_chips // 4)


SLICES: dict[str, Slice] = {
    tpu.name: tpu
    for tpu in (_tpu_slice(chip, shape) for chip, shapes in _SHAPES.items() for shape in shapes)
}


# Google Cloud's accelerator types ("v5litepod-16", "v4-32"), whose numbers count chips, or the
# TensorCores of chips that have two each.
_TYPES = {"v4": "v4", "v5litepod": "v5e", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e"}
_SLICES_BY_TYPE = {
    f"{kind}-{tpu.num_chips * (1 + CHIPS[chip].has_two_cores)}": tpu
    for kind, chip in _TYPES.items()
    for tpu in SLICES.values()
    if tpu.chip == chip
}


def find_slice(name: str, flag: str = "--topology") -> Slice:
    """The slice called `name`.

    Args:
      name: one of SLICES; GPU:NUMBER, e.g. H100:64; or an accelerator type of Google Cloud, e.g.
        v5e-16 for v5e:4x4 and v4-32, which counts TensorCores, for v4:2x2x4.
      flag: the flag or key that gave it, for errors.

    Raises:
      InputError: no slice has that name.
    """
    known = SLICES | _SLICES_BY_TYPE
    if name in known:
        return known[name]
    chip, _, shape = name.partition(":")
    gpus = [kind for kind, facts in CHIPS.items() if facts.is_gpu]
    if chip in gpus:
        number = int(shape) if re.fullmatch(r"[1-9]\d*", shape) else 0
        if number in (1, 2, 4) or (number and number % GPUS_PER_HOST == 0):
            return Slice(name, chip, number, math.ceil(number / GPUS_PER_HOST))
        raise InputError(
            f"{flag}={name}: needs 1, 2, 4 or a multiple of {GPUS_PER_HOST} GPUs, e.g. "
            f"{chip}:{GPUS_PER_HOST}"
        )
    tpus = {kind: f"{kind}:{','.join(shapes)}" for kind, shapes in _SHAPES.items()}
    shapes = {kind.lower(): says for kind, says in tpus.items()}
    shapes |= {kind.lower(): f"{kind}:NUMBER" for kind in gpus}
    kind = chip.lower()
    cards = [known for known in shapes if known.partition("-")[0] == kind.partition("-")[0]]
    near = [kind] if kind in shapes else cards or difflib.get_close_matches(kind, shapes)
    listed = [shapes[kind] for kind in near or shapes]
    raise InputError(f"{flag}={name}: no such slice; known: {'; '.join(listed)}")


def find_slices(name: str, number: int) -> Slice:
    """The slice called `name`, for a run on `number` such slices.

    Raises:
      InputError: there is no such slice, or so many of them cannot be joined.
    """
    found = find_slice(name)
    if number < 1:
        raise InputError(f"--num_slices={number}: needs a positive number")
    if number > 1 and CHIPS[found.chip].is_gpu:
        raise InputError(
            f"--num_slices={number}: joins slices of TPUs, and {name} has GPUs; give the number of "
            "all GPUs in --topology"
        )
    return found
