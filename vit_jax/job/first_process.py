"""Duties of process 1 in a container.

Linux drops signals to process 1 that it has no handler for, and Python runs its own handlers only
after a call into C, such as a compilation, has returned.
"""

import os
import signal

from vit_jax.job import exit_codes

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2)  # fmt: skip


def run_in_child_of_first_process() -> None:
    """If this is process 1, continue in a child process, for which signals work; else do nothing.

    Process 1 itself forwards signals to the child, reaps other processes, and exits with the
    child's exit code. Must be called before any thread is started.
    """
    if os.getpid() != 1:
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()  # so that Ctrl-C reaches it only through process 1
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(exit_codes.of_ended(os.waitstatus_to_exitcode(status)))
