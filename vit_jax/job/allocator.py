"""The memory allocator of the C library."""

import ctypes
import os

_ARENA_MAX = -8  # M_ARENA_MAX in glibc's malloc.h


def limit_arenas() -> None:
    """Let glibc's malloc make one arena for each processor, instead of eight.

    Threads that allocate at the same time get arenas of their own, and an arena keeps most of the
    memory that they free. The threads that read, save and evaluate use all of them in turn, so with
    many arenas the resident memory of a run grows; see tools/soak.py.

    Call it before threads start, since arenas that exist stay. It changes nothing if the user has
    set MALLOC_ARENA_MAX or GLIBC_TUNABLES, or with another C library.
    """
    if not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & {*os.environ}:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_ARENA_MAX, len(os.sched_getaffinity(0)))
