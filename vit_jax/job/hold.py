"""Who trains in a workdir: one job at a time, whose first process keeps WORKDIR/held_by.json.

The file names host, process and time of the start, and is touched every 10 s. It goes when the run
ends. A killed process leaves it behind:

- On the same host, the process id and the start time of that process decide at once.
- From another host (or another container), the file must be 60 s old, by the clock of the disk.

Two starts at one moment are told apart by a lock on the folder, where the disk has one. Elsewhere
(object stores, some network disks) both may begin; the file is then the later one's. The other
notices at its next heartbeat, and ends without writing rows or saving. Commands that only read a
workdir do not look at the file.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

from etils import epath

from vit_jax.errors import InputError
from vit_jax.files import write_whole

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("vit_jax")

STALE_S = 60.0  # age of a heartbeat from elsewhere that counts as the end of its process
_BEAT_S = 10.0
_LOOK_S = 1.0
_LOCK_TRIES, _LOCK_S = 50, 0.1  # the locked work takes milliseconds
_FILE = "held_by.json"


class LostHoldError(RuntimeError):
    """Another process trains in the workdir now."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that trains in a workdir.

    host: its name.
    place: where its process id has a meaning: a boot of a machine, and a container there; "" if
      that cannot be told.
    pid: its process id.
    pid_start: when that process began, in a form that no other process of the place has.
    path, inode: of the workdir, so that a copy of one that is held is not held.
    since: of the hold, in seconds since 1970.
    token: of this hold, like no other.
    """

    host: str
    place: str
    pid: int
    pid_start: str
    path: str
    inode: int
    since: float
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def age(self) -> str:
        """How long it has held the workdir, in words."""
        return _readable(time.time() - self.since)


def _readable(seconds: float) -> str:
    """A span of time in its greatest unit: 12 s, 5 min, 3.5 h."""
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _this_process(workdir: epath.Path) -> Holder:
    return Holder(
        host=socket.gethostname(),
        place=_place(),
        pid=os.getpid(),
        pid_start=pid_start(os.getpid()) or "",
        path=os.fspath(workdir),
        inode=_inode(workdir),
        since=time.time(),
        token=uuid.uuid4().hex,
    )


def _inode(workdir: epath.Path) -> int:
    return 0 if "://" in os.fspath(workdir) else os.stat(workdir).st_ino


def _place() -> str:
    """Boot and container of this process; "" if one of them cannot be told."""
    try:
        if sys.platform == "linux":
            boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.readlink('/proc/self/ns/pid')}"
        command = ["sysctl", "-n", "kern.bootsessionuuid"]  # macOS, which has no containers
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def pid_start(pid: int) -> str | None:
    """When process `pid` of this host began; None if there is none, or it has ended.

    A zombie, which nobody has waited for yet, has ended. "" of a process that may not be looked at.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if pathlib.Path("/proc/self/stat").exists():
            return "" if _exists(pid) else None  # /proc may hide what others run
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True,
                              text=True, check=False)  # fmt: skip
        return done.stdout.strip() or None
    except ProcessLookupError:  # it ended while this was read
        return None
    # After the name, which may hold anything, in parentheses: the state is the first field, the
    # start in ticks since boot the twentieth.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _read(workdir: epath.Path) -> Holder | None:
    """Who holds `workdir`, dead or alive; None: nobody."""
    try:
        found = json.loads((workdir / _FILE).read_text())
        return Holder(**found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError):  # of another version, or edited
        return Holder("an unknown host", "", 0, "", "", 0, time.time(), "")


def _lives(holder: Holder, workdir: epath.Path) -> bool | None:
    """Whether `holder` is there, in `workdir`; None: it cannot be seen from here."""
    if not holder.place or holder.place != _place():
        return None
    # A folder that was moved keeps the one, and under another mount or an odd disk the other.
    if holder.path != os.fspath(workdir) and holder.inode != _inode(workdir):
        return False  # it is in the workdir that this is a copy of
    found = pid_start(holder.pid)
    return None if found == "" else found == holder.pid_start


def _heartbeat_age(workdir: epath.Path) -> float:
    """Seconds since the hold was written or touched, by the disk's own clock; inf: it is gone."""
    probe = workdir / f".clock-{uuid.uuid4().hex}"
    probe.write_text("")
    try:
        return probe.stat().mtime - (workdir / _FILE).stat().mtime
    except FileNotFoundError:  # released meanwhile
        return math.inf
    finally:
        probe.unlink()


def check_free(workdir: epath.Path) -> None:
    """Returns once nobody trains in `workdir`; waits, and says so, where only time can tell.

    Raises:
      InputError: another process trains there, or the file cannot be read; says which.
    """
    with _naming_the_disk(workdir):
        _wait_until_free(workdir)


