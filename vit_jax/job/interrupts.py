"""Ends a job at once for what one of its processes meets: Ctrl-C outside the loop, a lost lock.

That process tells the others by the job's store, and waits for none of them. Python's own handlers
of signals run between its instructions only, so neither in a compilation nor while a process waits
in C++. There a thread ends the process.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from typing import NoReturn

import jax

from vit_jax.job import processes, watchdog
from vit_jax.job.exit_codes import INTERRUPTED

_GRACE_S = 4.0  # after Ctrl-C, for the main thread to end by itself
_PARTING_S = 2.0  # to tell the others, and for them to hear it before the store is gone
# Phases of the loop that Ctrl-C lets end, however long they take: the run saves after them.
_SAVES_AFTER = ("step", "evaluation", "comparison", "save")
_KEY, _WAIT_MS = "job/end", 10**9

_ending = threading.Lock()  # held by the thread that ends this process
# Python writes the number of each signal to the socket, from C; with the descriptor before it.
_awake: tuple[socket.socket, int] | None = None


def watch() -> None:
    """End this program within seconds of Ctrl-C, or at once if it comes twice, whatever it does.

    In the loop, `processes.PreemptionGuard` handles the first one, and the run saves. Only the main
    thread can watch; on another one this does nothing.
    """
    global _awake
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as nohup asks
        return
    stop()
    numbers, awake = socket.socketpair()
    awake.setblocking(False)
    _awake = awake, signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_interrupt, args=(numbers,), daemon=True).start()


def stop() -> None:
    """Leave Ctrl-C to Python again."""
    global _awake
    if _awake is not None:
        awake, before = _awake
        signal.set_wakeup_fd(before)
        awake.close()
        _awake = None


def listen() -> None:
    """End this process as soon as another process of its job calls `end_job`."""
    client = processes.client()
    if client is None:
        return

    def wait() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a job that has ended
            process, code, why = json.loads(client.blocking_key_value_get(_KEY, _WAIT_MS))
            if _ending.acquire(blocking=False):
                _end_after(_PARTING_S, code)
                processes.say(f"process {process} has ended the job: {why}")
                processes.exit_now(code, _PARTING_S / 2)

    threading.Thread(target=wait, daemon=True).start()


def end_job(code: int, why: str) -> NoReturn:
    """End this process, and the others of its job, with `code`.

    Nothing is waited for: at Python's own exit a compilation that was interrupted goes on.
    """
    with _ending:
        _end_after(2 * _PARTING_S, code)
        if (client := processes.client()) is not None:
            said = json.dumps([processes.distributed_state().process_id, code, why])
            tell = threading.Thread(
                target=lambda: client.key_value_set(_KEY, said, allow_overwrite=True), daemon=True
            )
            tell.start()
            tell.join(_PARTING_S)
        processes.exit_now(code, _PARTING_S / 2)


def _wait_for_interrupt(numbers: socket.socket) -> None:
    while received := numbers.recv(1):
        if received[0] != signal.SIGINT:
            continue
        guard = processes.PreemptionGuard.entered
        again = bool(select.select([numbers], [], [], _GRACE_S)[0])
        if again and not numbers.recv(1):  # `stop` has closed the other end
            return
        phase = watchdog.current_phase()
        if again or guard is None or not (guard.interrupted or phase in _SAVES_AFTER):
            print(f"Interrupted in the phase {phase}; run the same command again", file=sys.stderr)
            end_job(INTERRUPTED, f"Ctrl-C in the phase {phase}")


def _end_after(seconds: float, code: int) -> None:
    """End this process after so long at the latest, whatever its other threads hold."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()
