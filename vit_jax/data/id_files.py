"""Files of record ids: `record`, int64 (n,), rising, and the `fingerprint` of their data."""

from __future__ import annotations

import io
import os
import zipfile
from typing import IO

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.base.files import write_whole
from vit_jax.data.contract import Source

SUFFIX = ".npz"


def write_ids(path: epath.Path, ids: np.ndarray, fingerprint: str) -> None:
    """Write rising `ids` (n,) of the source with this fingerprint."""
    np.savez(content := io.BytesIO(), record=ids.astype(np.int64), fingerprint=fingerprint)
    write_whole(path, content.getvalue())


def read_ids(path: str | os.PathLike, key: str) -> tuple[np.ndarray, str]:
    """The ids of a file, int64 (n,), and the fingerprint of their data.

    Raises: InputError naming `key` if it is not a file of ids.
    """
    try:
        opened: IO[bytes] = epath.Path(path).expanduser().open("rb")
        with opened as file, np.load(file) as found:
            ids, fingerprint = found["record"], str(found["fingerprint"])
    except FileNotFoundError:
        raise InputError(f"{key}={os.fspath(path)!r}: there is no such file") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise InputError(f"{key}={os.fspath(path)!r}: is not a file of record ids ({e})") from None
    if ids.dtype != np.int64 or ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any():
        raise InputError(f"{key}={os.fspath(path)!r}: needs `record`, rising numbers of int64 (n,)")
    return ids, fingerprint


def ids_in(source: Source, path: str | os.PathLike, key: str) -> np.ndarray:
    """The ids of a file, int64 (n,).

    Raises: InputError naming `key` if it is not a file of ids, or they are those of other data.
    """
    ids, fingerprint = read_ids(path, key)
    if fingerprint != source.fingerprint or not 0 <= ids[0] <= ids[-1] < source.num_examples:
        raise InputError(
            f"{key}={os.fspath(path)!r}: has ids of other data than {source.name} {source.split}; "
            "make the file from the same data, and leave out data.classes"
        )
    return ids
