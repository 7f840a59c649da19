"""One job at a time trains in a workdir: its process 0 holds a lock on WORKDIR/held_by.json.

The lock (flock) is held for the life of the process, and the kernel frees it however the process
ends. The file names host, process and time of the start, and is touched every 10 s. This heartbeat
decides where locks cannot: on object stores, on disks without locks, and between hosts, since some
network disks keep the locks of each host apart. The file of another host must be 60 s old, by the
disk's own clock.

Without locks two jobs that start at one moment may both begin. The file is then the later one's;
the other notices at its next heartbeat, and ends without writing rows or saving. Commands that only
read a workdir do not look at the file.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from etils import epath

from vit_jax.base.errors import InputError, OneProcessError
from vit_jax.base.files import write_whole

logger = logging.getLogger("vit_jax")

STALE_S = 60.0  # age of a heartbeat that counts as the end of its process
_BEAT_S = 10.0
_LOOK_S = 1.0
_TRIES, _TRY_S = 20, 0.1  # `check_free` holds the lock for a moment, a job for its life
_FILE = "held_by.json"


class LostLockError(OneProcessError):
    """Another process trains in the workdir now."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that trains in a workdir.

    host: its name.
    pid: its process id, for messages only: two containers may have one host name and one id.
    since: when it took the lock, in seconds since 1970.
    token: of this lock, unlike any other.
    """

    host: str
    pid: int
    since: float
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def age(self) -> datetime.timedelta:
        """How long it has held the workdir, shown as H:MM:SS."""
        return datetime.timedelta(seconds=round(time.time() - self.since))


def _read(workdir: epath.Path) -> Holder | None:
    """Who holds `workdir`, dead or alive; None: nobody."""
    try:
        text = (workdir / _FILE).read_text()
        return Holder(**json.loads(text)) if text else None  # empty: its process is about to write
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError):  # edited
        return Holder("an unknown host", 0, time.time(), "")


def is_held(workdir: epath.Path, token: str) -> bool:
    """Whether the lock file names `token`, as this process sees it now."""
    holder = _read(workdir)
    return holder is not None and holder.token == token


def silence(workdir: epath.Path) -> float | None:
    """Seconds since the last heartbeat of a job in `workdir`, by this machine's clock; None: none.

    It writes nothing, so anyone may ask.
    """
    try:
        return max(time.time() - (workdir / _FILE).stat().mtime, 0.0)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _heartbeat_age(workdir: epath.Path) -> float:
    """Seconds since the file was written or touched, by the disk's own clock; inf: it is gone."""
    probe = workdir / f".clock-{uuid.uuid4().hex}"
    probe.write_text("")
    try:
        return probe.stat().mtime - (workdir / _FILE).stat().mtime
    except FileNotFoundError:  # released meanwhile
        return math.inf
    finally:
        probe.unlink()


def _open_locked(workdir: epath.Path, flags: int) -> int | None:
    """A descriptor of the file, locked until it is closed; None where the disk has no locks.

    Raises:
      InputError: another process holds the lock.
      FileNotFoundError: there is no file, and `flags` do not make one.
    """
    path = os.fspath(workdir / _FILE)
    if "://" in path:
        return None
    for _ in range(_TRIES):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o666)  # a link has another target
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except FileNotFoundError:  # its holder removed it between the two calls
            pass
        except BlockingIOError:
            time.sleep(_TRY_S)
        except OSError:  # the disk has no locks
            os.close(file)
            return None
        os.close(file)
    raise _refusal(workdir)


def check_free(workdir: epath.Path) -> None:
    """Returns once nobody trains in `workdir`; waits, and says so, where only time can tell.

    Raises:
      InputError: another process trains there, or the file cannot be read; says which.
    """
    with _naming_the_disk(workdir):
        try:
            file = _open_locked(workdir, 0)
        except (FileNotFoundError, NotADirectoryError):
            return
        if file is not None:
            os.close(file)
        _wait_for_heartbeat(workdir, has_locks=file is not None)


def _wait_for_heartbeat(workdir: epath.Path, has_locks: bool) -> None:
    """Return once the last heartbeat is old, or at once if a lock has told that its job ended."""
    holder = _read(workdir)
    if holder is None or (has_locks and holder.host == socket.gethostname()):
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
        before, age = age, _heartbeat_age(workdir)
        if age < before:
            raise _refusal(workdir)


