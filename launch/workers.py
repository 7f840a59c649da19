"""What launch/tpu_vm.py sends to the workers, and the commands that it runs there.

code and variables ──> install ──> start ──> ask for the job's state and log
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from command_line import ROOT
from environment import WANDB_KEY, Environment, as_exports

_SENT = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "vit_jax", "configs", "launch")
_WORKER = "vit_jax/launch/worker.sh"  # on a worker, relative to the home directory


def archive(name: str) -> str:
    """Path of the packed code on this host."""
    return str(pathlib.Path(tempfile.gettempdir()) / f"{name}.tar.gz")


def pack(path: str) -> list[str]:
    """Command that packs the code."""
    return ["tar", "--create", "--gzip", f"--file={path}", f"--directory={ROOT}",
            "--exclude=__pycache__", *_SENT]  # fmt: skip


def variables_file(name: str) -> str:
    """Path of the file with the job's variables on this host."""
    return str(pathlib.Path(tempfile.gettempdir()) / f"{name}.env")


@contextlib.contextmanager
def write_variables(path: str, variables: Environment) -> Iterator[None]:
    """Write the job's variables to `path`, which only this user can read; remove it afterwards."""
    pathlib.Path(path).unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as opened:
            opened.write(as_exports(variables.all))
        yield
    finally:
        os.unlink(path)


def take_variables(path: str) -> str:
    """Command, for a worker, that moves the variables to where worker.sh reads them.

    It may be repeated, as it is on all workers if one of them fails.
    """
    name = shlex.quote(pathlib.Path(path).name)
    return (
        f"if [ -e {name} ]; then install -m 600 {name} vit_jax/job.env && rm {name}; "
        "else [ -e vit_jax/job.env ]; fi"
    )


def digest_of(variables: Environment) -> str:
    """A short digest of the variables of --env, by which a running job is told from another.

    Leaves out W&B's key, which comes from the shell that calls the launcher.
    """
    given = {name: value for name, value in variables.all.items() if name != WANDB_KEY}
    return hashlib.sha256(as_exports(dict(sorted(given.items()))).encode()).hexdigest()[:8]


def unpack(path: str, extras: Sequence[str]) -> str:
    """Command, for a worker, that unpacks and installs the code with `extras`."""
    name = shlex.quote(pathlib.Path(path).name)
    wanted = ",".join(sorted({"tpu", "gcs", *extras}))
    return (
        # Remove files that are no longer part of the code.
        "mkdir -p vit_jax && (cd vit_jax && rm -rf vit_jax configs launch) && "
        f"tar --extract --gzip --file={name} --directory=vit_jax && "
        f"{_WORKER} install {wanted}"
    )


def start(words: Sequence[str], digest: str) -> str:
    """Command, for a worker, that starts the job and leaves it running.

    `digest`: of its variables.
    """
    return f"{_WORKER} start {digest} {shlex.join(words)}"


def ask(offset: int) -> str:
    """Command, for a worker, that prints the job's state, and its log from byte `offset`."""
    return f"[ ! -e {_WORKER} ] || {_WORKER} ask {offset}"


class JobState(NamedTuple):
    """The answer to `ask`.

    words: arguments of the job, after --; None if none was started.
    running: whether it is running.
    code: its exit code; None while it runs, or if its VM was restarted meanwhile.
    log: its output since `offset`.
    variables: digest of its variables; None if no job was started.
    """

    words: str | None
    running: bool
    code: int | None
    log: bytes
    variables: str | None


def read_answer(answer: bytes) -> JobState:
    """Parse the answer of a worker."""
    head, _, log = answer.partition(b"\n")
    found = re.fullmatch(r"job (\w+): (yes|no) (-|\d+) (.*)", head.decode(errors="replace"))
    if found is None:
        return JobState(None, False, None, b"", None)
    digest, running, code, words = found.groups()
    return JobState(words, running == "yes", None if code == "-" else int(code), log, digest)
