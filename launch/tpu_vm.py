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
import functools
import hashlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import slices
import tpus
from command_line import (
    ROOT,
    add_cluster_flags,
    add_common_flags,
    find_program,
    launcher_main,
    make_parser,
    name_of_job,
    say,
    shell,
)
from environment import WANDB_KEY, Environment, as_exports, read_environment
from job import Job, check_config_travels, check_data_travels, check_job, is_on_own_disk
from slices import (
    Gcloud,
    PreemptedError,
    call,
    call_and_say,
    check_active,
    find_state,
    on_active,
    wait_until_active,
)

from vit_jax.base.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, INTERRUPTED

_SENT = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "vit_jax", "configs", "launch")
_FOLLOW = "tail --lines=100 --follow vit_jax/job.log"  # on a worker
_WORKER = "vit_jax/launch/worker.sh"  # on a worker, relative to the home directory
ACTIONS = ("create", "run", "status", "logs", "delete")


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, f"{{{','.join(ACTIONS)}}} ")
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--name", type=name_of_job, required=True, help="of the queued resource")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", help="default: gcloud's")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper, but may be preempted")
    tier.add_argument("--reserved", action="store_true", help="use the project's reservation")
    parser.add_argument("--runtime", help="runtime version of the VMs; default: the one for JAX")
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
    add_cluster_flags(parser, max_restarts=3)
    add_common_flags(parser, "the commands")
    return parser


class JobState(NamedTuple):
    """A worker's answer to `ask`.

    words: arguments of the job, after --; None if none was started.
    running: whether it is running.
    code: its exit code; None while it runs, or if its VM was restarted meanwhile.
    log: its output since the offset that was asked for.
    variables: digest of its variables; None if no job was started.
    """

    words: str | None = None
    running: bool = False
    code: int | None = None
    log: bytes = b""
    variables: str | None = None


def ask(offset: int) -> str:
    """Command, for a worker, that prints the job's state, and its log from byte `offset`."""
    return f"[ ! -e {_WORKER} ] || {_WORKER} ask {offset}"


def look(gcloud: Gcloud, offset: int) -> JobState:
    """State of the job on worker 0 of slice 0, and its log from `offset`.

    Raises:
      InputError: if the worker is unreachable.
    """
    answer = call(gcloud.ssh(ask(offset), "0", "0"), "worker 0 is unreachable")
    head, _, log = answer.partition(b"\n")
    found = re.fullmatch(r"job (\w+): (yes|no) (-|\d+) (.*)", head.decode(errors="replace"))
    if found is None:
        return JobState()
    digest, running, code, words = found.groups()
    return JobState(words, running == "yes", None if code == "-" else int(code), log, digest)


def digest_of(variables: Environment) -> str:
    """A short digest of the variables of --env, by which a running job is told from another.

    Leaves out W&B's key, which comes from the shell that calls the launcher.
    """
    given = {name: value for name, value in variables.all.items() if name != WANDB_KEY}
    return hashlib.sha256(as_exports(dict(sorted(given.items()))).encode()).hexdigest()[:8]


def ways_to_start(
    gcloud: Gcloud,
    flags: argparse.Namespace,
    job: Job,
    variables: Environment,
    folder: pathlib.PurePath,
) -> Iterator[tuple[list[str], str]]:
    """The commands that start a job on all workers, each with what it does.

    `folder`: holds the file with the variables, and gets the packed code.
    """
    code, extras = f"{flags.name}.tar.gz", ",".join(sorted({"tpu", "gcs", *job.extras}))
    # Remove files that are no longer part of the code.
    unpack = (
        "mkdir -p vit_jax && (cd vit_jax && rm -rf vit_jax configs launch) && "
        f"tar --extract --gzip --file={code} --directory=vit_jax && {_WORKER} install {extras}"
    )
    pack = ["tar", "--create", "--gzip", f"--file={folder / code}", f"--directory={ROOT}",
            "--exclude=__pycache__", *_SENT]  # fmt: skip
    yield pack, "packing the code"
    yield gcloud.copy(str(folder / code)), "copying it to all workers"
    yield gcloud.ssh(unpack), "installing it on all workers"
    if variables.all:
        path = folder / _variables_file(flags)
        # It may be repeated, as it is on all workers if one of them fails.
        take = (
            f"if [ -e {path.name} ]; then install -m 600 {path.name} vit_jax/job.env && "
            f"rm {path.name}; else [ -e vit_jax/job.env ]; fi"
        )
        names = ", ".join(variables.all)
        yield gcloud.copy(str(path)), f"copying a file that sets {names} to all workers"
        yield gcloud.ssh(take), "storing it there"
    started = f"{_WORKER} start {digest_of(variables)} {shlex.join(job.words)}"
    yield gcloud.ssh(started), "starting the job"


