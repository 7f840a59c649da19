"""TFRecord files by index: where each record begins, found once and remembered.

A file is a row of records: the length (8 bytes) and a checksum of it (4), the bytes of the record,
and a checksum of those (4).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import os
import pathlib
import struct
import tempfile
from collections.abc import Sequence
from typing import IO

import numpy as np
from etils import epath

from vit_jax.errors import InputError

_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FILES_AT_ONCE = 16  # walked side by side: most of the time is spent in waiting for the disk


def record_offsets(paths: Sequence[epath.PathLike]) -> list[np.ndarray]:
    """For each file of n records, where they begin and where the last one ends: int64 (n + 1,).

    What is found is kept in $XDG_CACHE_HOME/vit_jax/tfrecord, by path, size and time of change.

    Raises: InputError if a file does not end where a record does.
    """
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = cache / "vit_jax" / "tfrecord"
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(lambda path: _cached_offsets(epath.Path(path), cache), paths))


def _cached_offsets(path: epath.Path, cache: pathlib.Path) -> np.ndarray:
    stat = path.stat()
    identity = f"{os.fspath(path)} {stat.length} {stat.mtime}"
    entry = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy"
    try:
        offsets = np.load(entry, allow_pickle=False)
        if offsets.dtype == np.int64 and offsets[-1] == stat.length:
            return offsets
    except (OSError, ValueError, EOFError):  # not there yet, or damaged
        pass
    offsets = walk(path, stat.length)
    try:
        _put(entry, offsets)
    except OSError as error:
        logging.getLogger("vit_jax").warning(
            "%s cannot be written (%s): the records of %s will be looked for again in the next run",
            entry, error.strerror, path,
        )  # fmt: skip
    return offsets


def walk(path: epath.Path, num_bytes: int) -> np.ndarray:
    """Where the records of a file of `num_bytes` begin, and where the last one ends.

    Raises: InputError if the file does not end where a record does.
    """
    offsets = [0]
    opened: IO[bytes] = path.open("rb")
    with opened as file:
        while offsets[-1] < num_bytes:
            file.seek(offsets[-1])
            header = file.read(_HEADER_BYTES)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER_BYTES else 0
            offsets.append(offsets[-1] + _HEADER_BYTES + length + _FOOTER_BYTES)
    if offsets[-1] != num_bytes:
        raise InputError(
            f"data.data_dir: {path} is damaged: its record {len(offsets) - 2} ends at byte "
            f"{offsets[-1]} and the file at byte {num_bytes} (or it is compressed, which is not "
            "supported); copy or prepare it anew"
        )
    return np.array(offsets, np.int64)


def _put(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes whole, under a name of this process's own first: others may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, array)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
