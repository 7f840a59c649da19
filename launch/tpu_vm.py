"""Run a job on Cloud TPU VMs: request slices, start the job on all workers, keep it running.

  python launch/tpu_vm.py run --name=vit-l --zone=us-west4-a --topology=v5e:4x4 --spot -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l \\
    --config.data.data_dir=gs://bucket/tensorflow_datasets

  create   requests the slices as a queued resource
  run      requests the slices if there are none, installs the repository's code on every worker,
           starts the job and shows the output of process 0. If slices are preempted, it requests
           new ones and the job resumes there. The same command reconnects to a running job; Ctrl-C
           leaves it running
  status   shows the state of the slices and of the job
  logs     follows the log of a worker
  delete   deletes the slices and the job on them

All actions use the gcloud client with its configured account and project.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import slices
import tpus
from command_line import check_name, find_program, launcher_main, make_parser, positive, shell
from environment import Environment, define_env_flag, read_environment
from job import Job, check_config_travels, check_data_travels, check_job, is_on_own_disk
from slices import (
    Gcloud,
    PreemptedError,
    call,
    call_with_retry,
    check_active,
    query,
    retry,
    state_of,
    wait_until_active,
)
from workers import (
    JobState,
    archive,
    ask,
    digest_of,
    pack,
    read_answer,
    start,
    take_variables,
    unpack,
    variables_file,
    write_variables,
)  # fmt: skip

from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, INTERRUPTED

ACTIONS = ("create", "run", "status", "logs", "delete")


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, f"{{{','.join(ACTIONS)}}} ")
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--name", required=True, help="name of the queued resource")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", help="default: gcloud's")
    parser.add_argument("--topology", metavar="SLICE", help="for create and run, e.g. v5e:4x4")
    parser.add_argument("--num_slices", type=int, default=1, help="slices connected by DCN")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper, but may be preempted")
    tier.add_argument("--reserved", action="store_true", help="use the project's reservation")
    parser.add_argument("--runtime", help="runtime version of the VMs; default: the one for JAX")
    parser.add_argument("--service_account", help="account that may write to the workdir")
    parser.add_argument(
        "--create_flag", action="append", default=[], metavar="FLAG",
        help="any flag of gcloud's create, e.g. --create_flag=--subnetwork=NAME; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--ssh_flag", action="append", default=[], metavar="FLAG",
        help="any flag of gcloud's ssh and scp, e.g. --ssh_flag=--tunnel-through-iap; repeatable",
    )  # fmt: skip
    parser.add_argument("--node", default="0", help="slice whose logs to show, from 0")
    parser.add_argument("--worker", default="0", help="worker of that slice, from 0")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=3,
        help="limit of restarts after failures, without progress in between",
    )
    parser.add_argument("--no_plan", action="store_true", help="do not check that the job fits")
    define_env_flag(parser)
    parser.add_argument("--dry_run", action="store_true", help="print the commands and exit")
    return parser


def look(gcloud: Gcloud, offset: int) -> JobState:
    """State of the job on worker 0 of slice 0, and its log from `offset`.

    Raises:
      InputError: if the worker is unreachable.
    """
    done = subprocess.run(gcloud.ssh(ask(offset), "0", "0"), capture_output=True)
    if done.returncode:
        raise InputError(
            f"worker 0 is unreachable: {done.stderr.decode(errors='replace').strip()}; try: "
            f"{shell(gcloud.ssh('true', '0', '0'))}"
        )
    return read_answer(done.stdout)


def look_with_retry(gcloud: Gcloud, offset: int) -> JobState:
    """Run `look`; retry while the worker is unreachable although the slices are active.

    Raises:
      InputError: if it stays unreachable.
      PreemptedError: if the slices are gone.
    """
    return retry(lambda: look(gcloud, offset), lambda: check_active(gcloud))


def follow(gcloud: Gcloud, offset: int) -> tuple[int, int]:
    """Show the log from `offset` until the job ends; return its exit code and last logged step.

    Raises:
      InputError: if the worker is unreachable although the slices are active.
      PreemptedError: if the job was preempted.
    """
    step, line = 0, b""
    while True:
        state = look_with_retry(gcloud, offset)
        offset += len(state.log)
        sys.stdout.buffer.write(state.log)
        sys.stdout.flush()
        *lines, line = (line + state.log).split(b"\n")
        step = max([step, *map(step_of, lines)])
        if not state.running:
            if state.code is None:
                raise PreemptedError
            return state.code, step
        check_active(gcloud)
        time.sleep(slices.POLL_S)


def step_of(line: bytes) -> int:
    """The training step in a line of the log; 0 if it has none."""
    found = re.match(rb"step ([\d,]+)[/:]", line)
    return int(found[1].replace(b",", b"")) if found else 0


def start_unless_running(
    gcloud: Gcloud, flags: argparse.Namespace, job: Job, variables: Environment
) -> int:
    """Start the job on all workers unless it runs; return where its log begins.

    Raises:
      InputError: if another job runs there, or a command keeps failing.
      PreemptedError: if the slices are gone.
    """
    path, words, digest = archive(gcloud.name), job.words, digest_of(variables)
    before = look_with_retry(gcloud, 0)
    if before.running:
        _check_same_job(flags, before, words, digest)
        return 0
    call(pack(path), "packing the code")
    call_with_retry(gcloud, gcloud.copy(path), "copying it to all workers")
    installing = gcloud.ssh(unpack(path, job.extras))
    call_with_retry(gcloud, installing, "installing it on all workers")
    if variables.all:
        path = variables_file(gcloud.name)
        with write_variables(path, variables):
            call_with_retry(gcloud, gcloud.copy(path), "copying its variables to all workers")
        call_with_retry(gcloud, gcloud.ssh(take_variables(path)), "storing them there")
    call_with_retry(gcloud, gcloud.ssh(start(words, digest)), "starting the job")
    return len(before.log)


def _check_same_job(
    flags: argparse.Namespace, before: JobState, words: Sequence[str], digest: str
) -> None:
    """Raise InputError unless the running job has these words and the variables of `digest`."""
    remedy = f"delete it ({delete_command(flags)}), or use another --name"
    if before.words != " ".join(words):
        raise InputError(
            f"--name={flags.name}: another job is running there ({before.words}); {remedy}"
        )
    if before.variables != digest:
        raise InputError(
            f"--env: the job is running on --name={flags.name} with other variables, which it "
            f"keeps; give the same --env to follow it, {remedy}"
        )


def keep_going(
    gcloud: Gcloud,
    flags: argparse.Namespace,
    tpu: tpus.Slice,
    job: Job,
    variables: Environment,
) -> int:
    """Keep the job running until it ends; return its exit code."""
    job = job.on("tpu")
    failures, furthest = 0, 0
    while True:
        wait_until_active(gcloud, tpu)
        try:
            code, step = follow(gcloud, start_unless_running(gcloud, flags, job, variables))
        except PreemptedError:
            print("preempted; the job will resume from its last save", flush=True)
            continue
        if step > furthest:
            failures, furthest = 0, step
        if code in (DONE, INPUT_WRONG, INTERRUPTED) or failures >= flags.max_restarts:
            print(
                f"the job ended with exit code {code}; to delete the slices: "
                f"{delete_command(flags)}"
            )
            return code
        failures += 1
        print(f"failed with exit code {code}; restart {failures} of {flags.max_restarts}",
              flush=True)  # fmt: skip


def delete_command(flags: argparse.Namespace) -> str:
    """Command, as typed in a shell, that deletes the same slices."""
    words = ["python", "launch/tpu_vm.py", "delete", f"--name={flags.name}", f"--zone={flags.zone}"]
    return shell([*words, *([] if flags.project is None else [f"--project={flags.project}"])])


def steps(
    gcloud: Gcloud, flags: argparse.Namespace, tpu: tpus.Slice | None, job: Job | None
) -> Iterator[tuple[str, list[str]]]:
    """Commands of an action, each with a remark, for --dry_run."""
    if flags.action == "create":
        yield "", gcloud.create(tpu)
    elif flags.action == "run":
        plan = tpus.plan_command(job, flags.topology, flags.num_slices)
        if plan and not flags.no_plan:
            yield "unless the plan is cached", plan
        path = archive(flags.name)
        yield "until the slices are active, then every 30 s", gcloud.describe()
        yield "if there are no slices", gcloud.create(tpu)
        yield "", pack(path)
        yield "", gcloud.copy(path)
        yield "", gcloud.ssh(unpack(path, job.extras))
        variables = read_environment(flags, job)
        names = ", ".join(variables.all)
        if names:
            path = variables_file(flags.name)
            yield f"a file that sets {names}", gcloud.copy(path)
            yield "", gcloud.ssh(take_variables(path))
        yield "", gcloud.ssh(start(job.on("tpu").words, digest_of(variables)))
        yield "every 30 s, until the job ends", gcloud.ssh(ask(0), "0", "0")
        yield "if the slices are preempted; then again from the start", gcloud.delete()
    elif flags.action == "status":
        yield "", gcloud.describe()
        yield "if the slices are active", gcloud.ssh(ask(0), "0", "0")
    elif flags.action == "logs":
        yield "", follow_log(gcloud, flags)
    else:
        yield "", gcloud.delete()


def follow_log(gcloud: Gcloud, flags: argparse.Namespace) -> list[str]:
    """Command that shows a worker's log and follows it."""
    return gcloud.ssh("tail --lines=100 --follow vit_jax/job.log", flags.node, flags.worker)


