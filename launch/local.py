"""Run a job on this host in several processes, with virtual CPU devices or shares of its GPUs.

  python launch/local.py --num_processes=2 --devices_per_process=2 -- \\
    --config=configs/quickstart.py --workdir=runs/quickstart

Process 0 prints here; the output of every process is kept in WORKDIR/logs/process_I.log. If
one process fails, all are stopped. A preempted job (exit code 75, or SIGTERM before training)
restarts and resumes. So does a job that has lost a process to a signal, such as SIGKILL, at most
--max_restarts times; with checkpoint.memory_every it resumes from host memory. To stop the job,
stop this command: the job saves, and the exit code is 75 on SIGTERM and 130 on Ctrl-C. A second
Ctrl-C ends the job at once.
"""

import argparse
import collections
import contextlib
import glob
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from command_line import add_common_flags, launcher_main, make_parser, positive, say, shell
from environment import read_environment
from etils import epath
from job import Job, check_job

from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, INTERRUPTED, PREEMPTED, of_ended

_LAST_LINES = 20  # lines to show of a failed process
_GRACE_S = 5  # for the other processes to print their messages, once one has failed
_POLL_S = 0.05
_MOST_DEVICES = 1024  # of one host
_FLUSH_S = 60  # interval between writes of the logs to an object store


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--num_processes", type=positive, required=True, help="number of processes")
    parser.add_argument("--devices_per_process", type=positive, metavar="N",
                        help="default: 1 on CPU; GPUs: equal shares")  # fmt: skip
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: gpu if there is one")
    parser.add_argument("--max_restarts", type=int, default=3,
                        help="limit of restarts after a process was ended by a signal")  # fmt: skip
    add_common_flags(parser, "the commands")
    return parser


def visible_gpus() -> list[str]:
    """NVIDIA GPUs of this host, limited to CUDA_VISIBLE_DEVICES if it is set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def device_environments(
    num_processes: int, devices_per_process: int | None, gpus: Sequence[str]
) -> list[dict[str, str]]:
    """Environment of each process that selects its devices: its GPUs, or virtual CPU devices.

    Raises:
      InputError: if the GPUs cannot be divided evenly, or are too few.
    """
    if not gpus:
        num_devices = str(devices_per_process or 1)
        return [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": num_devices}] * num_processes
    if devices_per_process is None and len(gpus) % num_processes:
        divisors = [str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0]
        raise InputError(
            f"--num_processes={num_processes}: does not divide the {len(gpus)} GPUs of this host; "
            f"give {' or '.join(divisors)}, or --devices_per_process"
        )
    each = devices_per_process or len(gpus) // num_processes
    if each * num_processes > len(gpus):
        raise InputError(
            f"--num_processes={num_processes} x --devices_per_process={each}: this host has "
            f"{len(gpus)} GPUs; lower one of them, or use --platform=cpu"
        )
    shares = [gpus[each * i : each * (i + 1)] for i in range(num_processes)]
    return [{"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def log_path(job: Job, process_id: int) -> epath.Path:
    """Log file of a process."""
    return files.absolute(job.workdir) / "logs" / f"process_{process_id}.log"


def commands(job: Job, num_processes: int) -> list[list[str]]:
    """The command of each process; they connect at a port that is currently free."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = f"--coordinator=localhost:{port}", f"--num_processes={num_processes}"
    return [
        job.command(*common, f"--process_id={i}", python=sys.executable)
        for i in range(num_processes)
    ]


class Process:
    """A process of the job. Its output goes to its log, and to the terminal if it is `shown`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log, shown: bool):
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it only through this command
        )
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self.reason: bytes | None = None  # which lines of libraries may follow
        self._thread = threading.Thread(target=self._keep_output, args=(log, shown), daemon=True)
        self._thread.start()

    def _keep_output(self, log, shown: bool) -> None:
        for line in iter(self._process.stdout.readline, b""):
            log.write(line)
            self.last_lines.append(line)
            if line.startswith((b"error: ", b"watchdog: ")):
                self.reason = line
            if shown:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    @property
    def code(self) -> int | None:
        """Exit code, -N if ended by signal N; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def finish(self) -> None:
        """Wait until it has ended and its output is complete."""
        self._process.wait()
        self._thread.join(timeout=_GRACE_S)


