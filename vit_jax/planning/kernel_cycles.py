"""Cycles of the kernels of a program, which the TPU compiler's own estimate leaves out.

The compiler can write down its final schedule of a kernel: bundles of instructions, one a cycle.
Only a process that is started for it can ask for that. It runs this file as a program:

  python -m vit_jax.planning.kernel_cycles FOLDER TOPOLOGY

FOLDER/0.exported, 1.exported, ... are kernels, as `jax.export` writes them. LIBTPU_INIT_ARGS must
have the compiler write its schedules into FOLDER/dump. On standard output: [bundles, ...], null for
a kernel without schedule.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax import export
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval
from jax.sharding import SingleDeviceSharding

from vit_jax.devices.chips import find_slice
from vit_jax.devices.flops import array_of
from vit_jax.planning.targets import Target, find_devices, start_planning

logger = logging.getLogger("vit_jax")


_LAST_PASS = "--xla_jf_dump_llo_pass_label_regex=final_hlo"


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """Calls of one kernel, alike in everything.

    name: the kernel's.
    eqn: one of the calls, in a jaxpr.
    count: how often a step makes it, on a device.
    """

    name: str
    eqn: JaxprEqn
    count: int


def find_kernels(jaxpr: Jaxpr) -> list[KernelCall]:
    """The kernels of a program on one device, those in the body of a scan as often as it runs.

    Those that no output needs, as in a layer that is computed again in part, are left out.
    """
    found: dict[tuple, KernelCall] = {}
    live, _ = partial_eval.dce_jaxpr(jaxpr, True)
    for eqn, count in _walk(live, 1):
        name = eqn.params["name"] or "kernel"
        key = (name, eqn.params["grid_mapping"].grid, str(eqn.params["jaxpr"]),
               *(var.aval.str_short() for var in eqn.invars))  # fmt: skip
        before = found[key].count if key in found else 0
        found[key] = KernelCall(name, eqn, before + count)
    return list(found.values())


def has_kernel(jaxpr: Jaxpr, name: str) -> bool:
    """Whether a program calls the kernel called `name`."""
    return any(eqn.params["name"] == name for eqn, _ in _walk(jaxpr, 1))


def _walk(jaxpr: Jaxpr, count: int) -> Iterator[tuple[JaxprEqn, int]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn, count
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            yield from _walk(inner, count * times)


def count_cycles(calls: list[KernelCall], target: Target) -> list[dict[str, Any]]:
    """For each of `calls` its bundles and the cycles of a step, as JSON takes them.

    A kernel runs its bundles once at every point of its grid. The time of its bytes at the memory's
    bandwidth, or of its products at the chip's peak, counts instead where it is larger. Waiting for
    copies, the start of each point and the
    second core of a v4 or v5p chip, which may take half of the points, are not counted.

    Without schedules, which another version of the compiler may not write, a warning says so, and
    the rows count no cycles.
    """
    if not calls:
        return []
    bundles = _bundles(calls, target)
    if None in bundles:
        logger.warning("the compiler gives no schedule of a kernel: its cycles are not counted")
    chip, rows = target.chip, []
    for call, number in zip(calls, bundles, strict=True):
        points = math.prod(call.eqn.params["grid_mapping"].grid)
        cost = call.eqn.params["cost_estimate"]
        bounds = {"bundles": (number or 0) * points}
        if cost is not None and chip.cycles_per_s is not None:
            bounds["hbm"] = cost.bytes_accessed * chip.cycles_per_s / chip.hbm_bytes_per_s
            bounds["matrix units"] = cost.flops * chip.cycles_per_s / chip.peak_flops
        bound_by = max(bounds, key=lambda name: bounds[name])
        rows.append(
            {
                "name": call.name,
                "count": call.count,
                "grid_points": points,
                "bundles": number,
                "bound_by": bound_by,
                "cycles": 0 if number is None else int(call.count * bounds[bound_by]),
            }
        )
    return sorted(rows, key=lambda row: -row["cycles"])


def _bundles(calls: list[KernelCall], target: Target) -> list[int | None]:
    """Bundles of each of `calls` at one point of its grid."""
    with tempfile.TemporaryDirectory(prefix="vit_jax_kernels_") as folder:
        for i, call in enumerate(calls):
            (pathlib.Path(folder) / f"{i}.exported").write_bytes(_exported(call.eqn))
        dump = pathlib.Path(folder) / "dump"
        dump.mkdir()
        # Only of the last pass: all of them together are 130 MB for a small kernel.
        options = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true {_LAST_PASS}"
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        module = "vit_jax.planning.kernel_cycles"
        command = [sys.executable, "-m", module, folder, target.slice.name]
        done = subprocess.run(
            command,
            env=os.environ | {"LIBTPU_INIT_ARGS": f"{given} {options}".strip()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            logger.warning("%s: %s", " ".join(command), done.stderr.strip()[-2000:])
            return [None] * len(calls)
        return json.loads(done.stdout)


def _exported(eqn: JaxprEqn) -> bytearray:
    """The kernel call of `eqn` as a program of its own, for TPUs."""

    def call(*args: jax.Array) -> Any:
        return eqn.primitive.bind(*args, **eqn.params)

    arrays = [array_of(var) for var in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    return export.export(jax.jit(call), platforms=["tpu"])(*shapes).serialize()


def _print_bundles(folder: pathlib.Path, topology: str) -> None:
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
    schedules = dump.glob("*final_hlo-static-per-bundle-utilization.txt")
    return max((count_bundles(schedule.read_text()) for schedule in schedules), default=None)


def count_bundles(text: str) -> int:
    """The lines of a schedule's table: one is a bundle, with its use of each unit."""
    table = text.partition("== UTILIZATION:")[2]
    return sum(re.match(r"\s*\d+(\s+\d+)*\s*$", line) is not None for line in table.splitlines())


if __name__ == "__main__":
    _print_bundles(pathlib.Path(sys.argv[1]), sys.argv[2])
