"""Files that a reader sees whole or not at all, on local disks and in object stores alike."""

import contextlib
import os

from etils import epath

from vit_jax.errors import InputError


def absolute(path: epath.PathLike) -> epath.Path:
    """`path` from the root, with `~` expanded; an address such as gs://bucket as it is."""
    path = epath.Path(path)
    return path if _is_object(path) else path.expanduser().resolve()


def check_output(path: epath.Path, flag: str) -> None:
    """Raises InputError, naming `flag`, if a file at `path` could not be written in the end."""
    if _is_object(path):
        return
    if path.is_dir():
        raise InputError(f"{flag}={path}: is a folder; give a file")
    if not path.parent.is_dir():
        raise InputError(f"{flag}={path}: there is no folder {path.parent}; make it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{flag}={path}: {path.parent} cannot be written to; choose another")


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file so that a reader, or a machine that lost power, has the old or the new one."""
    data = content.encode() if isinstance(content, str) else content
    open_for_append(path, data).close()


def open_for_append(path: epath.Path, content: bytes) -> "LocalFile | StoredObject":
    """A file to append to, begun with `content` in place of what was there, atomically.

    It has `write(bytes)`, `flush()`, after which what was written is durable, and `close()`.
    """
    return (StoredObject if _is_object(path) else LocalFile)(path, content)


def _is_object(path: epath.Path) -> bool:
    return "://" in os.fspath(path)


class LocalFile:
    """Of a local or shared disk: what is written is there for others to read at once."""

    def __init__(self, path: epath.Path, content: bytes):
        temporary = path.with_name(f".{path.name}.tmp")
        self._file = open(temporary, "wb")  # noqa: SIM115 (closed by `close`)
        try:
            self.write(content)
            self.flush()
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.close()
            temporary.unlink(missing_ok=True)
            raise

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


class StoredObject:
    """Of a store that has neither append nor rename: put whole by each flush."""

    def __init__(self, path: epath.Path, content: bytes):
        self._path, self._content = path, bytearray(content)

    def write(self, data: bytes) -> None:
        self._content += data

    def flush(self) -> None:
        self._path.write_bytes(bytes(self._content))

    close = flush
