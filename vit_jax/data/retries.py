"""Reads that are tried again: what a record holds must not depend on a moment of a disk or network.

Only bytes that were read and are wrong make a record corrupt. A read that keeps failing ends the
run, so that the same command goes on with the same bits.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from etils import epath

from vit_jax.base.errors import ReadError, shown
from vit_jax.data.host_tf import tf

T = TypeVar("T")

_PAUSES = (0.5, 1, 2, 4, 8, 16)  # seconds
_sure = contextvars.ContextVar("sure", default=False)
_failed: list[ReadError] = []  # in threads of TensorFlow, which makes them errors of its own


def is_of_wrong_bytes(error: Exception) -> bool:
    """Whether the bytes were read, and are wrong.

    Errors of Pillow and pyarrow are OSErrors too, but without a number.
    """
    e = tf.errors
    wrong = e.DataLossError, e.InvalidArgumentError, e.OutOfRangeError, UnicodeDecodeError
    return isinstance(error, wrong) or (isinstance(error, OSError) and error.errno is None)


def retried(read: Callable[[], T], what: str | os.PathLike) -> T:
    """read(), called again after pauses while the system refuses; `what` names it in messages.

    Raises: ReadError if it keeps failing; at once, what `read` raises of wrong bytes.
    """
    said = ""
    for pause in (*_PAUSES, None):
        try:
            return read()
        except (OSError, tf.errors.OpError) as e:
            raise_failed()
            if is_of_wrong_bytes(e):
                raise
            said = getattr(e, "message", str(e)).splitlines()[0]
        if pause == _PAUSES[0]:
            logging.getLogger("vit_jax").warning("%s: %s; trying again", shown(what), said)
        if pause is not None:
            time.sleep(pause)
    raise ReadError(
        f"{shown(what)}: cannot be read, after {len(_PAUSES) + 1} tries in {sum(_PAUSES):.0f} s "
        f"({said}); restore it or its disk, and run the same command to continue"
    )


def read_if_there(path: str | os.PathLike) -> bytes:
    """The content of a file that may have been missing from the start.

    It is missing, which raises FileNotFoundError, where its folder can be seen without it.
    """
    file = epath.Path(path)

    def read() -> bytes | None:
        try:
            return file.read_bytes()
        except FileNotFoundError:
            if not file.parent.is_dir():
                raise
        with contextlib.suppress(FileNotFoundError):  # its folder may just have come back
            return file.read_bytes()
        return None

    if (content := retried(read, path)) is None:
        raise FileNotFoundError(f"{shown(path)} does not exist")
    return content


def read_in_python(read: Callable[..., Any], *args: tf.Tensor) -> tf.Tensor:
    """read(*args), text; `raise_failed` raises its ReadErrors, which data sets may ignore."""

    def noted(*args: Any) -> Any:
        try:
            return read(*args)
        except ReadError as e:
            _failed.append(e)
            raise

    return tf.numpy_function(noted, args, tf.string, stateful=False)


def raise_failed() -> None:
    """Raise a ReadError of `read_in_python`, if there was one."""
    if _failed:
        error = _failed[0]
        _failed.clear()
        raise error


@contextlib.contextmanager
def sure_reads() -> Iterator[None]:
    """Within it, graphs are made whose reads are tried again; usual ones fail at once."""
    token = _sure.set(True)
    try:
        yield
    finally:
        _sure.reset(token)


def are_sure() -> bool:
    """Whether a graph that is made now must try its reads again."""
    return _sure.get()
