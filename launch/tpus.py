"""TPU slices by the names of Google's tools, and the check that a job fits them."""

import argparse
import subprocess
import sys
from typing import NamedTuple

from job import Job

from vit_jax.base.errors import InputError
from vit_jax.devices.chips import CHIPS, Slice, find_slice
from vit_jax.job import exit_codes


class Generation(NamedTuple):
    """Names and properties of a TPU generation.

    gke: value of the node label cloud.google.com/gke-tpu-accelerator.
    gcloud: prefix of --accelerator-type; None: not available as Cloud TPU VMs.
    cores_per_chip: --accelerator-type counts cores.
    runtime: system of a TPU VM for JAX.

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


def find_tpu_slice(flags: argparse.Namespace) -> Slice:
    """The slice in `--topology`; `--num_slices` of them are to be connected.

    Raises:
      InputError: if it is unknown, not a TPU, or cannot be connected to others.
    """
    tpu = find_slice(flags.topology)
    if CHIPS[tpu.chip].is_gpu:
        raise InputError(f"--topology={flags.topology}: not a TPU slice; e.g. v5e:4x4")
    if flags.num_slices > 1 and tpu.num_hosts == 1:
        raise InputError(
            f"--num_slices={flags.num_slices}: slices with one host, such as {flags.topology}, "
            "cannot be connected; use one larger slice"
        )
    return tpu


def plan_command(job: Job, flags: argparse.Namespace) -> list[str]:
    """Command that checks whether a job fits; [] for jobs that do not train."""
    if job.config is None:
        return []
    where = [f"--topology={flags.topology}", f"--num_slices={flags.num_slices}"]
    command = [sys.executable, "-m", "vit_jax.main", "plan", f"--config={job.config}"]
    return [*command, *where, *job.overrides]


def check_plan(job: Job, flags: argparse.Namespace) -> int:
    """Check with `plan` whether the job fits: DONE or DOES_NOT_FIT.

    `plan` caches its results; without libtpu it calculates them, and says so.

    Raises:
      InputError: if planning fails.
    """
    command = plan_command(job, flags)
    if not command:
        return exit_codes.DONE
    where = flags.topology if flags.num_slices == 1 else f"{flags.num_slices} x {flags.topology}"
    print(f"planning for {where} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == exit_codes.DOES_NOT_FIT:
        print(f"{done.stdout.rstrip()}\nerror: the run does not fit {where}; to start it anyway, "
              "add --no_plan", file=sys.stderr)  # fmt: skip
    elif done.returncode:
        raise InputError(
            f"planning for {where} failed, see above; to start it without a plan, add --no_plan"
        )
    return done.returncode
