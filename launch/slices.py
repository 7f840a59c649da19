"""The slices of a queued resource of Cloud TPUs: requested, awaited and reached through gcloud."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import tpus

from vit_jax.errors import InputError

POLL_S = 30
_TRIES = 10  # for commands that the network may fail, with pauses of POLL_S


class Gcloud:
    """Commands of the gcloud client for one queued resource."""

    def __init__(self, flags: argparse.Namespace):
        self.name, self._flags = flags.name, flags
        self._where = [f"--zone={flags.zone}"]
        if flags.project is not None:
            self._where.append(f"--project={flags.project}")

    def _command(self, verb: str, *words: str) -> list[str]:
        group = ["gcloud", "compute", "tpus", "queued-resources", verb]
        return [*group, *words, *self._where, "--quiet"]

    def create(self, tpu: tpus.Slice) -> list[str]:
        """Request the slices."""
        flags, generation = self._flags, tpus.GENERATIONS[tpu.chip]
        count = tpu.num_chips * generation.cores_per_chip
        words = [flags.name, f"--accelerator-type={generation.gcloud}-{count}"]
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
        return self._command("describe", self._flags.name, "--format=json")

    def delete(self) -> list[str]:
        """Delete the slices, with their VMs."""
        return self._command("delete", self._flags.name, "--force")

    def copy(self, path: str) -> list[str]:
        """Copy a file to the home directory of every worker."""
        everywhere = ["--node=all", "--worker=all"]
        return self._command(
            "scp", path, f"{self._flags.name}:", *everywhere, *self._flags.ssh_flag
        )

    def ssh(self, command: str, node: str = "all", worker: str = "all") -> list[str]:
        """Run a command on workers."""
        return self._command(
            "ssh", self._flags.name, f"--node={node}", f"--worker={worker}",
            f"--command={command}", *self._flags.ssh_flag,
        )  # fmt: skip


class PreemptedError(Exception):
    """The slices are gone, or their VMs were restarted."""


def query(gcloud: Gcloud) -> dict[str, Any] | None:
    """The answer of `describe`; None: there is no such queued resource.

    Raises:
      InputError: if gcloud rejects the request, or fails.
    """
    done = subprocess.run(gcloud.describe(), capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)
    if "NOT_FOUND" in done.stderr:
        return None
    raise InputError(f"gcloud failed: {done.stderr.strip()}")


def call(command: Sequence[str], what: str) -> None:
    """Run a command of gcloud or tar, after printing `what` it does.

    Raises:
      InputError: if it fails; includes its output.
    """
    print(f"{what} ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        hint = ""
        if "quota" in done.stderr.lower():
            hint = "; request more quota in this zone, or use another --zone, tier or --topology"
        raise InputError(f"{what}: {(done.stderr or done.stdout).strip()}{hint}")


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
            print(f"{e}\nfailed, try {number} of {_TRIES}; next try in {POLL_S} s", flush=True)
        time.sleep(POLL_S)
        before_again()
    return fn()


def check_active(gcloud: Gcloud) -> None:
    """Raise PreemptedError unless the slices are active."""
    if state_of(retry(lambda: query(gcloud))) != "ACTIVE":
        raise PreemptedError


def call_with_retry(gcloud: Gcloud, command: Sequence[str], what: str) -> None:
    """Run `call` for a command on workers; retry while it fails although the slices are active.

    Raises:
      InputError: if it keeps failing.
      PreemptedError: if the slices are gone.
    """
    retry(lambda: call(command, what), lambda: check_active(gcloud))


def state_of(described: dict[str, Any] | None) -> str:
    """State of a queued resource, e.g. ACTIVE; ABSENT if there is none."""
    return "ABSENT" if described is None else described.get("state", {}).get("state", "UNKNOWN")


def wait_until_active(gcloud: Gcloud, tpu: tpus.Slice) -> None:
    """Request the slices unless they exist, and wait until they are active.

    Raises:
      InputError: if gcloud fails, or the request was rejected; gives the reason.
    """
    seen = None
    asked = False
    described = query(gcloud)  # not retried: a failure here means that gcloud is not set up
    while True:
        state = state_of(described)
        if state != seen:
            print(f"slices: {state}", flush=True)
        seen = state
        if state == "ACTIVE":
            return
        if state in ("ABSENT", "FAILED", "SUSPENDED"):
            reason = json.dumps(described["state"]) if described and state == "FAILED" else ""
            if asked and reason:
                raise InputError(f"the request for slices failed: {reason}")
            if described is not None:
                retry(lambda: call(gcloud.delete(), "deleting the slices"))
            call(gcloud.create(tpu), "requesting slices")
            asked = True
        time.sleep(POLL_S)
        described = retry(lambda: query(gcloud))
