"""WORKDIR/starts.jsonl: one line per start of a run: its command, code and hardware.

time, command, config, overrides: when, and the words of the command line.
resumed_at: the step that it went on from; null: from the beginning.
commit, clean: state of the clone of vit_jax; null if it is no clone, as after pip install.
    Clean: no file that git follows was changed.
software: versions, compiler flags and the digest of the code, as processes compare them.
hardware: host, devices, processes, processors.
"""

import datetime
import json
import logging
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

import vit_jax
from vit_jax.files import write_whole
from vit_jax.job.software import software

logger = logging.getLogger("vit_jax")

_GIT_S = 10  # git on a slow disk is not waited for


def record_start(
    workdir: epath.Path,
    devices: Sequence[jax.Device],
    resumed_at: int | None,
    command: Mapping[str, Any],
) -> None:
    """Adds the line of this start; called by process 0, which holds the workdir.

    A disk that fails costs only the line, with a warning.

    Args:
      workdir: of the run.
      devices: of its mesh.
      resumed_at: the step that it goes on from; None: it begins.
      command: what else is known of the command, as "config" and "overrides".
    """
    line = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        **command,
        "resumed_at": resumed_at,
        **clone_state(pathlib.Path(vit_jax.__file__).resolve().parents[1]),
        "software": {"vit_jax": vit_jax.__version__, **software()},
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
            "processes": jax.process_count(),
        },
    }
    path = workdir / "starts.jsonl"
    try:
        before = path.read_bytes() if path.exists() else b""
        write_whole(path, before + json.dumps(line, ensure_ascii=False).encode() + b"\n")
    except OSError as e:
        logger.warning(
            "%s: cannot be written (%s); this start is not recorded", path, e.strerror or e
        )


def last_devices(workdir: epath.Path) -> tuple[int, str] | None:
    """Number and kind of the devices of the last start in `workdir`; None: no line tells them."""
    try:
        lines = (workdir / "starts.jsonl").read_text().splitlines()
        hardware = json.loads(lines[-1])["hardware"]
        return hardware["devices"], hardware["device_kind"]
    except (OSError, ValueError, LookupError, TypeError):  # no file, or a damaged one
        return None


def clone_state(root: pathlib.Path) -> dict[str, str | bool | None]:
    """{"commit": hash, "clean": whether files that git follows are as committed} of a clone.

    Both are None if `root` is not the top of a clone, or git is not there.
    """
    top, commit = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or pathlib.Path(top).resolve() != root:
        return {"commit": None, "clean": None}
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "clean": None if changes is None else changes == ""}


def _git(root: pathlib.Path, *words: str) -> str | None:
    """What git says of the folder `root`; None: it cannot."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
