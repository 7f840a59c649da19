"""Runs a job on Cloud TPU VMs: asks for them, starts it on all workers, keeps it going.

  python launch/tpu_vm.py run --name=vit-l --zone=us-west4-a --topology=v5e:4x4 --spot -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l

  create   asks for the slices as a queued resource
  run      does so unless they are there, copies the repository's code to every worker, installs it,
           starts the job and shows what process 0 says; where slices are preempted it asks for new
           ones, and the job resumes there. Called again it goes on where it was; Ctrl-C leaves the
           job running
  status   says how the slices and the job are
  logs     follows what a worker says
  delete   gives the slices back, and ends what runs there

All by the gcloud client, with the account and the project that it is set to.
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tpus
from command_line import ROOT, check_name, find_program, launcher_main, make_parser, positive, shell
from job import Job, check_config_travels, check_job

from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, INTERRUPTED

ACTIONS = ("create", "run", "status", "logs", "delete")
_SENT = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "vit_jax", "configs", "launch")
_WORKER = "vit_jax/launch/worker.sh"  # on a worker, in its home directory
_POLL_S = 30
_TRIES = 10  # of what the network may fail, with such pauses


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, f"{{{','.join(ACTIONS)}}} ")
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--name", required=True, help="of the queued resource")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project", help="default: as gcloud is set")
    parser.add_argument("--topology", metavar="SLICE", help="for create and run, e.g. v5e:4x4")
    parser.add_argument("--num_slices", type=int, default=1, help="joined over DCN")
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--spot", action="store_true", help="cheaper, may be preempted")
    tier.add_argument("--reserved", action="store_true", help="of the project's reservation")
    parser.add_argument("--runtime", help="system of the VMs; default: the topology's for JAX")
    parser.add_argument("--service_account", help="that may write to the workdir")
    parser.add_argument(
        "--create_flag", action="append", default=[], metavar="FLAG",
        help="any flag of gcloud's create, e.g. --create_flag=--subnetwork=NAME; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--ssh_flag", action="append", default=[], metavar="FLAG",
        help="any of its ssh and scp, e.g. --ssh_flag=--tunnel-through-iap; may be repeated",
    )  # fmt: skip
    parser.add_argument("--node", default="0", help="slice whose logs to show, from 0")
    parser.add_argument("--worker", default="0", help="worker of it, from 0")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=3,
        help="of run, after failures, since it came further than ever",
    )
    parser.add_argument("--no_plan", action="store_true", help="do not check that the job fits")
    parser.add_argument("--dry_run", action="store_true", help="print what would run, and end")
    return parser


class Gcloud:
    """Commands of the gcloud client about one queued resource."""

    def __init__(self, flags: argparse.Namespace):
        self.name, self._flags = flags.name, flags
        self._where = [f"--zone={flags.zone}"]
        if flags.project is not None:
            self._where.append(f"--project={flags.project}")

    def _command(self, verb: str, *words: str) -> list[str]:
        group = ["gcloud", "compute", "tpus", "queued-resources", verb]
        return [*group, *words, *self._where, "--quiet"]

    def create(self, tpu: tpus.Slice) -> list[str]:
        """Asks for the slices."""
        flags, generation = self._flags, tpus.GENERATIONS[tpu.chip]
        count = tpu.num_chips * generation.cores_per_chip
        words = [flags.name, f"--accelerator-type={generation.gcloud}-{count}"]
        words.append(f"--runtime-version={flags.runtime or generation.runtime}")
        if flags.num_slices == 1:
            words.append(f"--node-id={flags.name}")
        else:
            words += [f"--node-count={flags.num_slices}", f"--node-prefix={flags.name}"]
        words += [f"--{tier}" for tier in ("spot", "reserved") if getattr(flags, tier)]
        if flags.service_account is not None:
            words.append(f"--service-account={flags.service_account}")
            words.append("--scopes=https://www.googleapis.com/auth/cloud-platform")
        return self._command("create", *words, *flags.create_flag)

    def describe(self) -> list[str]:
        return self._command("describe", self._flags.name, "--format=json")

    def delete(self) -> list[str]:
        """Gives them back, with the VMs."""
        return self._command("delete", self._flags.name, "--force")

    def copy(self, path: str) -> list[str]:
        """Copies a file to the home directory of every worker."""
        everywhere = ["--node=all", "--worker=all"]
        return self._command(
            "scp", path, f"{self._flags.name}:", *everywhere, *self._flags.ssh_flag
        )

    def ssh(self, command: str, node: str = "all", worker: str = "all") -> list[str]:
        """Runs a command on workers."""
        return self._command(
            "ssh", self._flags.name, f"--node={node}", f"--worker={worker}",
            f"--command={command}", *self._flags.ssh_flag,
        )  # fmt: skip


def archive(name: str) -> str:
    """Where the code is packed on this host."""
    return str(pathlib.Path(tempfile.gettempdir()) / f"{name}.tar.gz")


def pack(path: str) -> list[str]:
    """The command that packs the code."""
    return ["tar", "--create", "--gzip", f"--file={path}", f"--directory={ROOT}",
            "--exclude=__pycache__", *_SENT]  # fmt: skip


def unpack(path: str) -> str:
    """The command of a worker that unpacks the code and installs it."""
    name = shlex.quote(pathlib.Path(path).name)
    return (
        # What is no longer in the code must not be found in it.
        "mkdir -p vit_jax && (cd vit_jax && rm -rf vit_jax configs launch) && "
        f"tar --extract --gzip --file={name} --directory=vit_jax && "
        f"{_WORKER} install"
    )


def start(words: Sequence[str]) -> str:
    """The command of a worker that starts the job, and leaves it running."""
    return f"{_WORKER} start {shlex.join(words)}"


def ask(offset: int) -> str:
    """The command of a worker that says how the job is, and its log from byte `offset`."""
    return f"[ ! -e {_WORKER} ] || {_WORKER} ask {offset}"


class JobState(NamedTuple):
    """What `ask` is answered.

    words: of the job behind --; None: none was started there.
    running: whether it runs.
    code: its exit code; None while it runs, or when its VM was restarted under it.
    log: what it has said since.
    """

    words: str | None
    running: bool
    code: int | None
    log: bytes


def read_answer(answer: bytes) -> JobState:
    """The state of a job by the answer of a worker."""
    head, _, log = answer.partition(b"\n")
    if not head.startswith(b"job: "):
        return JobState(None, False, None, b"")
    _, running, code, words = head.decode().split(" ", 3)
    return JobState(words, running == "yes", None if code == "-" else int(code), log)


# The actions


class PreemptedError(Exception):
    """The slices are no longer there, or their VMs were restarted."""


def query(gcloud: Gcloud) -> dict[str, Any] | None:
    """What `describe` answers; None: there is no such queued resource.

    Raises:
      InputError: gcloud refuses, or cannot ask.
    """
    done = subprocess.run(gcloud.describe(), capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)
    if "NOT_FOUND" in done.stderr:
        return None
    raise InputError(f"gcloud refused: {done.stderr.strip()}")


def call(command: Sequence[str], what: str) -> None:
    """Runs a command of gcloud or tar, whose output is shown.

    Raises:
      InputError: it failed; what it said is in the message.
    """
    print(f"{what} ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        hint = ""
        if "quota" in done.stderr.lower():
            hint = "; ask for more quota in this zone, or take another --zone, tier or --topology"
        raise InputError(f"{what}: {(done.stderr or done.stdout).strip()}{hint}")


def insist(fn: Callable[[], Any], before_again: Callable[[], None] = lambda: None) -> Any:
    """fn(), which is tried again where it raises InputError: the network may fail for a while.

    Args:
      before_again: called before each further try; what it raises ends them.

    Raises:
      InputError: of the last of _TRIES.
    """
    for number in range(1, _TRIES):
        try:
            return fn()
        except InputError as e:
            print(f"{e}\nfailed, try {number} of {_TRIES}; the next in {_POLL_S} s", flush=True)
        time.sleep(_POLL_S)
        before_again()
    return fn()


def check_active(gcloud: Gcloud) -> None:
    """Raises PreemptedError unless the slices are there."""
    if state_of(insist(lambda: query(gcloud))) != "ACTIVE":
        raise PreemptedError


def call_there(gcloud: Gcloud, command: Sequence[str], what: str) -> None:
    """`call` of what has workers do something; again where it fails though they are there.

    Raises:
      InputError: it fails again and again.
      PreemptedError: they are not.
    """
    insist(lambda: call(command, what), lambda: check_active(gcloud))


def state_of(described: dict[str, Any] | None) -> str:
    """The state of a queued resource, e.g. ACTIVE; ABSENT if there is none."""
    return "ABSENT" if described is None else described.get("state", {}).get("state", "UNKNOWN")


def wait_until_active(gcloud: Gcloud, tpu: tpus.Slice) -> None:
    """Asks for the slices unless they are there, and waits until they are.

    Raises:
      InputError: gcloud refuses, or the request failed; with its reason.
    """
    seen = None
    asked = False
    described = query(gcloud)  # where that fails gcloud is not set up
    while True:
        state = state_of(described)
        if state != seen:
            print(f"slices: {state}", flush=True)
        seen = state
        if state == "ACTIVE":
            return
        if state in ("ABSENT", "FAILED", "SUSPENDED"):
            reason = json.dumps(described["state"]) if described and state == "FAILED" else ""
            if asked and reason:
                raise InputError(f"the request for slices failed: {reason}")
            if described is not None:
                insist(lambda: call(gcloud.delete(), "giving them back"))
            call(gcloud.create(tpu), "asking for slices")
            asked = True
        time.sleep(_POLL_S)
        described = insist(lambda: query(gcloud))


def look(gcloud: Gcloud, offset: int) -> JobState:
    """How the job is by worker 0 of slice 0, and its log from `offset`.

    Raises:
      InputError: the worker cannot be reached.
    """
    done = subprocess.run(gcloud.ssh(ask(offset), "0", "0"), capture_output=True)
    if done.returncode:
        raise InputError(
            f"worker 0 cannot be reached: {done.stderr.decode(errors='replace').strip()}; try: "
            f"{shell(gcloud.ssh('true', '0', '0'))}"
        )
    return read_answer(done.stdout)


def look_there(gcloud: Gcloud, offset: int) -> JobState:
    """`look`; again where the worker cannot be reached though the slices are there.

    Raises:
      InputError: it cannot be reached again and again.
      PreemptedError: they are not.
    """
    return insist(lambda: look(gcloud, offset), lambda: check_active(gcloud))


def follow(gcloud: Gcloud, offset: int) -> tuple[int, int]:
    """Shows the log from `offset` until the job ends: its exit code, the last step in the log.

    Raises:
      InputError: the worker cannot be reached though the slices are there.
      PreemptedError: the job was taken away.
    """
    step, line = 0, b""
    while True:
        state = look_there(gcloud, offset)
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
        time.sleep(_POLL_S)


def step_of(line: bytes) -> int:
    """The step that a line of the log says has been trained; 0 if it says none."""
    found = re.match(rb"step ([\d,]+)[/:]", line)
    return int(found[1].replace(b",", b"")) if found else 0


def begin(gcloud: Gcloud, path: str, words: Sequence[str]) -> int:
    """Has all workers run the job of `words`, unless they do: where its log begins.

    Raises:
      InputError: they run another, or something fails again and again.
      PreemptedError: the slices are no longer there.
    """
    before = look_there(gcloud, 0)
    if before.running:
        if before.words != " ".join(words):
            raise InputError(
                f"--name={gcloud.name}: another job runs there ({before.words}); delete it, or "
                "take another --name"
            )
        return 0
    call(pack(path), "packing the code")
    call_there(gcloud, gcloud.copy(path), "copying it to all workers")
    call_there(gcloud, gcloud.ssh(unpack(path)), "installing it there")
    call_there(gcloud, gcloud.ssh(start(words)), "starting the job")
    return len(before.log)


def keep_going(gcloud: Gcloud, flags: argparse.Namespace, tpu: tpus.Slice, job: Job) -> int:
    """Keeps the job going until it ends; its exit code."""
    path, words = archive(flags.name), job.on("tpu").words
    failures, furthest = 0, 0
    while True:
        wait_until_active(gcloud, tpu)
        try:
            code, step = follow(gcloud, begin(gcloud, path, words))
        except PreemptedError:
            print("preempted; the job goes on where it saved", flush=True)
            continue
        if step > furthest:
            failures, furthest = 0, step
        if code in (DONE, INPUT_WRONG) or failures >= flags.max_restarts:
            delete = shell(["python", "launch/tpu_vm.py", "delete", *same(flags)])
            print(f"the job ended with exit code {code}; give the slices back: {delete}")
            return code
        failures += 1
        print(f"failed with exit code {code}; starts again, {failures} of {flags.max_restarts}",
              flush=True)  # fmt: skip


def same(flags: argparse.Namespace) -> list[str]:
    """The flags by which the other actions find the slices."""
    project = [f"--project={flags.project}"] if flags.project is not None else []
    return [f"--name={flags.name}", f"--zone={flags.zone}", *project]


def steps(
    gcloud: Gcloud, flags: argparse.Namespace, tpu: tpus.Slice | None, job: Job | None
) -> Iterator[tuple[str, list[str]]]:
    """What an action runs, each with a remark."""
    if flags.action == "create":
        yield "", gcloud.create(tpu)
    elif flags.action == "run":
        plan = tpus.plan_command(job, flags.topology, flags.num_slices)
        if plan and not flags.no_plan:
            yield "unless it was planned before", plan
        path = archive(flags.name)
        yield "until they are there, and every 30 s from then on", gcloud.describe()
        yield "if there are none", gcloud.create(tpu)
        yield "", pack(path)
        yield "", gcloud.copy(path)
        yield "", gcloud.ssh(unpack(path))
        yield "", gcloud.ssh(start(job.on("tpu").words))
        yield "every 30 s, until it ends", gcloud.ssh(ask(0), "0", "0")
        yield "if they are preempted, and then all again", gcloud.delete()
    elif flags.action == "status":
        yield "", gcloud.describe()
        yield "if they are active", gcloud.ssh(ask(0), "0", "0")
    elif flags.action == "logs":
        yield "", follow_log(gcloud, flags)
    else:
        yield "", gcloud.delete()


def follow_log(gcloud: Gcloud, flags: argparse.Namespace) -> list[str]:
    """The command that shows a worker's log and what is added to it."""
    return gcloud.ssh("tail --lines=100 --follow vit_jax/job.log", flags.node, flags.worker)


