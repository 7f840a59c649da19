"""Submits a job to Slurm, which is told to save before its time is up, and starts again by itself.

  python launch/slurm.py --nodes=4 --gpus_per_node=8 --time=24:00:00 --sbatch=--partition=gpu -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=/shared/runs/vit_l

To be called on a login node, in a folder that the nodes see too: they use the Python that this
command runs in. By default each node gets one process, which drives all its GPUs. The processes say
what they have to say in WORKDIR/logs (a workdir in an object store: slurm_logs/NAME).

The script that is submitted requeues the job when its processes have saved and ended with exit code
75: before the time limit, when Slurm preempts it, or after `scancel --signal=TERM JOB`. `scancel
JOB` ends it for good.
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from command_line import find_program, launcher_main, make_parser, positive, shell
from job import Job, check_job

from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, PREEMPTED, TERMINATED

# As JAX does: ports above those that the system hands out, by the number of the job.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--processes_per_node", type=int, default=1)
    parser.add_argument("--gpus_per_node", type=int, help="default: none, the job runs on CPU")
    parser.add_argument("--cpus_per_process", type=int, help="default: what Slurm gives")
    parser.add_argument("--time", metavar="HH:MM:SS", help="limit after which the job goes on anew")
    parser.add_argument(
        "--save_s", type=int, default=300, help="seconds before the limit that it is told to save"
    )
    parser.add_argument("--name", help="default: the last part of the workdir")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="any option of sbatch, such as --sbatch=--partition=gpu; may be given again",
    )  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="print what would run, and end")
    return parser


def log_folder(job: Job) -> pathlib.Path:
    """Where the output goes: Slurm writes it, so it cannot lie in an object store."""
    workdir = files.absolute(job.workdir)
    if "://" in str(workdir):
        return pathlib.Path("slurm_logs").resolve() / job.name
    return pathlib.Path(workdir) / "logs"


def check(flags: argparse.Namespace) -> None:
    """Raises InputError for counts that cannot be."""
    names = ("nodes", "processes_per_node", "gpus_per_node", "cpus_per_process", "save_s")
    positive(flags, *names)
    if flags.gpus_per_node is not None and flags.gpus_per_node % flags.processes_per_node:
        raise InputError(
            f"--processes_per_node={flags.processes_per_node}: does not divide "
            f"--gpus_per_node={flags.gpus_per_node}; give 1, or as many as there are GPUs"
        )
    if flags.time is not None and not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d", flags.time):
        raise InputError(f"--time={flags.time}: needs HH:MM:SS or D-HH:MM:SS")
    for option in flags.sbatch:
        if not option.startswith("-"):
            raise InputError(f"--sbatch={option}: no option; e.g. --sbatch=--partition=gpu")


def render(flags: argparse.Namespace, job: Job) -> str:
    """The batch script."""
    logs = log_folder(job)
    options = {
        "job-name": flags.name or job.name,
        "nodes": flags.nodes,
        "ntasks-per-node": flags.processes_per_node,
        "cpus-per-task": flags.cpus_per_process,
        "gpus-per-node": flags.gpus_per_node,
        "time": flags.time,
        "signal": f"TERM@{flags.save_s}",
        "output": shlex.quote(str(logs / "slurm.log")),
        "open-mode": "append",
    }
    sbatch = [f"--{name}={value}" for name, value in options.items() if value is not None]
    task = """exec "$@" --coordinator="$COORDINATOR" --num_processes="$SLURM_NTASKS" \\
  --process_id="$SLURM_PROCID\""""
    if flags.gpus_per_node is not None:  # else JAX would give each process one
        each = flags.gpus_per_node // flags.processes_per_node
        first = f"$((SLURM_LOCALID * {each}))"
        last = f"$((SLURM_LOCALID * {each} + {each - 1}))"
        task = f"export JAX_LOCAL_DEVICE_IDS=$(seq -s, {first} {last})\n{task}"
    srun = {
        "cpus-per-task": flags.cpus_per_process,  # which srun does not take from sbatch
        "wait": flags.save_s,  # for the others, once one process has ended
        "output": logs / "process_%t.log",
        "open-mode": "append",
    }
    srun = [f"--{name}={value}" for name, value in srun.items() if value is not None]
    job = job.on("cpu" if flags.gpus_per_node is None else "gpu")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in [*sbatch, "--requeue", *flags.sbatch]),
            "",
            "# Process 0 is on the first node.",
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"export COORDINATOR=$host:$(({_FIRST_PORT} + SLURM_JOB_ID % {_NUM_PORTS}))",
            "export PYTHONUNBUFFERED=1",
            "",
            f"{shell(['srun', *srun])} bash -c '",
            f"{task}' task \\",
            f"  {shell(job.command(python=sys.executable))}",
            "code=$?",
            "",
            "# Told to stop, by its own exit code or before it trained: it goes on where it saved.",
            f"if [ $code = {PREEMPTED} ] || [ $code = {TERMINATED} ]; then",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
            "",
        ]
    )


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Submits the job of `words`; the exit code."""
    check(flags)
    job = check_job(words)
    script, logs = render(flags, job), log_folder(job)
    if flags.dry_run:
        print(shell(["mkdir", "-p", str(logs)]))
        print(f"sbatch <<'END'\n{script}END")
        return DONE
    sbatch = find_program("sbatch", "call this on a login node of a Slurm cluster, or --dry_run")
    made = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--workdir={job.workdir}: {e.strerror}; choose another") from None
    done = subprocess.run([sbatch, "--parsable"], input=script, text=True, capture_output=True)
    if done.returncode:
        for folder in made:
            folder.rmdir()
        raise InputError(f"sbatch refused the job: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    print(f"submitted job {number}; its state: squeue --job={number}")
    print(f"follow it: tail -F {shlex.quote(str(logs / 'process_0.log'))}")
    print(f"save and start again: scancel --signal=TERM {number}; end it: scancel {number}")
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
