"""A certificate: what holds on these devices, how fast it is, and whether a kill costs a bit.

certify ──> a process for each part ──> parts/NAME.json ──> certificate.json, page.html, summary.txt

Each part runs in a process of its own, since most devices belong to one process at a time.
"""

import datetime
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.base import files

SCHEMA = 1
NAME = "certificate.json"
MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16")

# {part: function of this package, (context) -> figures}. "said" in the figures is their summary;
# "held" is False where something is not as it should be.
PARTS = {
    "devices": "measures:measure_devices",
    "kernels": "measures:measure_kernels",
    "steps": "steps:measure_steps",
    "gradient": "steps:repeat_gradient",
    "exchanges": "measures:measure_exchanges",
    "transfers": "measures:measure_transfers",
    "input": "measures:measure_images",
    "saves": "measures:measure_saves",
    "recovery": "recovery:kill_and_resume",
}
_PATH = re.compile(r"(?<!\w)(~?/|[a-z]+://)[^\s,;:'\"]+")


class NotRunError(Exception):
    """Why a part cannot run here."""


def run_part(name: str, context: Any) -> dict[str, Any]:
    """The figures of a part, which runs in this process."""
    module, _, function = PARTS[name].partition(":")
    since = time.monotonic()
    try:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), function)(context)
    except NotRunError as reason:
        found = {"not_run": str(reason)}
    return found | {"seconds": time.monotonic() - since}


def certify(
    output: epath.Path, words: Sequence[str], budget_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run every part for at most `budget_s` together, and write the certificate to `output`.

    Args:
      output: folder, which exists.
      words: of the command that runs a part, but for --part.
      budget_s: seconds; a part that is not over then is ended.
      say: called with a line on each part.

    Returns:
      The certificate; {} on processes that do not write it.
    """
    until, found = time.monotonic() + budget_s, dict[str, dict[str, Any]]()
    for name in PARTS:
        result, left_s = part_file(output, name), until - time.monotonic()
        result.unlink(missing_ok=True)
        if left_s <= 0:
            found[name] = {"not_run": "no time was left; give more --minutes"}
        else:
            failure = _run([*words, f"--part={name}"], left_s)
            if result.exists():
                found[name] = json.loads(result.read_text())
            elif failure is not None:
                found[name] = failure
        if name in found:
            say(f"{name}: {summarise(found[name])}")
    if not found:
        return {}
    certificate = {
        "schema": SCHEMA,
        "made": datetime.date.today().isoformat(),
        "held": holds(found),
        "parts": found,
    }
    files.write_whole(output / NAME, json.dumps(certificate, indent=2) + "\n")
    return certificate


def _run(words: Sequence[str], timeout_s: float) -> dict[str, Any] | None:
    """What has kept a part from its result; None: nothing, or another process has it."""
    job = subprocess.Popen(
        [sys.executable, "-m", "vit_jax.main", *words], start_new_session=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        _, errors = job.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(job.pid, signal.SIGKILL)  # with the processes that it has started
        job.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {"not_run": f"it was not over after the {timeout_s:.0f} s that were left"}
    if job.returncode == 0:
        return None
    lines = [line for line in errors.splitlines() if re.match(r"(?!\s).*(error|Error)\b", line)]
    return {"failed": without_paths((lines or [f"exit code {job.returncode}"])[-1])}


def part_file(output: epath.Path, name: str) -> epath.Path:
    """Where a part puts its figures."""
    return output / "parts" / f"{name}.json"


def holds(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no part failed, and all that can be right or wrong is right."""
    return not any("failed" in part or part.get("held") is False for part in parts.values())


def summarise(part: Mapping[str, Any]) -> str:
    """The result of a part in one line."""
    for key, start in (("failed", "FAILED: "), ("not_run", "not run: ")):
        if key in part:
            return start + part[key]
    return ("DOES NOT HOLD: " if part["held"] is False else "") + part["said"]


def without_paths(text: str) -> str:
    """`text` with PATH in the place of each path and address."""
    return _PATH.sub("PATH", text)
