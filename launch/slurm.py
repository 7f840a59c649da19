"""Submit a job to Slurm that saves before its time limit and requeues itself.

  python launch/slurm.py --nodes=4 --gpus_per_node=8 --cpus_per_process=64 --time=24:00:00 \\
    --sbatch=--partition=gpu -- --config=configs/pretrain.py:ViT-L/16,imagenet21k \\
    --workdir=/shared/runs/vit_l --config.data.data_dir=/shared/tensorflow_datasets

Run it on a login node, in a folder shared with the compute nodes, since they use the same Python.
By default each node runs one process, which uses all its GPUs. The output of the processes is
written to WORKDIR/logs, or to slurm_logs/NAME if the workdir is in an object store.

`-- study ...` submits all members of a study that can run now as one array, one task each. For the
report, run the command of the study itself afterwards (`python -m vit_jax.main study ...`):

  python launch/slurm.py --gpus_per_node=1 --cpus_per_process=8 -- study --config=quickstart \\
    --workdir=/shared/sweep --sweep=optimizer.peak_lr=1e-3,3e-3 --sweep=seed=0,1

The submitted script requeues the job whenever its processes have saved and ended with exit code 75:
before the time limit, on preemption by Slurm, or after `scancel --signal=TERM JOB`. `scancel JOB`
ends it for good.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from command_line import (
    add_common_flags,
    find_program,
    launcher_main,
    make_parser,
    positive,
    say,
    shell,
)
from environment import read_environment
from job import Job, check_data_travels, check_job, study_jobs

from vit_jax.base import files
from vit_jax.base.addresses import hide
from vit_jax.base.errors import InputError, shown
from vit_jax.job.exit_codes import DONE, PREEMPTED, TERMINATED

# Like JAX: ports above the ephemeral range, selected by the job id.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--processes_per_node", type=positive, default=1)
    parser.add_argument("--gpus_per_node", type=positive, help="default: none, i.e. run on CPU")
    parser.add_argument("--cpus_per_process", type=positive, help="default: Slurm's")
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit; the job then requeues")
    parser.add_argument("--save_s", type=positive, default=300,
                        help="seconds before the limit to start saving")  # fmt: skip
    parser.add_argument("--name", help="name of the job; default: last part of the workdir")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="any option of sbatch, such as --sbatch=--partition=gpu; repeatable",
    )  # fmt: skip
    add_common_flags(parser, "the script")
    return parser


def log_folder(job: Job) -> pathlib.Path:
    """Folder for the output, on disk, since Slurm writes it and cannot use an object store."""
    workdir = files.absolute(job.workdir)
    if "://" in str(workdir):
        return pathlib.Path("slurm_logs").resolve() / job.name
    return pathlib.Path(workdir) / "logs"


def check(flags: argparse.Namespace) -> None:
    """Raise InputError for impossible counts, times or options; warn of GPUs that would wait."""
    if flags.gpus_per_node is not None and flags.gpus_per_node % flags.processes_per_node:
        raise InputError(
            f"--processes_per_node={flags.processes_per_node}: does not divide "
            f"--gpus_per_node={flags.gpus_per_node}; give 1, or the number of GPUs"
        )
    if flags.time is not None and not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d", flags.time):
        raise InputError(f"--time={flags.time}: needs HH:MM:SS or D-HH:MM:SS")
    for option in flags.sbatch:
        if not option.startswith("-"):
            raise InputError(f"--sbatch={option}: not an option; e.g. --sbatch=--partition=gpu")
    gives_cpus = any(re.match(r"-c|--cpus-per-|--exclusive", option) for option in flags.sbatch)
    if flags.gpus_per_node is not None and flags.cpus_per_process is None and not gives_cpus:
        print(
            "warning: --cpus_per_process: not given; most clusters then give a process 1 CPU, "
            "too few to read the images of a GPU; e.g. 16 for each GPU",
            file=sys.stderr,
        )


def warn_of_missing(folders: Sequence[str]) -> None:
    """Warn of folders that this node lacks; compute nodes may have them."""
    for folder in folders:
        if not pathlib.Path(folder).expanduser().exists():
            print(f"warning: {folder}: does not exist here; the job ends at its start if the "
                  "compute nodes have none either", file=sys.stderr)  # fmt: skip


_SCRIPT = """\
#!/bin/bash
{options}

# Process 0 is on the first node.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COORDINATOR=$host:$(({first_port} + SLURM_JOB_ID % {num_ports}))
export PYTHONUNBUFFERED=1

{task}

{srun} --output="$output" --open-mode=append bash -c '
{devices}exec "$@" --coordinator="$COORDINATOR" --num_processes="$SLURM_NTASKS" \\
  --process_id="$SLURM_PROCID"' task \\
  "${{command[@]}}"
code=$?