def status(gcloud: Gcloud) -> int:
    """Says how the slices and the job are."""
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
    """The slice and the job that an action is about.

    Raises:
      InputError: the flags do not go together.
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
            f"--topology={flags.topology}: Cloud TPU VMs do not have it; take launch/kubernetes.py"
        )
    if flags.action == "create":
        return tpu, None
    job = check_job(words)
    check_config_travels(job, "a worker")
    if "://" not in job.workdir and not job.workdir.startswith("/"):
        raise InputError(
            f"--workdir={job.workdir}: would be another one on each worker, and lost with it; give "
            "gs://bucket/..., or the full path of a disk that all of them mount"
        )
    return tpu, job


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Does what `flags.action` says with the job of `words`; the exit code."""
    tpu, job = check(flags, words)
    gcloud = Gcloud(flags)
    if flags.dry_run:
        for remark, command in steps(gcloud, flags, tpu, job):
            print(f"# {remark}\n{shell(command)}" if remark else shell(command))
        return DONE
    find_program("gcloud", "install the Google Cloud SDK, or take --dry_run")
    if flags.action == "create":
        call(gcloud.create(tpu), "asking for slices")
    elif flags.action == "delete":
        call(gcloud.delete(), "giving the slices back")
    elif flags.action == "status":
        return status(gcloud)
    elif flags.action == "logs":
        return subprocess.run(follow_log(gcloud, flags)).returncode
    else:
        if not flags.no_plan and (code := tpus.check_plan(job, flags.topology, flags.num_slices)):
            return code
        try:
            return keep_going(gcloud, flags, tpu, job)
        except KeyboardInterrupt:
            print("the job goes on; see it by the same command, end it by delete", file=sys.stderr)
            return INTERRUPTED
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
