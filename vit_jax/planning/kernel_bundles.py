"""Reads how many bundles the TPU compiler makes of kernels; a program of its own.

  python -m vit_jax.planning.kernel_bundles FOLDER TOPOLOGY

FOLDER/0.exported, 1.exported, ... are kernels, as `jax.export` writes them. LIBTPU_INIT_ARGS must
have the compiler write its schedules into FOLDER/dump. On standard output: [bundles, ...], null for
a kernel without schedule.
"""

import json
import pathlib
import re
import sys

import jax
from jax import export
from jax.sharding import SingleDeviceSharding

from vit_jax.devices.chips import find_slice
from vit_jax.planning.targets import Target, find_devices, start_planning

_SCHEDULE = "*final_hlo-static-per-bundle-utilization.txt"


def main(folder: pathlib.Path, topology: str) -> None:
    target = Target(find_slice(topology))
    start_planning(target)
    device = find_devices(target)[0]
    kernels = sorted(folder.glob("*.exported"), key=lambda path: int(path.stem))
    print(json.dumps([_count(path, device, folder / "dump") for path in kernels]))


def _count(path: pathlib.Path, device: jax.Device, dump: pathlib.Path) -> int | None:
    """Bundles of the longest program in the schedule: it is the kernel, the others are copies."""
    for old in dump.iterdir():
        old.unlink()
    exported = export.deserialize(bytearray(path.read_bytes()))
    where = SingleDeviceSharding(device)
    call = jax.jit(exported.call, in_shardings=where, out_shardings=where)
    call.lower(*exported.in_avals).compile()
    return max((count_bundles(found.read_text()) for found in dump.glob(_SCHEDULE)), default=None)


def count_bundles(text: str) -> int:
    """The lines of a schedule's table: one is a bundle, with its use of each unit."""
    table = text.partition("== UTILIZATION:")[2]
    return sum(re.match(r"\s*\d+(\s+\d+)*\s*$", line) is not None for line in table.splitlines())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