def _wait_until_free(workdir: epath.Path) -> None:
    holder = _read(workdir)
    if holder is None:
        return
    lives = _lives(holder, workdir)
    if lives:
        raise InputError(_refusal(workdir, holder))
    if lives is False:
        return
    if (age := _heartbeat_age(workdir)) >= STALE_S:
        return
    logger.warning(
        "--workdir=%s: %s has held it for %s and cannot be seen from here; waiting up to %.0f s "
        "for a sign of life from it",
        workdir, holder, holder.age, STALE_S - age,
    )  # fmt: skip
    while age < STALE_S:
        time.sleep(_LOOK_S)
        if _read(workdir) is None:
            return
        before, age = age, _heartbeat_age(workdir)
        if age < before:
            raise InputError(_refusal(workdir, _read(workdir) or holder))


def _refusal(workdir: epath.Path, holder: Holder) -> str:
    return (
        f"--workdir={workdir}: {holder} has been training there for {holder.age}; wait until it "
        "ends, end it, or use another --workdir"
    )


@contextlib.contextmanager
def _naming_the_disk(workdir: epath.Path) -> Iterator[None]:
    """Turns an OSError of the disk into an InputError with the remedy."""
    try:
        yield
    except OSError as e:
        raise InputError(
            f"--workdir={workdir}: cannot read or write {_FILE}, which keeps other jobs out: "
            f"{e.strerror or e}; make the folder writable and free space on its disk, or use "
            "another --workdir"
        ) from e


class Hold:
    """The hold of this process on a workdir, kept alive by a thread.

    Raises:
      InputError: another process trains in `workdir`, or its disk fails.
    """

    def __init__(self, workdir: epath.Path):
        self._path = workdir / _FILE
        self._ended, self._kept = threading.Event(), False
        with _naming_the_disk(workdir):
            self._holder = _this_process(workdir)
            with _locked(workdir):
                check_free(workdir)
                self._write()
        self._was_ours, self._confirmed_at = True, time.monotonic()
        self._thread = threading.Thread(target=self._keep_beating, name="hold", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(dataclasses.asdict(self._holder), indent=2) + "\n")

    def is_ours(self) -> bool:
        """Whether this process still holds the workdir, as its file says now.

        A file that cannot be read has no other holder until its heartbeat is stale.
        """
        with contextlib.suppress(Exception):  # an object store's client has errors of many classes
            self._look()
        return self._was_ours

    def _look(self) -> bool:
        """Whether the file names this process, as read now; raises whatever reading it raises."""
        try:
            found = _read(self._path.parent)
        except Exception:
            self._was_ours = self._was_ours and time.monotonic() - self._confirmed_at < STALE_S
            raise
        self._was_ours = found is not None and found.token == self._holder.token
        if self._was_ours:
            self._confirmed_at = time.monotonic()
        return self._was_ours

    def _keep_beating(self) -> None:
        while not self._ended.wait(_BEAT_S):
            try:
                if self._look():  # unread, the file may be another's, which a beat would overwrite
                    self._beat()
            except Exception as e:  # as in `is_ours`
                logger.warning("%s: heartbeat failed: %s", self._path, e)

    def _beat(self) -> None:
        if "://" in os.fspath(self._path):
            self._write()
        else:
            os.utime(self._path)

    def check(self, *, fresh: bool) -> None:
        """Raises LostHoldError if another process has taken the workdir meanwhile.

        This process was then stopped, or without the disk, for longer than a heartbeat may be old.
        `fresh`: look at the file now; otherwise the last heartbeat's look is enough.
        """
        if self.is_ours() if fresh else self._was_ours:
            return
        raise LostHoldError(
            f"--workdir={self._path.parent}: {self._say_loss()}; this process ends without saving"
        )

    def _say_loss(self) -> str:
        try:
            now = _read(self._path.parent)
        except Exception as e:
            return f"{_FILE} cannot be read: {getattr(e, 'strerror', None) or e}"
        return f"{now} trains there now" if now else f"{_FILE} was removed"

    def keep(self) -> None:
        """Keep the hold, heartbeat included, until this process ends; `release` then does nothing.

        For a process that fails while a save is in flight: files are still being written.
        """
        self._kept = True

    def release(self) -> None:
        """Ends the hold."""
        if self._kept:
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self.is_ours():
                self._path.unlink()


@contextlib.contextmanager
def _locked(workdir: epath.Path) -> Iterator[None]:
    """Lets one process of this host, and of others where the disk can, in at a time."""
    if fcntl is None or "://" in os.fspath(workdir):
        yield
        return
    folder = os.open(workdir, os.O_RDONLY)
    try:
        _lock(folder)
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    """Waits a moment for the lock, and goes on without it where it does not come."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_S)
        except OSError:  # of a disk that has no locks
            return
        else:
            return
