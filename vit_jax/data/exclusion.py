"""Lists of records that a run leaves out, such as near duplicates of its test set.

A list, which `vit_jax duplicates` writes, holds in NumPy's format .npz:

    record       int64 (m,), sorted: their numbers in the split, before data.classes, data.subset
                 and the shuffle
    fingerprint  of the split
"""

from __future__ import annotations

import io
import zipfile

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.data.contract import Source
from vit_jax.data.subset import leave_out


def exclusion_to_bytes(source: Source, records: np.ndarray) -> bytes:
    """The content of a list of `records` of `source`, int64 (m,), sorted."""
    file = io.BytesIO()
    np.savez(file, record=records, fingerprint=source.fingerprint)
    return file.getvalue()


def read_exclusion(path: str) -> tuple[np.ndarray, str]:
    """(records, fingerprint of their split) of a list; raises InputError if there is none."""
    try:
        with np.load(io.BytesIO(epath.Path(path).expanduser().read_bytes())) as stored:
            return stored["record"], str(stored["fingerprint"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise InputError(
            f"data.exclude={path!r}: not a list of records ({e}); `vit_jax duplicates` writes one"
        ) from None


def exclude(source: Source, path: str) -> Source:
    """`source` without the records in a list.

    Raises: InputError if the list is of other data, or leaves nothing.
    """
    records, of = read_exclusion(path)
    where = f"data.exclude={path!r}: {source.name} {source.split}"
    if of != source.fingerprint:
        raise InputError(
            f"{where} is not the data of this list, or has changed since; write the list again "
            "with `vit_jax duplicates`, and the same keys of data"
        )
    if len(records) == source.num_examples:
        raise InputError(f"{where} has no other records; choose a smaller --distance")
    return leave_out(source, records)
