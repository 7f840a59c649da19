"""Byte offsets of the records in TFRecord files, computed once and cached on disk.

A file is a sequence of records. Each record has its length (8 bytes), a checksum of the length
(4), its data, and a checksum of the data (4).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import IO

import numpy as np
from etils import epath

from vit_jax.errors import InputError
from vit_jax.files import cache_folder, replaced

_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FILES_AT_ONCE = 16  # scanned in parallel: most of the time is spent waiting for the disk


def record_offsets(paths: Sequence[epath.PathLike]) -> list[np.ndarray]:
    """For each file of n records the start of every record and the end of the last: int64 (n + 1,).

    Offsets are cached in $XDG_CACHE_HOME/vit_jax/tfrecord under the file's path, size and mtime.

    Raises: InputError if a file does not end at the end of a record.
    """
    cache = cache_folder("tfrecord")
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
    except (OSError, ValueError, EOFError):  # not cached yet, or damaged
        pass
    offsets = walk(path, stat.length)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with replaced(entry) as file:
            np.save(file, offsets)
    except OSError as error:
        logging.getLogger("vit_jax").warning(
            "%s cannot be written (%s); the next run will scan %s for its records again",
            entry, error.strerror, path,
        )  # fmt: skip
    return offsets


def walk(path: epath.Path, num_bytes: int) -> np.ndarray:
    """The start of every record in a file of `num_bytes`, and the end of the last one.

    Raises: InputError if the file does not end at the end of a record.
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
            f"data.data_dir: {path} is damaged, or compressed, which is not supported: its record "
            f"{len(offsets) - 2} ends at byte {offsets[-1]} and the file at byte {num_bytes}; "
            "copy or prepare it again"
        )
    return np.array(offsets, np.int64)