# Told to stop, after saving or before training: run again, to resume.
# Slurm calls the last task of an array by the number of the array, which would requeue all tasks.
if [ $code = {preempted} ] || [ $code = {terminated} ]; then
  task=${{SLURM_ARRAY_TASK_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
  scontrol requeue "${{task:-$SLURM_JOB_ID}}"
fi
exit $code
"""


def render(flags: argparse.Namespace, job: Job, members: Sequence[Job] = ()) -> str:
    """Make the batch script of a job, or of an array with one task for each of `members`.

    For an array, `job` is the study; its workdir names the array and holds the array's own log.
    """
    log = _pattern(job, "slurm_%a.log" if members else "slurm.log")
    options = {
        "job-name": shlex.quote(flags.name or job.name),
        "array": f"0-{len(members) - 1}" if members else None,
        "nodes": flags.nodes,
        "ntasks-per-node": flags.processes_per_node,
        "cpus-per-task": flags.cpus_per_process,
        "gpus-per-node": flags.gpus_per_node,
        "time": flags.time,
        "signal": f"TERM@{flags.save_s}",
        "output": shlex.quote(log),
        "open-mode": "append",
    }
    # srun does not inherit the CPUs from sbatch; it waits for the others once a process has ended.
    srun = {"cpus-per-task": flags.cpus_per_process, "wait": flags.save_s}
    task = "\n".join(_what_runs(flags, job))
    if members:
        cases = [f"{i}) {'; '.join(_what_runs(flags, own))};;" for i, own in enumerate(members)]
        task = "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])
    devices = ""
    if flags.gpus_per_node is not None:  # otherwise JAX would give each process one GPU
        each = flags.gpus_per_node // flags.processes_per_node
        first = f"$((SLURM_LOCALID * {each}))"
        last = f"$((SLURM_LOCALID * {each} + {each - 1}))"
        devices = f"export JAX_LOCAL_DEVICE_IDS=$(seq -s, {first} {last})\n"
    words = [*_as_options(options), "--requeue", *flags.sbatch]
    for word in words:
        if not word.isprintable():  # the rest would be a command of the script
            raise InputError(f"{shown(word)}: has a line break or control character; leave it out")
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {word}" for word in words), task=task, devices=devices,
        srun=shell(["srun", *_as_options(srun)]), first_port=_FIRST_PORT, num_ports=_NUM_PORTS,
        preempted=PREEMPTED, terminated=TERMINATED,
    )  # fmt: skip


def _pattern(job: Job, file: str) -> str:
    """The pattern of a log's name; Slurm fills in `file`, but no % of the folder."""
    return f"{str(log_folder(job)).replace('%', '%%')}/{file}"


def _as_options(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _what_runs(flags: argparse.Namespace, job: Job) -> tuple[str, str]:
    """Settings of the shell's `output` and `command` for the processes of a job."""
    on_platform = job.on("cpu" if flags.gpus_per_node is None else "gpu")
    output = shell([_pattern(job, "process_%t.log")])
    return f"output={output}", f"command=({shell(on_platform.command(python=sys.executable))})"


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Submit the job of `words`, or the members of a study; return the exit code."""
    check(flags)
    members: Sequence[Job] = ()
    if words[:1] == ["study"]:
        workdir, members = study_jobs(words)
        extras = {extra for member in members for extra in member.extras}
        data = dict.fromkeys(data for member in members for data in member.data)
        job = Job(tuple(words), None, workdir, extras=tuple(sorted(extras)), data=tuple(data))
    else:
        job = check_job(words)
    script, logs = render(flags, job, members), [log_folder(job), *map(log_folder, members)]
    variables = read_environment(flags, job)
    of_nodes = {"TFDS_DATA_DIR": "~/tensorflow_datasets"} | os.environ | variables.all
    folders = check_data_travels(
        job, "a compute node", of_nodes, lambda folder: "://" not in folder, "give a shared folder"
    )
    warn_of_missing(folders)
    if flags.dry_run:
        print(shell(["mkdir", "-p", *map(str, logs)]))
        say(f"{variables.shown}sbatch <<'END'\n{script}END")
        return DONE
    sbatch = find_program("sbatch", "run this on a login node of a Slurm cluster, or use --dry_run")
    made = _make_folders(job, logs)
    done = subprocess.run(  # sbatch gives its environment to the job
        [sbatch, "--parsable"], input=script, text=True, capture_output=True,
        env=os.environ | variables.all,
    )  # fmt: skip
    if done.returncode:
        for folder in reversed(made):
            folder.rmdir()
        raise InputError(f"sbatch rejected the job: {done.stderr.strip()}")
    _say_submitted(done.stdout.strip().partition(";")[0], job, members)
    return DONE


def _make_folders(job: Job, folders: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Makes `folders`; returns those that were not there, each after the one that it is in.

    Raises:
      InputError: one cannot be made.
    """
    made: list[pathlib.Path] = []
    try:
        for folder in folders:
            made += [f for f in (*reversed(folder.parents), folder) if not f.exists()]
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--workdir={job.workdir}: {e.strerror}; choose another folder") from None
    return made


def _say_submitted(number: str, job: Job, members: Sequence[Job]) -> None:
    """Says what to do with the submitted job; notes in the study's workdir what was handed over."""
    print(f"submitted job {number}; state: squeue --job={number}")
    if members:
        from vit_jax.studies.running import record_handed_over  # whose imports take seconds

        names = [pathlib.PurePath(member.workdir).name for member in members]
        commands = [
            hide(shell(["python", "-m", "vit_jax.main", *member.words])) for member in members
        ]
        handed_over = dict(zip(names, commands, strict=True))
        record_handed_over(files.absolute(job.workdir), handed_over)
        print(f"an array of {len(members)} runs: {', '.join(names)}")
        words = [word for word in job.words if word != "--again"]
        report = shell(["python", "-m", "vit_jax.main", *words])
        say(f"once they have ended, this goes on with the study, and reports: {report}")
    follow = log_folder(members[0] if members else job) / "process_0.log"
    print(f"follow: tail -F {shlex.quote(str(follow))}")
    print(f"save and requeue: scancel --signal=TERM {number}; end: scancel {number}")


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
