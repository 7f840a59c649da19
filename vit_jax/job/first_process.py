"""What the first process of a container owes to the others.

Linux drops a signal for process 1 that it has no handler for, and Python's own handlers wait until
a call into C, such as a compilation, has returned.
"""

import os
import signal

from vit_jax.job import exit_codes

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2)  # fmt: skip


def run_in_child_of_first_process() -> None:
    """Returns at once, or, if this is process 1, in a child of it, for which signals work.

    Process 1 itself passes signals on to the child, takes note of other processes' ends, and ends
    as the child does. To be called before there are threads.
    """
    if os.getpid() != 1:
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        os.setsid()  # that Ctrl-C reaches it through process 1 alone
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    os._exit(exit_codes.of_ended(os.waitstatus_to_exitcode(status)))
