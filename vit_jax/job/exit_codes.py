"""Exit codes of `python -m vit_jax.main`, for people, launchers and schedulers."""

import os
import signal

DONE = os.EX_OK
FAILED = 1
INPUT_WRONG = 2  # the same command would fail again
DOES_NOT_FIT = 3  # according to the plan
PREEMPTED = os.EX_TEMPFAIL  # 75: told to stop, and saved; the same command continues
INTERRUPTED = 128 + signal.SIGINT  # 130: by Ctrl-C
TERMINATED = 128 + signal.SIGTERM  # 143: told to stop before training; run the same command again


def of_ended(code: int) -> int:
    """Convert a return code of `subprocess` or `os`, where -N means signal N, to an exit code."""
    return code if code >= 0 else 128 - code
