"""The age of this process."""

import os
import pathlib
import time

import psutil


def process_age() -> float:
    """Seconds since this process started, before Python itself did.

    On Linux by a clock that never jumps, to 0.01 s.
    """
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(stat, os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):  # another system
        return max(time.time() - psutil.Process().create_time(), 0.0)


def started_at(stat: str, ticks_per_s: int) -> float:
    """When a process started, in seconds from the boot, by its /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()  # its name may hold spaces and brackets
    return int(fields[19]) / ticks_per_s  # field 22 in proc(5)
