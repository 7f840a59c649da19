"""The processes of a job: how they find each other, compare what they run, and stop together.

They talk through the key-value store of `jax.distributed`, which process 0, the coordinator, keeps:
unlike a collective it cannot hang because one of them runs another program.
"""

import ctypes
import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import time
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath
from jax._src import clusters, distributed  # what is used of them has no public name
from jax.experimental import multihost_utils

from vit_jax.errors import InputError
from vit_jax.job.exit_codes import FAILED

_VERDICT_S = 10  # for process 0 to say who has not come, when it has waited long enough
_SHARED_WITHIN_S = 60  # a network disk may hide a new directory from other hosts for so long

_next_comparison = itertools.count().__next__  # all make the same ones, in one order


_called_from_c: list[Any] = []  # which holds no reference to it


class ProcessError(RuntimeError):
    """Another process of the job is missing."""


def on_abort(speak: Callable[[], int]) -> None:
    """Lets Python speak, and end with the code it gives, where JAX aborts this process in C++.

    It does so, at any time, when it has lost the coordinator or another process. A handler of
    Python's own would not run: it waits for the main thread, and abort() waits for nobody.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(number):
        try:
            code = speak()
        except BaseException:
            code = FAILED
        os._exit(code)

    _called_from_c.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


def say(what: str) -> None:
    """On standard error, with the number of this process; asks JAX for no device."""
    state = distributed.global_state
    where = f"process {state.process_id} of {state.num_processes}"
    print(f"watchdog: {where}: {what}", file=sys.stderr, flush=True)


def start(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    join_deadline_s: int,
    heartbeat_s: int,
) -> None:
    """Joins the processes of one job by `jax.distributed`; before anything asks JAX for a device.

    The three say where the others are. Without them they are those of the cluster that JAX detects
    (Slurm, Open MPI, Cloud TPU, Kubernetes), and `num_processes` alone is how many these must be.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: of the job.
      process_id: of this one, from 0.
      join_deadline_s: how long they wait for the last of them to start.
      heartbeat_s: a process that is not heard of for so long counts as dead.

    Raises:
      InputError: if some are missing, or the cluster does not have `num_processes`.
    """
    method: str | None = "deactivate"
    if _is_alone(coordinator, num_processes, process_id):
        return
    if coordinator is None:
        num_processes, method = None, None  # JAX asks the cluster for all three

    def speak() -> int:
        say(
            f"not all have come to process 0 at {distributed.global_state.coordinator_address} "
            f"in job.join_deadline_s={join_deadline_s}, or one of them has ended; see above, and "
            "what the others say"
        )
        return FAILED

    on_abort(speak)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method=method,
        initialization_timeout=join_deadline_s,
        heartbeat_timeout_seconds=heartbeat_s,
    )


def _is_alone(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Whether this process is the only one of its job; raises InputError as `start` does."""
    given = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if coordinator is None and process_id is None:
        found = 1 if num_processes == 1 else _detected_processes()
        if num_processes not in (None, found):
            raise InputError(
                f"--num_processes={num_processes}: this is one of {found}; start as many, or give "
                f"{', '.join(given)} to each"
            )
        return found == 1
    if missing:
        raise InputError(f"{', '.join(missing)}: missing; give all of {', '.join(given)}")
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id}: needs a number from 0 to {num_processes - 1}, as "
            f"--num_processes={num_processes}"
        )
    return False


def _detected_processes() -> int:
    """How many processes this job has, by what the cluster says; 1 where none is detected."""
    try:
        for cluster in clusters.ClusterEnv._cluster_types:
            if not cluster.opt_in_only_method and cluster.is_env_present():
                return cluster.get_process_count()
    except Exception as e:  # of the cluster's own interface, whatever it is
        raise InputError(
            f"--num_processes: {cluster.name or cluster.__name__} does not say how many processes "
            f"this job has ({type(e).__name__}: {str(e).splitlines()[0]}); give "
            "--num_processes=1 for one alone, or --coordinator, --num_processes and --process_id"
        ) from e
    return 1


def check_devices(num_devices: int | None) -> None:
    """Raises InputError if not all processes' devices together are `num_devices`; None: any."""
    if num_devices is not None and jax.device_count() != num_devices:
        raise InputError(
            f"--num_devices={num_devices}: JAX finds {jax.device_count()} devices "
            f"({jax.devices()[0].device_kind}) in {jax.process_count()} process(es), "
            f"{jax.local_device_count()} of them here; start as many processes as there are hosts, "
            "and let each see all its devices"
        )


def client():
    """The connection to the store; None where there is one process."""
    return distributed.global_state.client


