"""Atomic writes: a reader sees a whole file or none, on local disks and in object stores."""

import contextlib
import errno
import functools
import glob
import json
import logging
import os
import pathlib
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Self, cast

from etils import epath

from vit_jax.base.errors import InputError

logger = logging.getLogger("vit_jax")

_MOST_BYTES = 240  # of a name; disks take 255, and `replaced` adds some
# Errors of writing, which may not name the file.
_NAMELESS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG


class LiteralPath(type(epath.Path())):  # type: ignore[misc]
    """A path below which `glob` finds files whatever its own name is: `[1]` is no pattern in it."""

    def glob(self, pattern: str) -> Iterator[Self]:
        return map(type(self), epath.Path(glob.escape(os.fspath(self))).glob(pattern))


def absolute(path: epath.PathLike) -> epath.Path:
    """`path` made absolute, with `~` expanded; addresses such as gs://bucket stay as they are."""
    path = epath.Path(path)
    return path if is_object(path) else path.expanduser().resolve()


def check_output(path: epath.Path, flag: str) -> None:
    """Raise InputError, naming `flag`, unless a file can be written at `path`."""
    if is_object(path):
        return
    check_names(path, flag)
    if path.is_dir():
        raise InputError(f"{flag}={path}: is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{flag}={path}: the folder {path.parent} does not exist; create it")
    _try_to_write(path.parent, path, flag)


def check_folder(path: epath.Path, flag: str) -> None:
    """Raise InputError, naming `flag`, unless `path` is a folder to write to or can become one."""
    check_names(path, flag)
    if is_object(path):
        return
    there = next(p for p in [path, *path.parents] if p.exists() or os.path.islink(p))
    if not there.exists():
        raise InputError(
            f"{flag}={path}: {there} is a link to {os.readlink(there)}, which does not exist; make "
            "that folder, or remove the link"
        )
    if not there.is_dir():
        what = "" if there == path else f"{there} "
        raise InputError(f"{flag}={path}: {what}is a file; give a directory")
    _try_to_write(there, path, flag)


def _try_to_write(folder: epath.Path, path: epath.Path, flag: str) -> None:
    """Raise InputError unless a file can be made in `folder`: to root, /proc looks writable."""
    try:
        tempfile.TemporaryFile(dir=folder).close()  # has no name where the disk allows it
    except OSError as e:
        raise InputError(
            f"{flag}={path}: {folder} is not writable ({e.strerror}); choose another folder"
        ) from None


