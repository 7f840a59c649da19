"""Files of record ids, of `data.exclude` and `data.subset`, in NumPy's format .npz.

record       int64 (n,), rising: their numbers in the split as it is stored
fingerprint  of the data whose records they are
"""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.data.contract import Source

SUFFIX = ".npz"


def ids_to_bytes(ids: np.ndarray, fingerprint: str) -> bytes:
    """The content of a file of rising `ids` (n,) of the source with this fingerprint."""
    np.savez(content := io.BytesIO(), record=ids.astype(np.int64), fingerprint=fingerprint)
    return content.getvalue()


def read_ids(path: str | os.PathLike, key: str) -> tuple[np.ndarray, str]:
    """The ids of a file, int64 (n,), and the fingerprint of their data.

    Raises: InputError naming `key` if it is not a file of ids.
    """
    where = f"{key}={os.fspath(path)!r}"
    try:
        with np.load(io.BytesIO(epath.Path(path).expanduser().read_bytes())) as found:
            ids, fingerprint = found["record"], str(found["fingerprint"])
    except FileNotFoundError:
        raise InputError(f"{where}: there is no such file") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise InputError(
            f"{where}: is not a file of record ids ({e}); `vit_jax duplicates` or `vit_jax curate` "
            "writes one"
        ) from None
    if ids.dtype != np.int64 or ids.ndim != 1 or (np.diff(ids) <= 0).any():
        raise InputError(f"{where}: needs `record`, rising numbers of int64 (n,)")
    return ids, fingerprint


def ids_in(source: Source, path: str | os.PathLike, key: str) -> np.ndarray:
    """The ids of a file, int64 (n,).

    Raises: InputError naming `key` if it is not a file of ids, or they are ids of other data.
    """
    ids, fingerprint = read_ids(path, key)
    in_range = not len(ids) or 0 <= ids[0] <= ids[-1] < source.num_examples
    if fingerprint != source.fingerprint or not in_range:
        raise InputError(
            f"{key}={os.fspath(path)!r}: {source.name} {source.split} is not the data of this "
            "file, or has changed since; write it again with the same keys of data"
        )
    return ids