def agree(name: str, facts: Mapping[str, Any], timeout_s: float) -> None:
    """Compares what every process says of itself; returns once all have said the same.

    Process 0 reads a digest of each and the facts of those alone that differ, so that its work
    grows with the number of processes.

    Args:
      name: of what is compared, for errors.
      facts: {what: value}; values are compared as text.
      timeout_s: how long process 0 waits for the others.

    Raises:
      InputError: on every process, with each fact that differs, its values and whose they are.
      ProcessError: naming the processes that have not come.
    """
    if jax.process_count() == 1:
        return
    store, me, prefix = client(), jax.process_index(), f"agree/{_next_comparison()} {name}"
    text = json.dumps({key: repr(value) for key, value in facts.items()}, sort_keys=True)
    store.key_value_set(f"{prefix}/facts/{me}", text)
    store.key_value_set(f"{prefix}/digest/{me}", hashlib.sha256(text.encode()).hexdigest())
    if me == 0:
        missing, differences = _compare(prefix, timeout_s)
        store.key_value_set(f"{prefix}/verdict", json.dumps([missing, differences]))
    else:
        verdict = _wait_for(f"{prefix}/verdict", timeout_s + _VERDICT_S)
        missing, differences = json.loads(verdict) if verdict else ([0], [])
    if missing:
        raise ProcessError(
            f"{_processes(missing)} did not come to the comparison of {name} in {timeout_s:.0f} s"
        )
    if differences:
        raise InputError(*differences, where=f"the processes do not agree on {name}")


def _compare(prefix: str, timeout_s: float) -> tuple[list[int], list[str]]:
    """(processes that are missing, a text for each fact that is not the same on all)."""
    until = time.monotonic() + timeout_s
    everyone = range(jax.process_count())
    digests = {
        i: _wait_for(f"{prefix}/digest/{i}", max(until - time.monotonic(), 0.1)) for i in everyone
    }
    missing = [i for i, digest in digests.items() if digest is None]
    if missing or len(set(digests.values())) == 1:
        return missing, []
    by_digest: dict[str, list[int]] = {}
    for i, digest in digests.items():
        by_digest.setdefault(digest, []).append(i)
    said = [
        (numbers, json.loads(client().key_value_try_get(f"{prefix}/facts/{numbers[0]}")))
        for numbers in by_digest.values()
    ]
    differences = []
    for key in sorted(set().union(*(facts for _, facts in said))):
        by_value: dict[str, list[int]] = {}
        for numbers, facts in said:
            by_value.setdefault(facts.get(key, "missing"), []).extend(numbers)
        if len(by_value) > 1:
            values = (f"{value} on {_processes(sorted(n))}" for value, n in by_value.items())
            differences.append(f"{key}: {'; '.join(values)}")
    return [], differences


def _wait_for(key: str, timeout_s: float) -> str | None:
    """The value of `key` in the store, once it is there; None if it does not come in time."""
    try:
        return client().blocking_key_value_get(key, round(1000 * timeout_s))
    except jax.errors.JaxRuntimeError as e:
        if "DEADLINE_EXCEEDED" not in str(e):
            raise
        return None


def _processes(numbers: list[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def check_one_workdir(workdir: epath.Path, timeout_s: float) -> None:
    """Raises InputError if some process does not see what process 0 writes into `workdir`."""
    if jax.process_count() == 1:
        return
    key = f"agree/{_next_comparison()} token"
    if jax.process_index() == 0:
        made = not workdir.exists()
        token = workdir / f".seen-by-all-{uuid.uuid4().hex}"
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            token.write_text("")
        except OSError as e:
            raise InputError(f"--workdir={workdir}: {e.strerror or e}; choose another") from None
        client().key_value_set(key, token.name)
        seen = True
    else:
        name = _wait_for(key, timeout_s)
        if name is None:
            raise ProcessError(f"process 0 did not write into --workdir in {timeout_s:.0f} s")
        until = time.monotonic() + _SHARED_WITHIN_S
        while not (seen := (workdir / name).exists()) and time.monotonic() < until:
            time.sleep(0.1)
    place = "one for all" if seen else f"{workdir} on {socket.gethostname()}, not that of process 0"
    try:
        agree("the workdir", {"--workdir": place}, timeout_s + _SHARED_WITHIN_S)
    except InputError:
        if jax.process_index() == 0 and made:
            workdir.rmtree()
        raise
    finally:
        if jax.process_index() == 0 and token.exists():
            token.unlink()


class PreemptionGuard:
    """Turns SIGTERM into an answer that is the same on every process.

    with PreemptionGuard() as guard:
        for step in ...:
            if guard.should_stop(step): ...
    """

    def __enter__(self):
        self._signalled = False
        # With several processes JAX's own handler tells them all, and they agree on a step.
        self._single = jax.process_count() == 1
        if self._single:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind, error, traceback: types.TracebackType | None):
        if self._single:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number, frame):
        self._signalled = True

    def should_stop(self, step: int) -> bool:
        """Whether to save and stop after `step`; every process asks after every step."""
        if self._single:
            return self._signalled
        return multihost_utils.reached_preemption_sync_point(step)
