"""Starts programs in processes that have the libraries imported, which takes longer than a run.

They are forked from a server of `multiprocessing` that has no threads and no JAX backend.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import subprocess
import sys

from cheap_compilation import cheap_flags

ROOT = pathlib.Path(__file__).parent.parent
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["flax.linen", "jax", "optax", "orbax.checkpoint", "sklearn.datasets", "tensorflow",
     "tensorflow_datasets", "vit_jax.run.train"]
)  # fmt: skip


class Forked:
    """`python PROGRAM WORDS...` in the repository's folder, with the interface of subprocess.Popen.

    Args:
      program: a file, or ("-m", module).
      words: its command line.
      output: the file for what it prints, errors included.
      environment: variables to set; those of libraries work only if they are read after import.
    """

    def __init__(self, program, words, output, environment):
        args = (program, [*map(str, words)], str(output), environment)
        self._process = _SERVER.Process(target=_run, args=args, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def stop():
    """End the server, so that its time counts as time of the tests."""
    multiprocessing.forkserver._forkserver._stop()


def _run(program, words, output, environment):
    os.chdir(ROOT)
    os.environ.update({"XLA_FLAGS": cheap_flags()} | environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    import jax

    all_passes = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0"
    jax.config.update("jax_disable_most_optimizations", not all_passes)  # as in conftest.py
    sys.argv[1:] = words
    if isinstance(program, tuple):
        _, module = program
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = str(program)
        runpy.run_path(str(program), run_name="__main__")
