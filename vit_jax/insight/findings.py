"""The result of a check, which comes within a time limit."""

import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.errors import InputError

OK, WARNING, FAILED = "ok", "warning", "failed"


class Finding(NamedTuple):
    """The result of a check: its subject, OK, WARNING or FAILED, what was found, and the remedy."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def bounded(subject: str, check: Callable[[], Finding], timeout_s: float, remedy: str) -> Finding:
    """The result of `check`; FAILED with `remedy` if it raises or takes longer than `timeout_s`.

    After a timeout the remedy is also to wait longer: the machine may only be busy.
    A check that hangs is left behind in its thread, which does not keep the process alive.
    """
    result: concurrent.futures.Future[Finding] = concurrent.futures.Future()
    context = contextvars.copy_context()  # holds the plug-ins in use

    def run():
        try:
            result.set_result(context.run(check))
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, daemon=True, name=f"doctor: {subject}").start()
    try:
        return result.result(timeout_s)
    except concurrent.futures.TimeoutError:
        longer = f"on a busy machine wait longer, with --timeout_s={2 * timeout_s:g}; else {remedy}"
        return Finding(subject, FAILED, f"no answer within {timeout_s:g} s", longer)
    except InputError as e:
        return Finding(subject, FAILED, str(e), "")  # it has its own remedy
    except Exception as e:
        said = " ".join(str(e).split())[:300]
        return Finding(subject, FAILED, f"{type(e).__name__}: {said}", remedy)
