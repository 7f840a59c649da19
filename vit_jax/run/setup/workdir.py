"""The workdir of a run: checked before anything is written, then created."""

import contextlib
import datetime
import hashlib
import importlib
import json
import logging
import operator
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

import vit_jax
from vit_jax.base.addresses import hide
from vit_jax.base.errors import InputError, collect_faults
from vit_jax.base.files import LiteralPath, check_folder, json_lines, write_whole
from vit_jax.checkpoints import restore
from vit_jax.config import find_unrecorded
from vit_jax.config.plugins import store_plugins
from vit_jax.config.sections import Job
from vit_jax.config.stored import StoredConfig, parse_stored
from vit_jax.data import Source
from vit_jax.data.division import FILE
from vit_jax.job import processes
from vit_jax.job.lock import STALE_S, Lock, NoLock, check_free, is_held, silence
from vit_jax.job.software import software
from vit_jax.run.setup.agreement import compare
from vit_jax.run.setup.resolve import Resolved

logger = logging.getLogger("vit_jax")

_GIT_S = 10  # git on a slow disk is not waited for
_SHARED_WITHIN_S = 60  # a network disk may hide a new file from other hosts for this long


class StoredRun(NamedTuple):
    """The content of a workdir before a start.

    text: of config.json; "" if there is none.
    stored: the content of `text`; None if there is none.
    saved_steps: of its checkpoints, the newest first.
    devices: number and kind of the devices of the last start; None: it is not recorded.
    """

    text: str = ""
    stored: StoredConfig | None = None
    saved_steps: Sequence[int] = ()
    devices: list[int | str] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a run has begun; its config.json may be lost."""
        return self.stored is not None or bool(self.saved_steps)


def read_run(workdir: epath.Path) -> StoredRun:
    """The content of `workdir` for this process; raises InputError if config.json is damaged."""
    return _parse_run(workdir, _find_run(workdir))


def _find_run(workdir: epath.Path) -> dict[str, Any]:
    """All fields of a `StoredRun` except `stored`, as values that JSON can hold."""
    return {
        "text": _read_if_there(workdir / "config.json"),
        "saved_steps": restore.saved_steps(workdir / "checkpoints"),
        "devices": _last_devices(workdir),
    }


def _parse_run(workdir: epath.Path, found: Mapping[str, Any]) -> StoredRun:
    text = found["text"]
    return StoredRun(stored=parse_stored(text, workdir) if text else None, **found)


def say_holder(workdir: epath.Path) -> str:
    """Whether a job trains in `workdir`, by its heartbeat: "training", "stopped" or since when."""
    silent_s = silence(workdir)
    if silent_s is None or silent_s <= STALE_S:
        return "stopped" if silent_s is None else "training"
    return f"not heard of for {datetime.timedelta(seconds=round(silent_s))}"


def check_store(workdir: epath.Path) -> None:
    """Raise InputError if the library needed for checkpoints in `workdir` is not installed."""
    if os.fspath(workdir).startswith("gs://"):
        try:
            importlib.import_module("google.cloud.storage")
        except ImportError:
            raise InputError(
                f"--workdir={workdir}: checkpoints on gs:// need google-cloud-storage, which is "
                "not installed; run pip install -e '.[gcs]'"
            ) from None


def check_writable(workdir: epath.Path) -> None:
    """Raise InputError unless `workdir` is a directory that can be created or written to."""
    check_store(workdir)
    check_folder(workdir, "--workdir")


def agree_on_run(workdir: epath.Path, timeout_s: float) -> StoredRun:
    """The content of `workdir` as process 0 reads it; all processes get the same.

    Raises:
      InputError: on every process: it cannot be read, another job trains there, or config.json is
        damaged.
    """

    def find() -> dict[str, Any]:
        check_store(workdir)
        collect_faults([
            f"{path}: is a folder, in the place of a file of the run; move it away"
            for path in LiteralPath(workdir).glob("*.json*") if path.is_dir()
        ])  # fmt: skip
        check_free(workdir)
        return _find_run(workdir)

    return _parse_run(workdir, processes.say_to_all("what the workdir holds", find, timeout_s))


def _read_if_there(path: epath.Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextlib.contextmanager
def locked(workdir: epath.Path, before: StoredRun, job: Job) -> Iterator[Lock | NoLock]:
    """Makes `workdir`, and keeps other jobs out of it; yields the lock, which process 0 holds.

    Args:
      workdir: of the run.
      before: what `agree_on_run` has found there, before the run was prepared.
      job: that section of the run's config.

    Raises:
      InputError: on every process: another job trains or trained there, or a process does not see
        it: a path may be another disk on another host.
    """
    locks: list[Lock] = []
    made = jax.process_index() == 0 and not workdir.exists()

    def take() -> str:
        workdir.mkdir(parents=True, exist_ok=True)  # `check_writable` has said that it can be
        locks.append(Lock(workdir))
        if _read_if_there(workdir / "config.json") != before.text:
            raise InputError(
                f"--workdir={workdir}: another job has begun a run there meanwhile; start the same "
                "command again, or use another --workdir"
            )
        return locks[0].token

    def see() -> dict[str, str]:
        until = time.monotonic() + _SHARED_WITHIN_S
        while not (is_seen := is_held(workdir, token)) and time.monotonic() < until:
            time.sleep(0.1)
        own = f"{workdir} on {socket.gethostname()}, another folder than on process 0"
        return {"--workdir": "shared" if is_seen else own}

    try:
        what, timeout_s = "that the workdir is locked", job.compile_deadline_s
        token = processes.say_to_all(what, take, timeout_s)
        compare(job, "workdir", see)
        yield locks[0] if locks else NoLock()
    finally:
        for lock in locks:
            lock.release()
        if made and workdir.exists() and not any(workdir.iterdir()):
            workdir.rmdir()


def write_workdir(
    workdir: epath.Path, resolved: Resolved, source: Source, division: bytes = b""
) -> None:
    """Create the workdir with config.json and the class names of the training `source`.

    `division`: content of `division.FILE` of a run that begins; a run keeps the file that it has.
    classes.json holds null if the source names no classes.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if division:  # before config.json, which says that the run has begun
        write_whole(workdir / FILE, division)
    if unrecorded := find_unrecorded(resolved.config):
        logger.warning(
            "%s: this process registered it outside a plug-in, so after a restart, and in other "
            "commands, it is missing; write it to a file and give --config.plugins=FILE.py (in "
            'Python {"plugins": ["FILE.py"]})', ", ".join(unrecorded),
        )  # fmt: skip
    store_plugins(resolved.config.plugins, workdir)
    stored = StoredConfig(resolved.asked, resolved.config, resolved.decided_by)
    write_whole(workdir / "config.json", stored.to_json())
    text = json.dumps(source.class_names, indent=2, ensure_ascii=False) + "\n"
    write_whole(workdir / "classes.json", text)


