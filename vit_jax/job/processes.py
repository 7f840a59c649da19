"""The processes of a job: how they connect, compare their inputs, and stop together.

They communicate through the key-value store of `jax.distributed` on process 0, the coordinator.
Unlike a collective, it cannot hang when processes run different programs.
"""

import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import jax
import numpy as np
from jax._src import clusters, distributed  # no public names; see tests/test_jax_private.py
from jax.experimental import multihost_utils

from vit_jax.base.errors import InputError
from vit_jax.job.exit_codes import FAILED

_VERDICT_S = 10  # for process 0 to report missing processes after the timeout

_next_comparison = itertools.count().__next__  # all processes make the same ones in the same order


_called_from_c: list[Any] = []  # keeps the handlers alive; C holds no reference


class ProcessError(RuntimeError):
    """Another process of the job is missing."""


def distributed_state() -> Any:
    """The state of `jax.distributed`: process_id, num_processes, coordinator_address, client.

    `client` is the connection to the key-value store of the job, None in a job of one process.
    """
    return distributed.global_state


def client() -> Any:
    """The connection to the store; None in a job of one process."""
    return distributed_state().client


def find_cluster() -> Any:
    """The cluster that `jax.distributed.initialize` would detect; None: there is none.

    It has `name` and `get_process_count()`, which may raise anything.
    """
    for cluster in clusters.ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return cluster
    return None


