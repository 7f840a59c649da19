"""The slices of a queued resource of Cloud TPUs: requested, awaited and reached through gcloud."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import tpus
from command_line import say

from vit_jax.base.errors import InputError

POLL_S = 30
_TRIES = 10  # for commands that the network may fail, with pauses of POLL_S


class Gcloud:
    """Commands of the gcloud client for one queued resource."""

    def __init__(self, flags: argparse.Namespace):
        self._flags = flags
        self._where = [f"--zone={flags.zone}"]
        if flags.project is not None:
            self._where.append(f"--project={flags.project}")

    def _command(self, verb: str, *words: str) -> list[str]:
        group = ["gcloud", "compute", "tpus", "queued-resources", verb, self._flags.name]
        return [*group, *words, *self._where, "--quiet"]

    def create(self, tpu: tpus.Slice) -> list[str]:
        """Request the slices."""
        flags, generation = self._flags, tpus.GENERATIONS[tpu.chip]
        count = tpu.num_chips * generation.cores_per_chip
        words = [f"--accelerator-type={generation.gcloud}-{count}"]
        words.append(f"--runtime-version={flags.runtime or generation.runtime}")
        if flags.num_slices == 1:
            words.append(f"--node-id={flags.name}")
        else:
            words += [f"--node-count={flags.num_slices}", f"--node-prefix={flags.name}"]
        words += [f"--{tier}" for tier in ("spot", "reserved") if getattr(flags, tier)]
        if flags.service_account is not None:
            words.append(f"--service-account={flags.service_account}")
            words.append("--scopes=https://www.googleapis.com/auth/cloud-platform")
        return self._command("create", *words, *flags.create_flag)

    def describe(self) -> list[str]:
        return self._command("describe", "--format=json")

    def delete(self) -> list[str]:
        """Delete the slices, with their VMs."""
        return self._command("delete", "--force")

    def copy(self, path: str) -> list[str]:
        """Copy a file to the home directory of every worker."""
        group = ["gcloud", "compute", "tpus", "queued-resources", "scp", path]
        to = [f"{self._flags.name}:", "--node=all", "--worker=all"]
        return [*group, *to, *self._flags.ssh_flag, *self._where, "--quiet"]

    def ssh(self, command: str, node: str = "all", worker: str = "all") -> list[str]:
        """Run a command on workers."""
        at = (f"--node={node}", f"--worker={worker}", f"--command={command}")
        return self._command("ssh", *at, *self._flags.ssh_flag)


class PreemptedError(Exception):
    """The slices are gone, or their VMs were restarted."""


def call(command: Sequence[str], what: str) -> bytes:
    """Run a command of gcloud or tar, and return its output.

    Raises:
      InputError: if it fails; says `what` failed, and gives its output.
    """
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        if "quota" in said.lower():
            said += "; request more quota in this zone, or use another --zone, tier or --topology"
        raise InputError(f"{what}: {said}")
    return done.stdout


def call_and_say(command: Sequence[str], what: str) -> None:
    """Run `call` after printing `what` it does."""
    print(f"{what} ...", flush=True)
    call(command, what)


def retry(fn: Callable[[], Any], before_again: Callable[[], None] = lambda: None) -> Any:
    """Return fn(), retrying while it raises InputError, since the network may fail for a while.

    Args:
      before_again: called before each retry; an error that it raises ends the retries.

    Raises:
      InputError: from the last of _TRIES.
    """
    for number in range(1, _TRIES):
        try:
            return fn()
        except InputError as e:
            say(f"{e}\nfailed, try {number} of {_TRIES}; next try in {POLL_S} s")
        time.sleep(POLL_S)
        before_again()
    return fn()


def find_state(gcloud: Gcloud) -> dict[str, Any]:
    """{"state": e.g. ACTIVE, ...} of the queued resource; ABSENT if there is none.

    Raises:
      InputError: if gcloud rejects the request, or fails.
    """
    try:
        described = json.loads(call(gcloud.describe(), "gcloud failed"))
    except InputError as e:
        if "NOT_FOUND" in str(e):
            return {"state": "ABSENT"}
        raise
    return {"state": "UNKNOWN"} | described.get("state", {})


def check_active(gcloud: Gcloud) -> None:
    """Raise PreemptedError unless the slices are active."""
    if retry(lambda: find_state(gcloud))["state"] != "ACTIVE":
        raise PreemptedError


def on_active(gcloud: Gcloud, fn: Callable[[], Any]) -> Any:
    """Return fn(); retry while it raises InputError although the slices are active.

    Raises:
      InputError: if it keeps failing.
      PreemptedError: if the slices are gone.
    """
    return retry(fn, lambda: check_active(gcloud))


def wait_until_active(gcloud: Gcloud, tpu: tpus.Slice) -> None:
    """Request the slices unless they exist, and wait until they are active.

    Raises:
      InputError: if gcloud fails, or the request was rejected; gives the reason.
    """
    seen, asked = None, False
    found = find_state(gcloud)  # not retried: a failure here means that gcloud is not set up
    while True:
        state = found["state"]
        if state != seen:
            print(f"slices: {state}", flush=True)
        seen = state
        if state == "ACTIVE":
            return
        if state in ("ABSENT", "FAILED", "SUSPENDED"):
            if asked and state == "FAILED":
                raise InputError(f"the request for slices failed: {json.dumps(found)}")
            if state != "ABSENT":
                retry(lambda: call_and_say(gcloud.delete(), "deleting the slices"))
            call_and_say(gcloud.create(tpu), "requesting slices")
            asked = True
        time.sleep(POLL_S)
        found = retry(lambda: find_state(gcloud))
