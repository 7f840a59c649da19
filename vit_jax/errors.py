"""What is said of bad input: every fault at once, each with its remedy."""

import difflib
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """What the user gave is wrong: names the key, what was got, what was needed, the remedy.

    faults: one text for each thing that is wrong, beginning with its key.
    """

    def __init__(self, *faults: str, where: str = ""):
        self.faults = faults
        if len(faults) == 1:
            super().__init__(f"{where}: {faults[0]}" if where else faults[0])
        else:
            heading = f"{where}: {len(faults)} faults" if where else f"{len(faults)} faults"
            super().__init__("\n  ".join([heading, *faults]))


def collect_faults(faults: Sequence[str], where: str = "") -> None:
    """Raises one InputError that lists `faults`, if there are any; `where` says of what."""
    if faults:
        raise InputError(*faults, where=where)


class Faults(list[str]):
    """Faults found so far, so that all can be told at once."""

    def need(self, holds: Any, text: str) -> None:
        """Adds the fault `text` unless `holds`."""
        if not holds:
            self.append(text)

    def need_known(self, key: str, value: str, known: Iterable[str]) -> None:
        """Adds a fault, with the nearest known value, unless `value` is one of `known`."""
        known = list(known)
        self.need(value in known, f"{key}={value!r}: {nearest(value, known)}")

    def need_positive(self, key: str, value: float | None) -> None:
        """Adds a fault unless `value` is positive or None."""
        self.need(value is None or value > 0, f"{key}={value}: needs a positive number")

    def check(self, fn: Callable[..., T], *args: Any, prefix: str = "", **kwargs: Any) -> T | None:
        """fn(*args, **kwargs), or None if it raises InputError, whose faults are added."""
        try:
            return fn(*args, **kwargs)
        except InputError as e:
            self.extend(f"{prefix}{fault}" for fault in e.faults)
            return None


def nearest(word: str, known: Sequence[str]) -> str:
    """The hint behind an unknown word: the nearest known one, else all that are known."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]}?" if close else f"known: {', '.join(known)}"


def check_version(where: str, version: int, known: int) -> None:
    """Raises InputError if the format of `where` is newer than `known`, the newest that is read."""
    if version > known:
        raise InputError(
            f"{where}: has format version {version}, and this vit_jax reads versions up to "
            f"{known}; use the vit_jax that wrote it, or a newer one"
        )


def say_fault_of_file(error: BaseException, file: str, shown: str | None = None) -> str:
    """What a user's Python file has raised, on one line that begins with file and line.

    The dump of the config that ml_collections adds is left out. `shown`: how the file is called,
    if not by its path from the root, `file`.
    """
    line = _line_of(error, file)
    at = f"{shown or file}:{line}" if line else shown or file
    name = type(error).__name__
    if isinstance(error, AttributeError) and error.args and isinstance(error.args[0], KeyError):
        error = error.args[0]  # ml_collections wraps the one in the other
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = re.sub(r'Other fields present: ".*}"', "", text, flags=re.DOTALL)
    return f"{at}: {name}: {' '.join(text.split())}"


def _line_of(error: BaseException, file: str) -> int | None:
    """The innermost line of `file` on the way to `error`."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    return lines[-1] if lines else None
