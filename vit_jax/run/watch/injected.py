"""Makes the faults of `job.inject`: on a device, a process, its network, its clock, its disk.

WORKDIR/injected/FAULT, with a line for each time, is written before a fault is made, so that a run
which is started again goes on past it.
"""

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
from etils import epath

from vit_jax.checkpoints import memory
from vit_jax.checkpoints.restore import saved_steps
from vit_jax.checkpoints.seal import names_of_files
from vit_jax.experiment.state import TrainState
from vit_jax.job import processes
from vit_jax.run.build import Run
from vit_jax.run.setup.workdir import run_name
from vit_jax.run.watch.faults import Fault, flip_weight, parse_faults
from vit_jax.run.watch.ledger import began_at

logger = logging.getLogger("vit_jax")

FOLDER = "injected"  # in the workdir


def faults_left(run: Run) -> list[Fault]:
    """The faults that are still to be made in the workdir; the same on all processes."""
    faults = parse_faults(run.settings.job.inject)
    if not faults:
        return []

    def find() -> dict[str, list[float]]:
        (began, _), found = began_at(run.workdir), {}
        for fault in faults:
            path = run.workdir / FOLDER / fault.text
            made = path.read_text().split() if path.exists() else None
            if fault.every or made is None:
                found[fault.text] = [began, *map(float, made or ())]
        return found

    left = processes.say_to_all("the faults made", find, run.settings.job.compile_deadline_s)
    return [fault._replace(times=left[fault.text]) for fault in faults if fault.text in left]


def is_here(run: Run, fault: Fault) -> bool:
    """Whether this process makes the fault."""
    device = run.mesh.devices.flat[fault.place] if fault.is_flip else None
    return jax.process_index() == (device.process_index if device else fault.place)


def make(run: Run, fault: Fault, state: TrainState) -> TrainState:
    """Make the fault, in this process and its devices; return the state to go on with.

    The last of its `times` is now.
    """
    logger.warning("job.inject: %s", fault.text)
    (run.workdir / FOLDER).mkdir(exist_ok=True)
    (run.workdir / FOLDER / fault.text).write_text("\n".join(map(str, fault.times[1:])))
    me = os.getpid()
    match fault.kind:
        case "flip:weight":  # the replay makes the others
            device = run.mesh.devices.flat[fault.place]
            return state.replace(params=flip_weight(state.params, device))
        case "kill":
            os.kill(me, signal.SIGKILL)
        case "term":
            os.kill(me, signal.SIGTERM)
        case "stop":
            goes_on = f"(sleep {fault.seconds}; kill -CONT {me}) > /dev/null 2>&1 &"
            subprocess.run(["sh", "-c", goes_on], check=True)
            os.kill(me, signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case "slow":
            time.sleep(fault.seconds)
        case "lose":
            kept = memory.folder_here(run_name(run.workdir), run.settings.checkpoint.memory_dir)
            shutil.rmtree(kept, ignore_errors=True)
            os.kill(me, signal.SIGKILL)
        case "cut":
            _cut_connections()
        case "clock":
            real = time.time
            setattr(time, "time", lambda: real() + fault.seconds)  # noqa: B010
        case "slow_disk":
            _slow_writes(fault.seconds)
        case "full_disk":
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # Python ignores SIGXFSZ
        case "damage":
            _damage(run.workdir)
            os.kill(me, signal.SIGKILL)
    return state


def _cut_connections() -> None:
    """Shut down every TCP connection that this process has."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = socket.socket(fileno=int(name))  # raises if it is another file
            stack.callback(connection.detach)  # it is not ours to close
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises if it only listens
                connection.shutdown(socket.SHUT_RDWR)


def _slow_writes(seconds: float) -> None:
    """Sleep before Python opens a file for writing, renames one or writes a row.

    TensorStore writes arrays at its own speed.
    """

    def hook(event: str, args: tuple) -> None:
        is_opened = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if is_opened or event in ("os.rename", "vit_jax.write"):
            time.sleep(seconds)

    sys.addaudithook(hook)


def _damage(workdir: epath.Path) -> None:
    """Flip a bit in the largest file of the newest save, and write half a row."""
    for step in saved_steps(workdir / "checkpoints")[:1]:
        saved = workdir / "checkpoints" / str(step)
        paths = [saved / name for name in names_of_files(saved)]
        path = max(paths, key=lambda path: path.stat().length)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    rows = workdir / "metrics.jsonl"
    rows.write_text(rows.read_text() + '{"step": ')  # object stores cannot append
