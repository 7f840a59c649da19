"""Ranges of bytes of files, local or in an object store."""

from __future__ import annotations

import errno
import io
import os

from etils import epath

from vit_jax.data.host_tf import tf


def is_remote(path: str | os.PathLike) -> bool:
    """Whether the file lies in an object store."""
    return "://" in os.fspath(path)


def read_span(path: str, begin: int, end: int) -> bytes:
    """The bytes begin, ..., end - 1 of a file, and no others.

    Fewer if the file has ended.

    Raises: OSError or tf.errors.OpError if it cannot be read; FileNotFoundError if it is missing.
    """
    if not is_remote(path):
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - begin, begin)
    # tf.io.gfile.GFile reads half a MiB at least, and no more at once.
    from tensorflow.python.lib.io import _pywrap_file_io

    stream = _pywrap_file_io.BufferedInputStream(path, int(end - begin))
    try:
        stream.seek(int(begin))
        return stream.read(int(end - begin))
    except tf.errors.OutOfRangeError:
        return b""
    except tf.errors.NotFoundError as e:
        raise FileNotFoundError(errno.ENOENT, e.message) from e


class RangedFile(io.RawIOBase):
    """A file whose every read is one range."""

    def __init__(self, path: epath.Path):
        self._path, self._size, self._at = os.fspath(path), path.stat().length, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        found = read_span(self._path, self._at, end) if self._at < end else b""
        self._at += len(found)
        return found