def _variables_file(flags: argparse.Namespace) -> str:
    return f"{flags.name}.env"


def start_unless_running(
    gcloud: Gcloud, flags: argparse.Namespace, job: Job, variables: Environment
) -> int:
    """Start the job on all workers unless it runs; return where its log begins.

    Raises:
      InputError: if another job runs there, or a command keeps failing.
      PreemptedError: if the slices are gone.
    """
    before = on_active(gcloud, lambda: look(gcloud, 0))
    if before.running:
        remedy = f"delete it ({delete_command(flags)}), or use another --name"
        if before.words != " ".join(job.words):
            raise InputError(
                f"--name={flags.name}: another job is running there ({before.words}); {remedy}"
            )
        if before.variables != digest_of(variables):
            raise InputError(
                f"--env: the job is running on --name={flags.name} with other variables, which it "
                f"keeps; give the same --env to follow it, {remedy}"
            )
        return 0
    # Only this user can write to the folder: a link in its place would lead the files elsewhere.
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        path = folder / _variables_file(flags)
        path.touch(0o600)  # as scp keeps it
        path.write_text(as_exports(variables.all))
        for command, what in ways_to_start(gcloud, flags, job, variables, folder):
            on_active(gcloud, functools.partial(call_and_say, command, what))
    return len(before.log)


def follow(gcloud: Gcloud, offset: int) -> tuple[int, int]:
    """Show the log from `offset` until the job ends; return its exit code and last logged step.

    Raises:
      InputError: if the worker is unreachable although the slices are active.
      PreemptedError: if the job was preempted.
    """
    step, line = 0, b""
    while True:
        state = on_active(gcloud, functools.partial(look, gcloud, offset))
        offset += len(state.log)
        sys.stdout.buffer.write(state.log)
        sys.stdout.flush()
        *lines, line = (line + state.log).split(b"\n")
        for found in filter(None, (re.match(rb"step ([\d,]+)[/:]", text) for text in lines)):
            step = max(step, int(found[1].replace(b",", b"")))
        if not state.running:
            if state.code is None:
                raise PreemptedError
            return state.code, step
        check_active(gcloud)
        time.sleep(slices.POLL_S)


def keep_going(
    gcloud: Gcloud, flags: argparse.Namespace, tpu: tpus.Slice, job: Job, variables: Environment
) -> int:
    """Keep the job running until it ends; return its exit code."""
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
            delete = delete_command(flags)
            print(f"the job ended with exit code {code}; to delete the slices: {delete}")
            return code
        failures += 1
        print(f"failed with exit code {code}; restart {failures} of {flags.max_restarts}",
              flush=True)  # fmt: skip


def delete_command(flags: argparse.Namespace) -> str:
    """Command, as typed in a shell, that deletes the same slices."""
    words = ["python", "launch/tpu_vm.py", "delete", f"--name={flags.name}", f"--zone={flags.zone}"]
    return shell([*words, *([] if flags.project is None else [f"--project={flags.project}"])])