class Stop:
    """Forwards signals of this command to the processes; `signal` is the first one received."""

    def __init__(self):
        self.signal: int | None = None
        self._processes: Sequence[Process] = ()

    def __enter__(self) -> "Stop":
        self._earlier = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # ignored under nohup
        }
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        again = self.signal is not None and number == signal.SIGINT
        self.signal = self.signal or number
        for process in self._processes:
            process.send(signal.SIGKILL if again else number)  # a second Ctrl-C kills at once

    def pass_on_to(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        if self.signal is not None:
            for process in processes:
                process.send(self.signal)


def wait(processes: Sequence[Process], logs: Sequence, stop: Stop) -> Process | None:
    """Wait until all processes have ended; return the one that failed first, if any.

    If a process fails, or is terminated before it trains, the others are killed.
    """
    ended_by, deadline, flushed = None, None, time.monotonic()
    while any(process.code is None for process in processes):
        time.sleep(_POLL_S)
        now = time.monotonic()
        if deadline is None and stop.signal is None:
            ended_by = next((p for p in processes if p.code not in (None, DONE, PREEMPTED)), None)
            if ended_by is not None:  # those beside a killed process know no more than this one
                deadline = now + (0 if ended_by.code < 0 else _GRACE_S)
        if deadline is not None and now > deadline:
            for process in processes:
                process.send(signal.SIGKILL)
        if now > flushed + _FLUSH_S:
            flushed = now
            for log in logs:
                log.flush()
    for process in processes:
        process.finish()
    bad = (p for p in processes if p.code not in (DONE, PREEMPTED, -signal.SIGTERM))
    return ended_by or next(bad, None)


def start_and_wait(job: Job, environments: Sequence[Mapping[str, str]], logs, stop: Stop) -> int:
    """Start the processes and wait for them; return the job's exit code."""
    each = zip(commands(job, len(environments)), environments, logs, strict=True)
    processes = [Process(*own, shown=i == 0) for i, own in enumerate(each)]
    stop.pass_on_to(processes)
    failed = wait(processes, logs, stop)
    if stop.signal == signal.SIGINT:
        return INTERRUPTED
    if failed is None:
        return max(DONE if process.code == DONE else PREEMPTED for process in processes)
    if failed.code == -signal.SIGTERM:
        return PREEMPTED
    number = processes.index(failed)
    sys.stdout.flush()
    end = f"failed with exit code {failed.code}"
    if failed.code < 0:
        end = f"was ended by {signal.Signals(-failed.code).name}"
    print(f"error: process {number} {end}; its last lines:", file=sys.stderr)
    is_far = failed.reason is not None and failed.reason not in failed.last_lines
    for line in [*([failed.reason, b"..."] if is_far else ()), *failed.last_lines]:
        print(f"  {line.decode(errors='replace').rstrip()}", file=sys.stderr)
    if failed.code != INPUT_WRONG:
        print(f"full log: {log_path(job, number)}", file=sys.stderr)
    return of_ended(failed.code)


def open_logs(job: Job, num_processes: int, stack: contextlib.ExitStack) -> list:
    """Open the logs of the processes, appending to earlier runs' logs in the workdir.

    `stack` closes them.

    Raises:
      InputError: if they cannot be written.
    """
    logs = []
    try:
        log_path(job, 0).parent.mkdir(parents=True, exist_ok=True)
        for i in range(num_processes):
            logs.append(files.open_for_append(log_path(job, i)))
            stack.callback(logs[-1].close)
    except OSError as e:
        raise InputError(f"--workdir={job.workdir}: {e.strerror}; choose another folder") from None
    return logs


def remove_logs(job: Job, num_processes: int) -> None:
    """Remove the logs of a job whose input was wrong, and the folders that become empty."""
    for i in range(num_processes):
        log_path(job, i).unlink()
    for folder in (log_path(job, 0).parent, files.absolute(job.workdir)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the job of `words` until it is neither preempted nor killed; return its exit code."""
    if flags.num_processes * (flags.devices_per_process or 1) > _MOST_DEVICES:
        raise InputError(
            f"--num_processes={flags.num_processes}: needs at most {_MOST_DEVICES} devices in all"
        )
    gpus = [] if flags.platform == "cpu" else visible_gpus()
    if flags.platform == "gpu" and not gpus:
        raise InputError("--platform=gpu: no NVIDIA GPU found on this host; use --platform=cpu")
    environments = device_environments(flags.num_processes, flags.devices_per_process, gpus)
    job = check_job(words)
    variables = read_environment(flags, job)
    if flags.dry_run:
        print(shell(["mkdir", "-p", str(log_path(job, 0).parent)]))
        each = zip(commands(job, flags.num_processes), environments, strict=True)
        lines = [
            f"{variables.shown}{shell(*own)} 2>&1 | tee -a {shell([str(log_path(job, i))])}"
            for i, own in enumerate(each)
        ]
        say("\n".join([*(f"{line} > /dev/null &" for line in lines[1:]), lines[0]]))
        return DONE
    environments = [variables.all | environment for environment in environments]
    is_new = not files.absolute(job.workdir).exists()
    with Stop() as stop, contextlib.ExitStack() as stack:
        logs = open_logs(job, flags.num_processes, stack)
        restarts = 0
        while True:
            code = start_and_wait(job, environments, logs, stop)
            is_killed = code > 128 and code != INTERRUPTED and restarts < flags.max_restarts
            if stop.signal is not None or not (code == PREEMPTED or is_killed):
                break
            why = "preempted"
            if is_killed:
                restarts += 1
                why = f"lost a process; restart {restarts} of at most {flags.max_restarts}"
            print(f"{why}; running the same command again", flush=True)
    if code == INPUT_WRONG and is_new and len([*files.absolute(job.workdir).iterdir()]) == 1:
        remove_logs(job, flags.num_processes)
    return code


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