def _refusal(workdir: epath.Path) -> InputError:
    holder = _read(workdir)
    who = f"{holder} has been training there for {holder.age}" if holder else "a job begins there"
    return InputError(
        f"--workdir={workdir}: {who}; wait until it ends, end it, or use another --workdir"
    )


@contextlib.contextmanager
def _naming_the_disk(workdir: epath.Path) -> Iterator[None]:
    """Turns an OSError of the disk into an InputError with the remedy."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.ELOOP:  # as opened without following links
            what = f"{_FILE} is a link, and its target is not overwritten; remove it"
            raise InputError(f"--workdir={workdir}: {what}, or use another --workdir") from None
        raise InputError(
            f"--workdir={workdir}: cannot read or write {_FILE}, which keeps other jobs out: "
            f"{e.strerror or e}; make the folder writable and free space on its disk, or use "
            "another --workdir"
        ) from e


class Lock:
    """The lock of this process on a workdir, its heartbeat kept by a thread.

    token: of this lock, unlike any other; it stands in the file.

    Raises:
      InputError: another process trains in `workdir`, or its disk fails.
    """

    def __init__(self, workdir: epath.Path):
        self._path, self.token = workdir / _FILE, uuid.uuid4().hex
        self._holder = Holder(socket.gethostname(), os.getpid(), time.time(), self.token)
        self._ended, self._kept = threading.Event(), False
        with _naming_the_disk(workdir), contextlib.ExitStack() as undo:
            self._file = _open_locked(workdir, os.O_CREAT)
            undo.callback(self._close)
            _wait_for_heartbeat(workdir, has_locks=self._file is not None)
            undo.callback(self._path.unlink, missing_ok=True)
            self._write()
            undo.pop_all()
        self._was_ours, self._confirmed_at = True, time.monotonic()
        self._thread = threading.Thread(target=self._keep_beating, name="lock", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        text = json.dumps(dataclasses.asdict(self._holder), indent=2) + "\n"
        if self._file is None:
            write_whole(self._path, text)
        else:  # a renamed file would be one without the lock
            os.pwrite(self._file, text.encode(), 0)
            os.ftruncate(self._file, len(text.encode()))

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def is_ours(self) -> bool:
        """Whether this process still holds the workdir, as its file says now.

        A file that cannot be read has no other holder until its heartbeat is stale.
        """
        with contextlib.suppress(Exception):  # an object store's client has errors of many classes
            self._look()
        return self._was_ours

    def _look(self) -> bool:
        """`is_ours`, and raises what reading the file raises."""
        try:
            self._was_ours = is_held(self._path.parent, self.token)
            self._confirmed_at = time.monotonic()
        except Exception:
            self._was_ours = self._was_ours and time.monotonic() - self._confirmed_at < STALE_S
            raise
        return self._was_ours

    def _keep_beating(self) -> None:
        while not self._ended.wait(_BEAT_S):
            try:
                if not self._look():  # unread, it may be another's, which a beat would overwrite
                    continue
                if "://" in os.fspath(self._path):
                    self._write()
                else:
                    os.utime(self._path)
            except Exception as e:  # as in `is_ours`
                logger.warning("%s: heartbeat failed: %s", self._path, e)

    def check(self, *, fresh: bool) -> None:
        """Raises LostLockError if another process has taken the workdir meanwhile.

        This process was then stopped, or without the disk, for longer than a heartbeat may be old.
        `fresh`: look at the file now; otherwise the last heartbeat's look is enough.
        """
        if not (self.is_ours() if fresh else self._was_ours):
            raise LostLockError(
                f"--workdir={self._path.parent}: {_FILE} names another process, which trains there "
                "now, or it is gone or unreadable; this process ends without saving"
            )

    def keep(self) -> None:
        """Keep the lock, heartbeat included, until this process ends; `release` then does nothing.

        For a process that fails while a save is in flight: files are still being written.
        """
        self._kept = True

    def release(self) -> None:
        """Free the workdir."""
        if self._kept:
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self.is_ours():
                self._path.unlink()
        self._close()


class NoLock:
    """In the place of the `Lock` on the processes that do not hold it."""

    def is_ours(self) -> bool:
        return True

    def check(self, *, fresh: bool) -> None:
        """Finds no other holder."""

    def keep(self) -> None:
        """Keeps nothing."""
