"""Errors for bad input: all faults are reported at once, each with its remedy."""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneProcessError(RuntimeError):
    """An error that only one process of a job meets; it ends the others, see `job.interrupts`."""


class InputError(ValueError):
    """Wrong user input. The message gives the key, its value, the requirement and the remedy.

    faults: one text per fault, starting with its key.
    """

    def __init__(self, *faults: str, where: str = ""):
        self.faults = faults
        if len(faults) == 1:
            super().__init__(f"{where}: {faults[0]}" if where else faults[0])
        else:
            heading = f"{where}: {len(faults)} faults" if where else f"{len(faults)} faults"
            super().__init__("\n  ".join([heading, *faults]))


class ReadError(OneProcessError):
    """A file that was there cannot be read now; the command can be repeated when it can."""


class RaisedByAll(Exception):
    """Raised by every process of a job at the same point: it follows from values that all share.

    Any other error in a job of several processes belongs to one process, and the others run on.
    """


class SharedInputError(InputError, RaisedByAll):
    """Wrong input that every process of a job finds at the same point of a running job."""


def collect_faults(faults: Sequence[str], where: str = "") -> None:
    """Raise one InputError that lists `faults`, if any; `where` names the file or flag at fault."""
    if faults:
        raise InputError(*faults, where=where)


class Faults(list[str]):
    """Faults found so far, collected so that all are reported at once."""

    def need(self, holds: Any, text: str) -> None:
        """Add the fault `text` unless `holds`."""
        if not holds:
            self.append(text)

    def need_known(self, key: str, value: str, known: Iterable[str]) -> None:
        """Add a fault that suggests the nearest known value, unless `value` is in `known`."""
        known = list(known)
        self.need(value in known, f"{key}={value!r}: {nearest(value, known)}")

    def need_positive(self, key: str, value: float | None, most: int | None = None) -> None:
        """Add a fault unless `value` is None, or positive and not more than `most`."""
        holds = value is None or (value > 0 and (most is None or value <= most))
        up_to = "" if most is None else f", up to {most:,}"
        self.need(holds, f"{key}={value}: needs a positive number{up_to}")

    def check(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return fn(*args, **kwargs); if it raises InputError, add its faults and return None."""
        return self.check_in("", fn, *args, **kwargs)

    def check_in(
        self, prefix: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """`check` with `prefix` before each fault."""
        try:
            return fn(*args, **kwargs)
        except InputError as e:
            faults = [f"{prefix}{fault}" for fault in e.faults]
            self.extend(fault for fault in faults if fault not in self)
            return None


_MOST = 14  # known names in a message
_FEW = 5  # names of images, keys and so on


def nearest(word: str, known: Sequence[str]) -> str:
    """Hint for an unknown word: the nearest known word, or the known words, at most `_MOST`."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"did you mean {by_lower[close[0]]}?"
    if len(known) <= _MOST:
        return f"known: {', '.join(known)}" if known else "there are none"
    few = difflib.get_close_matches(word.lower(), by_lower, n=4, cutoff=0.0)
    return f"known: {', '.join(by_lower[name] for name in few)} and {len(known) - len(few)} more"


def shown(path: str | os.PathLike) -> str:
    """`path` as messages show it: bytes that are not UTF-8 and unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in os.fspath(path))


def shown_lines(text: str) -> str:
    """`shown` of each line: no text of others moves the cursor or colours a terminal."""
    return "\n".join(map(shown, text.split("\n")))


def few(names: Iterable[str]) -> str:
    """The first few of `names` for a message, and how many more there are."""
    names = [*names]
    more = f" and {len(names) - _FEW:,} more" if len(names) > _FEW else ""
    return ", ".join(map(shown, names[:_FEW])) + more


def check_version(where: str, version: int, known: int) -> None:
    """Raise InputError unless the format `version` of `where` is `known`."""
    if version != known:
        raise InputError(
            f"{where}: format version {version}; this vit_jax reads version {known}; use the "
            "vit_jax that wrote it"
        )


def say_fault_of_file(error: BaseException, file: str, shown: str | None = None) -> str:
    """One line, starting with file and line, for an error raised by a user's Python file.

    `file` is the absolute path; `shown` replaces it in the text.
    """
    line = _line_of(error, file)
    at = f"{shown or file}:{line}" if line else shown or file
    name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    match = re.match(r"cannot import name '(\w+)'", text)
    module = getattr(error, "name", None)
    if match is not None and module in sys.modules:
        text = f"{module} has no {match[1]}; {nearest(match[1], dir(sys.modules[module]))}"
    return f"{at}: {name}{' '.join(text.split())}"


def _line_of(error: BaseException, file: str) -> int | None:
    """Innermost line of `file` in the traceback of `error`."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    return lines[-1] if lines else None
