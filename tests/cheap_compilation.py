"""Settings of XLA for tests, whose models take longer to compile than to run.

Processes that load libtpu must not have them, since it refuses flags that it does not know. The
arithmetic, the layout over devices and the collectives stay the same; the last bits may differ.
"""

import importlib.metadata

# jaxlib 0.11 no longer has the first.
_CHEAP = "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"


def cheap_flags() -> str:
    """The value of XLA_FLAGS for cheap compilation."""
    release = importlib.metadata.version("jaxlib").split(".")
    return " ".join(_CHEAP if [int(part) for part in release[:2]] < [0, 11] else _CHEAP[1:])


def flags_for(devices: int) -> str:
    """The value of XLA_FLAGS for another process with this number of CPU devices."""
    return f"{cheap_flags()} --xla_force_host_platform_device_count={devices}"
