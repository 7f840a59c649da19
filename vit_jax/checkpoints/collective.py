"""Reading that succeeds or fails on all processes together, so that none continues by itself."""

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from jax.experimental import multihost_utils

# Errors that a damaged step raises here, in orbax or in tensorstore. All other errors are faults of
# the disk or the store, and may be gone at the next try.
_ITS_FAULT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, EOFError, KeyError,
              TypeError, ValueError)  # fmt: skip


T = TypeVar("T")


class InvalidError(ValueError):
    """A saved step is damaged; says how, and which process found it."""


def on_all(read: Callable[[], T]) -> T:
    """Return read(); if it fails on any process, raise on every process.

    Raises:
      InvalidError: for errors that a damaged step causes.
    """
    result: T | None = None
    fault: Exception | None = None
    try:
        result = read()
    except Exception as e:  # raised below, once the other processes know
        fault = e
    blameless = fault is not None and not isinstance(fault, _ITS_FAULT)
    verdict = np.int32(0 if fault is None else 1 if blameless else 2)
    verdicts = multihost_utils.process_allgather(verdict).ravel().tolist()
    try:
        if fault is not None and blameless:
            raise fault
        if 1 in verdicts:
            raise RuntimeError(f"process {verdicts.index(1)} could not read the checkpoints")
        if fault is not None:
            first_line = (str(fault).strip() or repr(fault)).splitlines()[0]
            raise InvalidError(f"{type(fault).__name__}: {first_line}") from fault
    finally:
        fault = None  # its traceback holds this frame, and what the callers have read
    if any(verdicts):
        raise InvalidError(f"process {verdicts.index(2)} cannot read its part")
    return cast(T, result)
