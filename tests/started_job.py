"""Starts a training run of several processes on this host, for tests to observe and disturb."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from cheap_compilation import flags_for
from forked import ROOT, Forked

FAULTY = ROOT / "tests" / "faulty_run.py"


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def said_by_two(program, *words, devices):
    """What each of the two processes of a job prints to standard output.

    Both run the Python text `program`, with these arguments: the address of the job's coordinator,
    the number of the process (0 or 1), and `words`. Once one fails, the other is killed.
    """
    address = free_address()
    environment = {"XLA_FLAGS": flags_for(devices), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(i), *words], env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip

    def finish(process):
        try:
            said = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()
        if process.returncode:  # the other would wait for it
            kill()
        return said

    def kill():
        for process in processes:
            process.kill()

    with ThreadPoolExecutor(2) as pool:
        try:
            outputs = list(pool.map(finish, processes))
        finally:
            kill()
    codes = [process.returncode for process in processes]
    everything = (f"--- process {i}\n{out}{errors}" for i, (out, errors) in enumerate(outputs))
    assert codes == [0, 0], "\n".join(everything)
    return [output for output, _ in outputs]


class Job:
    """A context manager for the processes of one job; on exit it kills all of them.

    Args:
      folder: the folder for the output files, one per process.
      words: command line words for every process.
      num_processes, devices: number of processes, and of devices per process.
      own: {process: (a fault of faulty_run.py or "", words for only this process)}.
    """

    def __init__(self, folder, *words, num_processes=2, devices=2, own=None):
        address = free_address()
        environment = {"XLA_FLAGS": flags_for(devices)}
        self.outputs = [folder / f"process-{i}.txt" for i in range(num_processes)]
        self.processes, self.ended_at = [], {}
        for i, output in enumerate(self.outputs):
            fault, more = (own or {}).get(i, ("", ()))
            joined = (
                f"--coordinator={address}", f"--num_processes={num_processes}",
                f"--process_id={i}",
            )  # fmt: skip
            program = FAULTY if fault else ("-m", "vit_jax.main")
            arguments = [*([fault] if fault else []), *words,
                         *(joined if num_processes > 1 else ()), *more]  # fmt: skip
            output.write_bytes(b"")
            self.processes.append(Forked(program, arguments, output, environment))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # also ends a stopped process
                process.wait()

    def said(self, i):
        return self.outputs[i].read_text()

    def everything(self):
        return "\n".join(f"--- process {i}\n{self.said(i)}" for i in range(len(self.outputs)))

    def wait_until_said(self, i, text, timeout_s=300):
        until = time.monotonic() + timeout_s
        while not re.search(text, self.said(i)):
            running = [process.poll() is None for process in self.processes]
            assert time.monotonic() < until and all(running), f"no {text!r}: {self.everything()}"
            time.sleep(0.1)

    def signal(self, i, number):
        self.processes[i].send_signal(number)

    def codes(self, of=None, timeout_s=120):
        """The exit codes of all processes, or of the processes in `of`."""
        until = time.monotonic() + timeout_s
        of = range(len(self.processes)) if of is None else of
        try:
            return [self.processes[i].wait(max(until - time.monotonic(), 0.1)) for i in of]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not all have ended: {self.everything()}") from None


KILL, STOP, TERMINATE = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
