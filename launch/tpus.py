"""TPU slices as Google's tools call them, and the check that a job fits them."""

import subprocess
import sys
from typing import NamedTuple

from job import Job

from vit_jax.devices.chips import CHIPS, Slice, find_slice
from vit_jax.errors import InputError
from vit_jax.job import exit_codes


class Generation(NamedTuple):
    """What the slices of one generation share.

    gke: value of the node label cloud.google.com/gke-tpu-accelerator.
    gcloud: prefix of --accelerator-type; None: Cloud TPU VMs do not have it.
    cores_per_chip: by which --accelerator-type counts.
    runtime: the system of a TPU VM that is made for JAX.

    Sources: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus,
    https://cloud.google.com/tpu/docs/runtimes and the page of each generation there.
    """

    gke: str
    gcloud: str | None = None
    cores_per_chip: int = 1
    runtime: str | None = None


GENERATIONS = {
    "v4": Generation("tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base"),
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": Generation("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": Generation("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
    "tpu7x": Generation("tpu7x"),
}


def find_tpu_slice(topology: str, num_slices: int) -> Slice:
    """The slice that `--topology` names, of which there are to be `num_slices`.

    Raises:
      InputError: it is unknown, no TPU, or cannot be joined to others.
    """
    tpu = find_slice(topology)
    if CHIPS[tpu.chip].is_gpu:
        raise InputError(f"--topology={topology}: is for TPU slices, e.g. v5e:4x4")
    if num_slices > 1 and tpu.num_hosts == 1:
        raise InputError(
            f"--num_slices={num_slices}: slices of one host, as {topology} is, cannot be joined; "
            "take one larger slice"
        )
    return tpu


def plan_command(job: Job, topology: str, num_slices: int) -> list[str]:
    """The command that says whether a job fits; [] for one that trains nothing."""
    if job.config is None:
        return []
    return [
        sys.executable, "-m", "vit_jax.main", "plan", f"--config={job.config}",
        f"--topology={topology}", f"--num_slices={num_slices}", *job.overrides,
    ]  # fmt: skip


def check_plan(job: Job, topology: str, num_slices: int) -> int:
    """Says by `plan`, which keeps what it has planned, whether the job fits: DONE or DOES_NOT_FIT.

    Where libtpu is not installed the plan is calculated; `plan` says so.

    Raises:
      InputError: it cannot be planned.
    """
    command = plan_command(job, topology, num_slices)
    if not command:
        return exit_codes.DONE
    where = topology if num_slices == 1 else f"{num_slices} x {topology}"
    print(f"planning for {where} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == exit_codes.DOES_NOT_FIT:
        print(done.stdout.rstrip(), file=sys.stderr)
        print(f"error: the run does not fit {where}; --no_plan goes on nevertheless",
              file=sys.stderr)  # fmt: skip
        return exit_codes.DOES_NOT_FIT
    if done.returncode:
        raise InputError(
            f"the run cannot be planned for {where}, see above; --no_plan goes on without a plan"
        )
    return exit_codes.DONE
