"""Process 1 in a real PID namespace: signals reach the command at any time."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
MAIN = [sys.executable, "-m", "vit_jax.main", "plan", "--config=configs/quickstart.py:debug"]

# Runs a stand-in for the command, which receives a signal meanwhile.
SCRIPT = """
import ctypes, os, signal, sys
from vit_jax import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def command(argv):
    assert os.getpid() != 1
    {command}

main.execute = command
main.execute_and_exit([])
"""
SAVES = """
    import time
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    print("ready", flush=True)
    while True: time.sleep(0.1)
"""
# ctypes.PyDLL keeps Python's lock, as some calls into C do.
IN_C = 'print("ready", flush=True); ctypes.PyDLL(None).sleep(1000)'


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    except FileNotFoundError as e:
        pytest.skip(f"no PID namespaces here: {e}")
    if done.returncode:
        pytest.skip(f"no PID namespaces here: {done.stderr.strip()}")


@contextlib.contextmanager
def start(*command):
    with subprocess.Popen(
        [*UNSHARE, *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # and with it all processes in the namespace


def child_of(pid):
    """Wait for a process whose parent is `pid`."""
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + 60
    while not (found := path.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.001)
    return int(found[0])


def script(command):
    return start(sys.executable, "-c", SCRIPT.format(command=command))


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [(IN_C, signal.SIGTERM, 143), (IN_C, signal.SIGINT, 130), (SAVES, signal.SIGTERM, 75)],
    ids=["terminated", "interrupted", "saves"],
)
def test_signal_reaches_the_command(command, number, code):
    with script(command) as process:
        assert process.stdout.readline() == "ready\n"
        subprocess.run(["kill", f"-{int(number)}", str(child_of(process.pid))], check=True)
        assert process.wait(timeout=60) == code


def test_signal_while_it_is_being_imported():
    with start(*MAIN, "--topology=v5e:2x2") as process:
        child_of(child_of(process.pid))  # from here on its progress is not visible
        subprocess.run(["kill", str(child_of(process.pid))], check=True)
        assert process.wait(timeout=60) == 143
        assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("command", "code"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
    ids=["by itself", "killed"],
)
def test_it_ends_as_the_command_does(command, code):
    with script(command) as process:
        assert process.wait(timeout=60) == code


def test_other_processes_that_end_are_not_taken_for_the_command():
    orphan = "if os.fork() == 0: os.fork(); os._exit(9)"  # the grandchild becomes process 1's
    command = f"{orphan}\n    import time; time.sleep(0.5); os._exit(4)"
    with script(command) as process:
        assert process.wait(timeout=60) == 4
