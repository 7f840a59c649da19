"""Arenas of glibc's malloc, counted in a process of one processor with eight threads."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, threading
from vit_jax.job.allocator import limit_arenas

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
limit_arenas()
c, together = ctypes.CDLL(None), threading.Barrier(8)

def allocate():
    c.malloc(4096)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for each in (threading.Thread.start, threading.Thread.join):
    [each(thread) for thread in threads]
c.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(("of_user", "arenas"), [({}, 1), ({"MALLOC_ARENA_MAX": "3"}, 3)])
def test_an_arena_for_each_processor_unless_the_user_says_otherwise(of_user, arenas):
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env | of_user, text=True, stderr=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    assert done.stderr.count("Arena ") == arenas, done.stderr