def status(gcloud: Gcloud) -> int:
    """Print the state of the slices and of the job."""
    state = state_of(query(gcloud))
    print(f"slices: {state}", flush=True)
    if state == "ACTIVE":
        job = look(gcloud, 0)
        if job.words is None:
            print("job: none")
        else:
            ended = "ended" if job.code is None else f"ended with exit code {job.code}"
            print(f"job: {'running' if job.running else ended}: {job.words}")
            print(b"\n".join(job.log.splitlines()[-5:]).decode(errors="replace"))
    return DONE


def check(flags: argparse.Namespace, words: Sequence[str]) -> tuple[tpus.Slice | None, Job | None]:
    """The slice and the job of an action.

    Raises:
      InputError: if flags contradict each other.
    """
    check_name(flags.name)
    if flags.action != "run" and words:
        raise InputError(f"{flags.action}: takes no job; only run does")
    if flags.action not in ("create", "run"):
        return None, None
    positive(flags, "num_slices")
    if flags.topology is None:
        raise InputError("--topology: missing; e.g. --topology=v5e:4x4")
    tpu = tpus.find_tpu_slice(flags.topology, flags.num_slices)
    if tpus.GENERATIONS[tpu.chip].gcloud is None:
        raise InputError(
            f"--topology={flags.topology}: not available as Cloud TPU VMs; use launch/kubernetes.py"
        )
    if flags.action == "create":
        return tpu, None
    job = check_job(words)
    check_config_travels(job, "a worker")
    if "://" not in job.workdir and not job.workdir.startswith("/"):
        raise InputError(
            f"--workdir={job.workdir}: would be a different folder on each worker, and lost with "
            "it; give gs://bucket/..., or the full path of a disk that all workers mount"
        )

    def may_be_mounted(folder: str) -> bool:
        return folder.startswith("/") and not (os.path.exists(folder) and is_on_own_disk(folder))

    remedy = "give the full path of a disk that all workers mount"
    variables = read_environment(flags, job).all
    check_data_travels(job, "a worker", variables, may_be_mounted, remedy)
    return tpu, job


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Perform the action of `flags` with the job of `words`; return the exit code."""
    tpu, job = check(flags, words)
    gcloud = Gcloud(flags)
    if flags.dry_run:
        for remark, command in steps(gcloud, flags, tpu, job):
            print(f"# {remark}\n{shell(command)}" if remark else shell(command))
        return DONE
    find_program("gcloud", "install the Google Cloud SDK, or use --dry_run")
    if flags.action == "create":
        call(gcloud.create(tpu), "requesting slices")
    elif flags.action == "delete":
        call(gcloud.delete(), "deleting the slices")
    elif flags.action == "status":
        return status(gcloud)
    elif flags.action == "logs":
        return subprocess.run(follow_log(gcloud, flags)).returncode
    else:
        if not flags.no_plan and (code := tpus.check_plan(job, flags.topology, flags.num_slices)):
            return code
        try:
            return keep_going(gcloud, flags, tpu, job, read_environment(flags, job))
        except KeyboardInterrupt:
            print("the job keeps running; reconnect with the same command, end it with delete",
                  file=sys.stderr)  # fmt: skip
            return INTERRUPTED
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