def record_start(
    workdir: epath.Path,
    devices: Sequence[jax.Device],
    resumed_at: int | None,
    command: Mapping[str, Any],
    start_s: float = 0.0,
) -> None:
    """Adds the line of this start to WORKDIR/starts.jsonl; called by process 0, which holds it.

    time: when the process started. command, config, overrides: the words of the command line.
    resumed_at: the step that it went on from; null: from the beginning.
    commit, clean: state of the clone of vit_jax; null if it is no clone, as after pip install.
      Clean: no file that git follows was changed.
    software: versions, compiler flags and the digest of the code, as processes compare them.
    hardware: host, devices, processes, processors.

    Args:
      workdir: of the run.
      devices: of its mesh; () for a branch, which trains nothing.
      resumed_at: the step that it goes on from; None: it begins.
      command: what else is known of the command, as "config" and "overrides".
      start_s: seconds since the process started.
    """
    started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=start_s)
    line = {
        "time": started.isoformat(timespec="milliseconds"),
        "command": shlex.join(sys.orig_argv),
        **command,
        "resumed_at": resumed_at,
        **clone_state(pathlib.Path(vit_jax.__file__).resolve().parents[1]),
        "software": {"vit_jax": vit_jax.__version__, **software()},
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "devices": len(devices),
            "device_kind": devices[0].device_kind if devices else None,
            "processes": jax.process_count(),
        },
    }
    path = workdir / "starts.jsonl"
    before = path.read_bytes() if path.exists() else b""
    write_whole(path, before + hide(json.dumps(line, ensure_ascii=False)).encode() + b"\n")


def read_starts(workdir: epath.Path) -> list[dict[str, Any]]:
    """The lines of WORKDIR/starts.jsonl, oldest first."""
    return json_lines(workdir / "starts.jsonl", _check_start)


def _check_start(line: Mapping[str, Any]) -> None:
    """Raise an error unless the line has what is read of it, as `record_start` writes it."""
    datetime.datetime.fromisoformat(line["time"])
    operator.itemgetter("host", "devices", "device_kind")(line["hardware"])
    operator.itemgetter("command", "resumed_at")(line)


def run_name(workdir: epath.Path) -> str:
    """A name for the run in `workdir` that no other run has, from its first start; "" before it."""
    path = workdir / "starts.jsonl"
    first = path.read_bytes().partition(b"\n")[0] if path.exists() else b""
    return hashlib.sha256(f"{workdir}\n".encode() + first).hexdigest()[:16] if first else ""


def _last_devices(workdir: epath.Path) -> list[int | str] | None:
    """Number and kind of the devices of the last start in `workdir`; None: no line tells them."""
    found = [line["hardware"] for line in read_starts(workdir)]
    said = [[h["devices"], h["device_kind"]] for h in found if h["devices"]]
    return said[-1] if said else None


def clone_state(root: pathlib.Path) -> dict[str, str | bool | None]:
    """{"commit": hash, "clean": whether files that git follows are as committed} of a clone.

    Both are None if `root` is not the top of a clone, or git is not there.
    """
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        (root / ".git").stat()
        said = subprocess.run(git, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "clean": None}
    commit, dirty, _ = said.stdout.strip().partition("-")
    return {"commit": commit, "clean": not dirty}