def planned_commands(
    gcloud: Gcloud,
    flags: argparse.Namespace,
    tpu: tpus.Slice | None,
    job: Job | None,
    variables: Environment | None,
) -> Iterator[tuple[list[str], str]]:
    """Commands of an action, each with a remark, for --dry_run."""
    if flags.action == "create":
        yield gcloud.create(tpu), ""
    elif flags.action == "run":
        if not flags.no_plan and (plan := tpus.plan_command(job, flags)):
            yield plan, "unless the plan is cached"
        yield gcloud.describe(), "until the slices are active, then every 30 s"
        yield gcloud.create(tpu), "if there are no slices"
        folder = pathlib.PurePath("FOLDER")
        yield (
            ["mkdir", "-m", "700", str(folder)],
            "a temporary folder of this user only",
        )
        yield from ways_to_start(gcloud, flags, job.on("tpu"), variables, folder)
        yield gcloud.ssh(ask(0), "0", "0"), "every 30 s, until the job ends"
        yield gcloud.delete(), "if the slices are preempted; then again from the start"
    elif flags.action == "status":
        yield gcloud.describe(), ""
        yield gcloud.ssh(ask(0), "0", "0"), "if the slices are active"
    elif flags.action == "logs":
        yield gcloud.ssh(_FOLLOW, flags.node, flags.worker), ""
    else:
        yield gcloud.delete(), ""


def status(gcloud: Gcloud) -> int:
    """Print the state of the slices and of the job."""
    state = find_state(gcloud)["state"]
    print(f"slices: {state}", flush=True)
    job = look(gcloud, 0) if state == "ACTIVE" else JobState()
    if job.words is not None:
        ended = "ended" if job.code is None else f"ended with exit code {job.code}"
        say(f"job: {'running' if job.running else ended}: {job.words}")
        print(b"\n".join(job.log.splitlines()[-5:]).decode(errors="replace"))
    elif state == "ACTIVE":
        print("job: none")
    return DONE


def check(
    flags: argparse.Namespace, words: Sequence[str]
) -> tuple[tpus.Slice | None, Job | None, Environment | None]:
    """The slice, the job and the variables of an action.

    Raises:
      InputError: if flags contradict each other.
    """
    if flags.action != "run" and words:
        raise InputError(f"{flags.action}: takes no job; only run does")
    if flags.action not in ("create", "run"):
        return None, None, None
    if flags.topology is None:
        raise InputError("--topology: missing; e.g. --topology=v5e:4x4")
    tpu = tpus.find_tpu_slice(flags)
    if tpus.GENERATIONS[tpu.chip].gcloud is None:
        raise InputError(
            f"--topology={flags.topology}: not available as Cloud TPU VMs; use launch/kubernetes.py"
        )
    if flags.action == "create":
        return tpu, None, None
    job = check_job(words)
    check_config_travels(job, "a worker")
    if "://" not in job.workdir and not job.workdir.startswith("/"):
        raise InputError(
            f"--workdir={job.workdir}: would be a different folder on each worker, and lost with "
            "it; give gs://bucket/..., or the full path of a disk that all workers mount"
        )

    def may_be_mounted(folder: str) -> bool:
        return folder.startswith("/") and not (os.path.exists(folder) and is_on_own_disk(folder))

    variables = read_environment(flags, job)
    remedy = "give the full path of a disk that all workers mount"
    check_data_travels(job, "a worker", variables.all, may_be_mounted, remedy)
    return tpu, job, variables


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Perform the action of `flags` with the job of `words`; return the exit code."""
    tpu, job, variables = check(flags, words)
    gcloud = Gcloud(flags)
    if flags.dry_run:
        planned = planned_commands(gcloud, flags, tpu, job, variables)
        say("\n".join(f"# {remark}\n{shell(c)}" if remark else shell(c) for c, remark in planned))
        return DONE
    find_program("gcloud", "install the Google Cloud SDK, or use --dry_run")
    if flags.action == "create":
        call_and_say(gcloud.create(tpu), "requesting slices")
    elif flags.action == "delete":
        call_and_say(gcloud.delete(), "deleting the slices")
    elif flags.action == "status":
        return status(gcloud)
    elif flags.action == "logs":
        return subprocess.run(gcloud.ssh(_FOLLOW, flags.node, flags.worker)).returncode
    else:
        if not flags.no_plan and (code := tpus.check_plan(job, flags)):
            return code
        try:
            return keep_going(gcloud, flags, tpu, job.on("tpu"), variables)
        except KeyboardInterrupt:
            print("the job keeps running; reconnect with the same command, end it with delete",
                  file=sys.stderr)  # fmt: skip
            return INTERRUPTED
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
