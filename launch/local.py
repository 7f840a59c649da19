"""Runs a job on this host: several processes, with virtual CPU devices or its GPUs split.

  python launch/local.py --num_processes=2 --devices_per_process=2 -- \\
    --config=configs/quickstart.py --workdir=runs/quickstart

What process 0 says is shown; what each says is in WORKDIR/logs/process_I.log. If one fails, all are
ended. A job that was preempted (exit code 75, or SIGTERM before it trained) starts again and
resumes; to stop it for good, stop this command: by SIGTERM it saves and exits with 75, by Ctrl-C
with 130.
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

from command_line import launcher_main, make_parser, positive, shell
from etils import epath
from job import Job, check_job

from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, INTERRUPTED, PREEMPTED, of_ended

_LAST_LINES = 20  # that are shown of the process that failed
_GRACE_S = 5  # for the others to say what they have to say, once one has failed
_POLL_S = 0.05
_FLUSH_S = 60  # between writes of the logs to an object store


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--num_processes", type=int, required=True, help="of the job")
    parser.add_argument(
        "--devices_per_process", type=int, metavar="N", help="default: 1 on CPU; GPUs: equal shares"
    )
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: gpu if there is one")
    parser.add_argument("--dry_run", action="store_true", help="print what would run, and end")
    return parser


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs of this host as CUDA_VISIBLE_DEVICES names them, which may leave some out."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def device_environments(
    num_processes: int, devices_per_process: int | None, gpus: Sequence[str]
) -> list[dict[str, str]]:
    """What gives each process its devices: its share of `gpus`, or virtual ones of the CPU.

    Raises:
      InputError: the processes do not divide the GPUs, or these are too few.
    """
    if not gpus:
        devices = str(devices_per_process or 1)
        cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
        return [cpu] * num_processes
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
            f"{len(gpus)} GPUs; lower one, or take --platform=cpu"
        )
    shares = [gpus[each * i : each * (i + 1)] for i in range(num_processes)]
    return [{"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def log_path(job: Job, process_id: int) -> epath.Path:
    """Where the output of a process is kept."""
    return files.absolute(job.workdir) / "logs" / f"process_{process_id}.log"


def commands(job: Job, num_processes: int) -> list[list[str]]:
    """The command of each process, which meet at a port that is free now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        job.command(
            f"--coordinator=localhost:{port}",
            f"--num_processes={num_processes}",
            f"--process_id={i}",
            python=sys.executable,
        )
        for i in range(num_processes)
    ]


class Process:
    """A process of the job, whose output goes to its log, of process 0 to the terminal too."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log, shown: bool):
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through this command alone
        )
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._keep_output, args=(log, shown), daemon=True)
        self._thread.start()

    def _keep_output(self, log, shown: bool) -> None:
        for line in iter(self._process.stdout.readline, b""):
            log.write(line)
            self.last_lines.append(line)
            if shown:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()

    @property
    def code(self) -> int | None:
        """The exit code, -N if ended by signal N; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def finish(self) -> None:
        """Waits for its end and for the last of its output."""
        self._process.wait()
        self._thread.join(timeout=_GRACE_S)


class Stop:
    """Passes the signals that this command gets on to the processes; `signal` is the first."""

    def __init__(self):
        self.signal: int | None = None
        self._processes: Sequence[Process] = ()

    def __enter__(self) -> "Stop":
        numbers = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup asks for that
        ]
        self._earlier = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        again = self.signal is not None and number == signal.SIGINT
        self.signal = self.signal or number
        for process in self._processes:
            process.send(signal.SIGKILL if again else number)  # a second Ctrl-C waits for nothing

    def pass_on_to(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        if self.signal is not None:
            for process in processes:
                process.send(self.signal)


def wait(processes: Sequence[Process], logs: Sequence, stop: Stop) -> Process | None:
    """Waits until all have ended; the one whose failure ended the others, if one failed.

    The rest of a job in which one has failed, or has been ended before it trained, is killed.
    """
    ended_by, deadline, flushed = None, None, time.monotonic()
    while any(process.code is None for process in processes):
        time.sleep(_POLL_S)
        now = time.monotonic()
        if deadline is None and stop.signal is None:
            ended_by = next((p for p in processes if p.code not in (None, DONE, PREEMPTED)), None)
            deadline = now + _GRACE_S if ended_by else None
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
    """Starts the processes and waits for them; the job's exit code."""
    processes = [
        Process(command, environment, log, shown=i == 0)
        for i, (command, environment, log) in enumerate(
            zip(commands(job, len(environments)), environments, logs, strict=True)
        )
    ]
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
    print(f"error: process {number} {describe(failed.code)}; its last lines:", file=sys.stderr)
    for line in failed.last_lines:
        print(f"  {line.decode(errors='replace').rstrip()}", file=sys.stderr)
    if failed.code != INPUT_WRONG:
        print(f"all it said is in {log_path(job, number)}", file=sys.stderr)
    return of_ended(failed.code)


def describe(code: int) -> str:
    """What an exit code says."""
    if code > 0:
        return f"failed with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def open_logs(job: Job, num_processes: int, stack: contextlib.ExitStack) -> list:
    """The logs of the processes, to append to what earlier runs in the workdir have said.

    `stack` will close them.

    Raises:
      InputError: they cannot be written.
    """
    logs = []
    try:
        log_path(job, 0).parent.mkdir(parents=True, exist_ok=True)
        for i in range(num_processes):
            path = log_path(job, i)
            logs.append(files.open_for_append(path, path.read_bytes() if path.exists() else b""))
            stack.callback(logs[-1].close)
    except OSError as e:
        raise InputError(f"--workdir={job.workdir}: {e.strerror}; choose another") from None
    return logs


def remove_logs(job: Job, num_processes: int) -> None:
    """Leaves no trace of a job whose input was wrong."""
    for i in range(num_processes):
        log_path(job, i).unlink()
    for folder in (log_path(job, 0).parent, files.absolute(job.workdir)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs the job of `words` as `flags` say, again while it is preempted; its exit code."""
    positive(flags, "num_processes", "devices_per_process")
    gpus = [] if flags.platform == "cpu" else visible_gpus()
    if flags.platform == "gpu" and not gpus:
        raise InputError("--platform=gpu: this host shows no NVIDIA GPU; take --platform=cpu")
    environments = device_environments(flags.num_processes, flags.devices_per_process, gpus)
    job = check_job(words)
    if flags.dry_run:
        print(shell(["mkdir", "-p", str(log_path(job, 0).parent)]))
        lines = [
            f"{shell(command, environment)} 2>&1 | {shell(['tee', '-a', str(log_path(job, i))])}"
            for i, (command, environment) in enumerate(
                zip(commands(job, flags.num_processes), environments, strict=True)
            )
        ]
        print("\n".join([*(f"{line} > /dev/null &" for line in lines[1:]), lines[0]]))
        return DONE
    is_new = not files.absolute(job.workdir).exists()
    with Stop() as stop, contextlib.ExitStack() as stack:
        logs = open_logs(job, flags.num_processes, stack)
        while (code := start_and_wait(job, environments, logs, stop)) == PREEMPTED:
            if stop.signal is not None:
                break
            print("preempted; the same command starts again", flush=True)
    if code == INPUT_WRONG and is_new:
        remove_logs(job, flags.num_processes)
    return code


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
