"""How `python -m vit_jax.main` ends: what its exit code tells people, launchers and schedulers."""

import os
import signal

DONE = os.EX_OK
FAILED = 1
INPUT_WRONG = 2  # the same command fails again
DOES_NOT_FIT = 3  # by the plan
PREEMPTED = os.EX_TEMPFAIL  # 75: told to stop, and saved; the same command goes on
INTERRUPTED = 128 + signal.SIGINT  # 130: by Ctrl-C
TERMINATED = 128 + signal.SIGTERM  # 143: told to stop before it trained; the same command goes on


def of_ended(code: int) -> int:
    """The exit code by that of `subprocess` or `os`, which say -N of what signal N has ended."""
    return code if code >= 0 else 128 - code
