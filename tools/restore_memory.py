"""Measures the memory in which processes read a run's weights onto their devices. Linux only.

python tools/restore_memory.py WORKDIR [--processes=2]

The processes have 8 CPU devices in all, and read the newest weights of the run as `init_from` does
in a training with mesh.fsdp=8. Each prints the GB of its shards and of its largest resident
memory.
"""

import argparse
import os
import resource
import subprocess
import sys

import jax

from vit_jax.base import tree
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import place, state_shardings
from vit_jax.transfer import init_variables, read_pretrained
from vit_jax.transfer.shapes import abstract_params

ADDRESS = "localhost:47391"  # where the processes meet


def measure(workdir: str) -> None:
    """Read the weights as one of the processes, which know each other; print a line."""
    pretrained = read_pretrained(workdir, lazy=True)
    model = pretrained.model.clone(scan=True)
    shapes = {"params": tree.unflatten_names(abstract_params(model))}
    mesh = make_mesh(replica=1, data=1, fsdp=jax.device_count(), tensor=1)
    shardings = tree.flatten_names(state_shardings(shapes, mesh))
    params, _ = init_variables(pretrained, model, keep_head=True)
    placed = [place(params.pop(name), shardings[f"params/{name}"]) for name in [*params]]
    jax.block_until_ready(placed)
    own = sum(part.data.nbytes for array in placed for part in array.addressable_shards) / 1e9
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"process {jax.process_index()}: shards {own:.2f} GB, at most {most:.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)  # of a process
    flags = parser.parse_args()
    if flags.index is not None:
        jax.distributed.initialize(ADDRESS, flags.processes, flags.index)
        return measure(flags.workdir)
    devices = f"--xla_force_host_platform_device_count={8 // flags.processes}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    again = [sys.executable, *sys.argv, "--index"]
    jobs = [subprocess.Popen([*again, str(i)], env=environment) for i in range(flags.processes)]
    sys.exit(max(job.wait() for job in jobs))


if __name__ == "__main__":
    main()
