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
from vit_jax.planning.measured import SCHEMA

NAME = "certificate.json"
_LEAST_S = 20  # a part takes longer to start
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
FAULTS = ("failed", "does not hold")  # verdicts on a part
_ERROR = re.compile(r"(\w*(?:Error|Exception))\b")


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
    return found | {"took_s": time.monotonic() - since}


def certify(
    output: epath.Path,
    words: Sequence[str],
    budget_s: float,
    say: Callable[[str], None],
    is_first: bool = True,
) -> dict[str, Any]:
    """Run every part for at most `budget_s` together, and write the certificate to `output`.

    Args:
      output: folder, which exists.
      words: the words of the command that runs a part, without --part.
      budget_s: seconds; a part that is not over then is ended.
      say: called with a line on each part.
      is_first: whether this is process 0 of its job; the others write nothing.

    Returns:
      The certificate; {} on the other processes.
    """
    until, found = time.monotonic() + budget_s, dict[str, dict[str, Any]]()
    for name in PARTS:
        result, left_s = part_file(output, name), until - time.monotonic()
        if is_first:
            result.unlink(missing_ok=True)
        if left_s < _LEAST_S:
            found[name] = {"not_run": "no time was left; give more --minutes"}
        else:
            failure = _run([*words, f"--part={name}"], left_s, say)
            if is_first:
                found[name] = json.loads(result.read_text()) if result.exists() else {}
                found[name] |= failure
        if is_first:
            say(f"{name}: {summarise(found[name])}")
    if not is_first:
        return {}
    certificate = {
        "schema": SCHEMA,
        "made": datetime.date.today().isoformat(),
        "held": holds(found),
        "parts": found,
    }
    files.write_whole(output / NAME, json.dumps(certificate, indent=2) + "\n")
    return certificate


def _run(words: Sequence[str], timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What has kept a part from its result; {}: nothing. An error is said in whole."""
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
        return {"failed": f"was not over after the {timeout_s:.0f} s that were left"}
    if job.returncode == 0:
        return {}
    lines = [line for line in errors.splitlines() if re.match(r"(?!\s).*(error|Error)\b", line)]
    said = (lines or [f"exit code {job.returncode}"])[-1]
    say(said)
    return {"failed": without_names(said, f"exit code {job.returncode}")}


def keep(context: Any, name: str, found: Mapping[str, Any]) -> None:
    """Put the figures of a part where `certify` looks for them."""
    if context.is_first:
        files.write_whole(part_file(context.output, name), json.dumps(found, indent=2))


def part_file(output: epath.Path, name: str) -> epath.Path:
    """Where a part puts its figures."""
    return output / "parts" / f"{name}.json"


def holds(parts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no part failed, and all that can be right or wrong is right."""
    return not any(verdict(part)[0] in FAULTS for part in parts.values())


def verdict(part: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict on a part, and what it found."""
    for key, word in (("failed", "failed"), ("not_run", "not run")):
        if key in part:
            return word, part[key]
    return {None: "measured", True: "holds", False: "does not hold"}[part["held"]], part["said"]


def summarise(part: Mapping[str, Any]) -> str:
    """The result of a part in one line."""
    word, found = verdict(part)
    start = word.upper() if word in FAULTS else word
    return found if word in ("measured", "holds") else f"{start}: {found}"


def without_names(error: str, otherwise: str) -> str:
    """The type of an error in words, which may name hosts, paths and keys."""
    found = _ERROR.search(error)
    return found[1] if found else otherwise