def on_abort(speak: Callable[[], int]) -> None:
    """Call `speak` and exit with its result when JAX aborts this process from C++.

    JAX aborts, at any time, when it has lost the coordinator or another process. A Python signal
    handler would not run, since it waits for the main thread and abort() does not.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(number: int) -> None:
        try:
            code = speak()
        except BaseException:
            code = FAILED
        os._exit(code)

    _called_from_c.append(handler)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)


def say(what: str) -> None:
    """Print to standard error with the number of this process; does not initialize devices."""
    state = distributed_state()
    where = f"process {state.process_id} of {state.num_processes}"
    print(f"watchdog: {where}: {what}", file=sys.stderr, flush=True)


def exit_now(code: int, store_s: float) -> NoReturn:
    """End this process, which waits for no other one; process 0 keeps the store for `store_s`."""
    if client() is not None and distributed_state().process_id == 0:
        time.sleep(store_s)  # JAX aborts processes that outlive the store
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    join_deadline_s: int,
    heartbeat_s: int,
) -> None:
    """Connect the processes of a job by `jax.distributed`; must precede any use of JAX devices.

    `coordinator`, `num_processes` and `process_id` connect processes explicitly. Otherwise JAX
    detects the cluster (Slurm, Open MPI, Cloud TPU, Kubernetes); `num_processes`, if given, must
    equal its number of processes.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: number of processes in the job.
      process_id: number of this process, from 0.
      join_deadline_s: how long to wait for the last process to start.
      heartbeat_s: a process that is silent for this long counts as dead.

    Raises:
      InputError: if some of the arguments are missing, or the cluster's size is different.
    """
    if _is_alone(coordinator, num_processes, process_id):
        return
    if coordinator is None:
        num_processes = None  # JAX gets all three from the cluster

    def speak() -> int:
        say(
            f"not all processes reached process 0 at "
            f"{distributed_state().coordinator_address} within "
            f"job.join_deadline_s={join_deadline_s}, or one of them has ended; see the messages "
            "above and the other processes' messages"
        )
        return FAILED

    on_abort(speak)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method=None if coordinator is None else "deactivate",
        initialization_timeout=join_deadline_s,
        heartbeat_timeout_seconds=heartbeat_s,
    )


def _is_alone(coordinator: str | None, num_processes: int | None, process_id: int | None) -> bool:
    """Whether this is the only process of its job; raises InputError like `start`."""
    names = ("--coordinator", "--num_processes", "--process_id")
    if coordinator is None and process_id is None:
        found = 1 if num_processes == 1 else _detected_processes()
        if num_processes not in (None, found):
            raise InputError(
                f"--num_processes={num_processes}: the job has {found}; start as many processes, "
                f"or give {', '.join(names)} to each"
            )
        return found == 1
    if coordinator is None or num_processes is None or process_id is None:
        given = zip(names, (coordinator, num_processes, process_id), strict=True)
        missing = ", ".join(name for name, value in given if value is None)
        raise InputError(f"{missing}: missing; give all of {', '.join(names)}")
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id}: must be from 0 to {num_processes - 1}, since "
            f"--num_processes={num_processes}"
        )
    return num_processes == 1  # JAX would end even one that pauses for `heartbeat_s`


def _detected_processes() -> int:
    """Number of processes in this job according to the cluster; 1 if no cluster is detected."""
    cluster = find_cluster()
    if cluster is None:
        return 1
    try:
        return cluster.get_process_count()
    except Exception as e:  # the cluster's own interface may raise anything
        raise InputError(
            f"--num_processes: {cluster.name or cluster.__name__} does not give the number of "
            f"processes ({type(e).__name__}: {str(e).splitlines()[0]}); give --num_processes=1 for "
            "a single process, or --coordinator, --num_processes and --process_id"
        ) from e


def check_devices(num_devices: int | None) -> None:
    """Raise InputError unless all processes together have `num_devices`; None: any number."""
    if num_devices is not None and jax.device_count() != num_devices:
        raise InputError(
            f"--num_devices={num_devices}: JAX finds {jax.device_count()} devices "
            f"({jax.devices()[0].device_kind}) in {jax.process_count()} process(es), "
            f"{jax.local_device_count()} of them here; start one process per host, and let each "
            "see all devices of its host"
        )


def agree(name: str, facts: Mapping[str, Any], timeout_s: float) -> None:
    """Check that `facts` are equal on all processes.

    Process 0 reads the facts of each process once, so its work grows linearly with their number.

    Args:
      name: name of the comparison, for errors.
      facts: {name of a fact: value}; values are compared as text.
      timeout_s: how long process 0 waits for the others.

    Raises:
      InputError: on every process; lists each fact that differs, its values and their processes.
      ProcessError: if processes do not arrive in time; names them.
    """
    if jax.process_count() == 1:
        return
    store, me, prefix = client(), jax.process_index(), f"agree/{_next_comparison()} {name}"
    text = json.dumps({key: repr(value) for key, value in facts.items()}, sort_keys=True)
    store.key_value_set(f"{prefix}/facts/{me}", text)
    if me == 0:
        missing, differences = _compare(prefix, timeout_s)
        store.key_value_set(f"{prefix}/verdict", json.dumps([missing, differences]))
    else:
        verdict = _wait_for(f"{prefix}/verdict", timeout_s + _VERDICT_S)
        missing, differences = ([0], []) if verdict is None else verdict
    if missing:
        raise ProcessError(
            f"{_processes(missing)} did not reach the comparison of {name} within {timeout_s:.0f} s"
        )
    if differences:
        raise InputError(*differences, where=f"the processes differ in {name}")


def _compare(prefix: str, timeout_s: float) -> tuple[list[int], list[str]]:
    """(missing processes, one text per fact that differs)."""
    until = time.monotonic() + timeout_s
    said = [_wait_for(f"{prefix}/facts/{i}", max(until - time.monotonic(), 0.1))
            for i in range(jax.process_count())]  # fmt: skip
    if missing := [i for i, facts in enumerate(said) if facts is None]:
        return missing, []
    differences = []
    for key in sorted(set().union(*said)):
        by_value: dict[str, list[int]] = {}
        for i, facts in enumerate(said):
            by_value.setdefault(facts.get(key, "missing"), []).append(i)
        if len(by_value) > 1:
            values = (f"{value} on {_processes(numbers)}" for value, numbers in by_value.items())
            differences.append(f"{key}: {'; '.join(values)}")
    return [], differences


def say_to_all(what: str, find: Callable[[], Any], timeout_s: float, by: int = 0) -> Any:
    """The result of `find` on process `by`, on every process; of several as JSON gives it back.

    Args:
      what: is found, for errors.
      find: called by process `by` only.
      timeout_s: how long the others wait for it.
      by: number of a process.

    Raises:
      InputError: on every process, if `find` raises it.
      ProcessError: process `by` has said nothing.
    """
    if jax.process_count() == 1:
        return find()
    key = f"agree/{_next_comparison()} {what}"
    if jax.process_index() == by:
        try:
            text = json.dumps({"found": find()})
        except InputError as e:
            text = json.dumps({"faults": e.faults})
        client().key_value_set(key, text)
        said = json.loads(text)
    else:
        said = _wait_for(key, timeout_s)
        if said is None:
            raise ProcessError(f"process {by} did not say {what} in {timeout_s:.0f} s")
    if "faults" in said:
        raise InputError(*said["faults"])
    return said["found"]


def _wait_for(key: str, timeout_s: float) -> Any:
    """Wait for the JSON of `key` in the store, and read it; None if it does not arrive in time."""
    try:
        return json.loads(client().blocking_key_value_get(key, round(1000 * timeout_s)))
    except jax.errors.JaxRuntimeError as e:
        if "DEADLINE_EXCEEDED" not in str(e):
            raise
        return None


def _processes(numbers: list[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class PreemptionGuard:
    """Turns SIGTERM and Ctrl-C into the same decision on every process.

    with PreemptionGuard() as guard:
        for step in ...:
            if guard.should_stop(step): ...

    A second Ctrl-C ends this process at once; in an interactive Python it raises KeyboardInterrupt.

    interrupted: whether Ctrl-C came to this process; once `should_stop` is True, to any process.
    entered: the guard of the loop that runs in this process, if one does.
    """

    entered: ClassVar[Self | None] = None

    def __enter__(self) -> Self:
        self._signalled = self.interrupted = False
        # With several processes, JAX's own handler notifies all, and they agree on a step.
        self._single = jax.process_count() == 1
        handlers: dict[int, Callable[[int, types.FrameType | None], None]] = {
            signal.SIGINT: self._on_interrupt
        }
        if self._single:
            handlers[signal.SIGTERM] = self._on_signal
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # nohup and `&` in a script ask so
            del handlers[signal.SIGINT]
        PreemptionGuard.entered = self  # before the handlers: then nobody ends this process
        self._previous = {number: signal.signal(number, to) for number, to in handlers.items()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        PreemptionGuard.entered = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self._signalled = True

    def _on_interrupt(self, number: int, frame: types.FrameType | None) -> None:
        self._signalled = self.interrupted = True
        in_shell = hasattr(sys, "ps1")
        signal.signal(signal.SIGINT, self._previous[number] if in_shell else signal.SIG_DFL)
        # print may raise here if the signal came while the main thread was printing.
        os.write(2, b"Ctrl-C: saves after this step, and ends; once more ends at once, unsaved\n")
        if not self._single:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX passes this signal on to the others

    def should_stop(self, step: int) -> bool:
        """Whether to save and stop after `step`; every process must ask after every step."""
        if self._single:
            return self._signalled
        stopping = multihost_utils.reached_preemption_sync_point(step)
        if stopping:  # a person who stops one process stops the job: none may be restarted
            interrupted = multihost_utils.process_allgather(np.int32(self.interrupted))
            self.interrupted = bool(interrupted.any())
        return stopping