def check_names(path: epath.Path, flag: str) -> None:
    """Raise InputError, naming `flag`, if a name in `path` is longer than disks take."""
    if any(len(os.fsencode(name)) > _MOST_BYTES for name in path.parts):
        raise InputError(
            f"{flag}={path}: has a name of more than {_MOST_BYTES} bytes; choose a shorter one"
        )


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Write a file atomically: readers, even after a power failure, find the old or the new one."""
    data = content.encode() if isinstance(content, str) else content
    open_for_append(path, [data]).close()


def read_lines(
    path: epath.Path, check: Callable[[Any], object]
) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Lines of a file of JSON with their content; None and a warning for a damaged line.

    A file that is missing has no lines, and a folder in its place none and a warning. A last line
    that a kill cut short is skipped. `check` gets the content, and raises ValueError, LookupError,
    TypeError or AttributeError if it is not what was written.
    """
    if path.is_dir():
        _say_damaged(path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines = cast(Iterator[bytes], file)
        for number, line in enumerate(lines, 1):
            content = _parse(line, check)
            if content is None:
                if not line.endswith(b"\n"):
                    continue
                _say_damaged(path, f"line {number} ")
            yield line.rstrip(b"\r\n"), content


def _parse(text: bytes, check: Callable[[Any], object]) -> Any:
    """The content of a JSON text; None if it is damaged."""
    try:
        content = json.loads(text)
        check(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return content


@functools.cache  # once in a process, however often the file is read
def _say_damaged(path: epath.Path, part: str = "") -> None:
    logger.warning("%s: %sis damaged and not read; restore it from a copy if you have one, "
                   "or remove it", path, part)  # fmt: skip


def read_json(path: epath.Path, check: Callable[[Any], object] = dict) -> Any:
    """The content of a JSON file; None of no file, and of a damaged one, as is said.

    `check` as in `read_lines`.
    """
    if not path.exists():
        return None
    content = None if path.is_dir() else _parse(path.read_bytes(), check)
    if content is None:
        _say_damaged(path)
    return content


def json_lines(path: epath.Path, check: Callable[[Any], object]) -> list[dict[str, Any]]:
    """The content of the lines that `read_lines` finds whole."""
    return [content for _, content in read_lines(path, check) if content is not None]


def copy_tree(source: epath.Path, target: epath.Path) -> None:
    """Copy a file, or a folder with all that is below it."""
    if source.is_dir():
        for path in source.iterdir():
            copy_tree(path, target / path.name)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.copy(target)


def cache_folder(kind: str) -> pathlib.Path:
    """The folder that keeps one kind of results between runs; it may not exist yet.

    $XDG_CACHE_HOME/vit_jax/KIND, below ~/.cache where the variable is unset or empty.
    """
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "vit_jax" / kind


@contextlib.contextmanager
def whole_folder(path: epath.Path) -> Iterator[None]:
    """A folder to fill: an error in the block removes it, if it was not there before."""
    folders = [] if is_object(path) else [path, *path.parents]
    made = [folder for folder in folders if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        if made:
            made[-1].rmtree(missing_ok=True)
        raise


@contextlib.contextmanager
def replaced(path: epath.PathLike) -> Iterator[IO[bytes]]:
    """A local file to write, which takes the place of `path` once the block has ended.

    It is written beside `path` under a name of its own, so several processes may write the same
    path. An error in the block removes it and leaves `path` as it was.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError) and e.errno in _NAMELESS:
            raise OSError(e.errno, e.strerror, os.fspath(path)) from None
        raise


def open_for_append(
    path: epath.Path, parts: Iterable[bytes | memoryview] | None = None
) -> "LocalFile | StoredObject":
    """Replace `path` atomically by a file that holds all `parts`, and open it for appending.

    The parts may be read from `path` meanwhile. None keeps what it holds; on a disk that is not
    read.

    The result has `write(bytes)`, `flush()`, which makes all writes durable, `close()`, and
    `abandon()`, which closes it without flushing.
    """
    return (StoredObject if is_object(path) else LocalFile)(path, parts)


def is_object(path: epath.Path) -> bool:
    """Whether `path` is in an object store."""
    return "://" in os.fspath(path)


class LocalFile:
    """A file on a local or shared disk; other readers see each write at once."""

    def __init__(self, path: epath.Path, parts: Iterable[bytes | memoryview] | None):
        if parts is not None:
            with replaced(path) as file:
                file.writelines(parts)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by `close`)

    def write(self, data: bytes) -> None:
        sys.audit("vit_jax.write", self._file.name)  # where `job.inject` makes a disk slow
        self._file.write(data)
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()

    def abandon(self) -> None:
        """Close the file without flushing it."""
        self._file.close()


class StoredObject:
    """An object in a store without append and rename; each flush uploads it whole."""

    def __init__(self, path: epath.Path, parts: Iterable[bytes | memoryview] | None):
        self._path, self._content = path, bytearray()
        if parts is None:
            parts = [path.read_bytes()] if path.exists() else []
        for part in parts:
            self._content += part

    def write(self, data: bytes) -> None:
        self._content += data

    def flush(self) -> None:
        self._path.write_bytes(bytes(self._content))

    close = flush

    def abandon(self) -> None:
        """Upload nothing more: writes since the last flush are lost."""
