"""Ends a run that makes no progress, and names the process at fault.

A thread on every process knows its phase and step, publishes them, and checks that they advance. It
must find a fault before JAX does: if a process sends no heartbeat for `job.heartbeat_s`, JAX aborts
the others from C++ with little explanation.
"""

import contextlib
import dataclasses
import faulthandler
import json
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax

from vit_jax.config.sections import Job
from vit_jax.job import processes
from vit_jax.job.exit_codes import FAILED

_BEATS_A_DEADLINE = 20
_LONGEST_INTERVAL_S = 5.0
_GO_ON = "run the same command to go on from the last save"
_SILENT_BEATS = 4  # a process whose watchdog misses this many has stopped or died
_STORE_BEATS = 3 * _SILENT_BEATS  # how long process 0 outlives its failure, with the job's store
_ANSWER_BEATS = 2  # how long the coordinator may take to answer
_STEP_SHARE = 0.6  # of the heartbeat timeout; the rest is for finding out who is late
_ALONE_S = 3600.0  # deadline of a step in a job of one process, which has no heartbeat


def step_deadline(job: Job, num_processes: int) -> float:
    """Longest allowed duration of a step, in seconds."""
    if job.step_deadline_s is not None:
        return job.step_deadline_s
    return _STEP_SHARE * job.heartbeat_s if num_processes > 1 else _ALONE_S


@dataclasses.dataclass(frozen=True)
class Report:
    """Progress of a process, as it publishes it.

    beat: increases as long as its watchdog runs.
    phase: start, compile, step, evaluation, save, leave or comparison.
    step: the last step whose batch has arrived; -1 before the first.
    waited_s: seconds since the last change of phase or step.
    failure: why it ends; "" while it runs.
    sent: whether its devices have got that step.
    """

    beat: int
    phase: str
    step: int
    waited_s: float
    failure: str = ""
    sent: bool = False

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step >= 0 else ""
        return f"{step}phase {self.phase}, for {self.waited_s:.0f} s"


class Board:
    """The store of `jax.distributed`, where the processes of a job publish their reports.

    Calls do not block if the coordinator does not answer.
    """

    def __init__(self, process: int):
        self._process, self._client = process, processes.client()
        self._publishing: threading.Thread | None = None

    def publish(self, report: Report, timeout_s: float | None = None) -> None:
        """Publish this process's report, unless an earlier one is still on its way.

        With `timeout_s`: a last report, which is waited for so long.
        """
        if timeout_s is None and self._publishing is not None and self._publishing.is_alive():
            return
        text = json.dumps(dataclasses.asdict(report))

        def put() -> None:
            for name in ["report", "failed"] if report.failure else ["report"]:
                key = f"watchdog/{name}/{self._process}"
                self._client.key_value_set(key, text, allow_overwrite=True)

        self._publishing, _ = self._ask(put)
        if timeout_s is not None:
            self._publishing.join(timeout_s)

    def read(self, name: str, timeout_s: float) -> dict[int, Report] | None:
        """Read reports by process: "report" for all, "failed" for processes that end.

        None if the coordinator does not answer in time.
        """
        _, answer = self._ask(lambda: self._client.key_value_dir_get(f"watchdog/{name}/"))
        try:
            found = answer.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return {int(key.rpartition("/")[2]): Report(**json.loads(text)) for key, text in found}

    def _ask(self, call: Callable[[], Any]) -> tuple[threading.Thread, queue.SimpleQueue]:
        answer: queue.SimpleQueue = queue.SimpleQueue()

        def put_answer() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no answer then
                answer.put(call())

        thread = threading.Thread(target=put_answer, daemon=True)
        thread.start()
        return thread, answer


@dataclasses.dataclass(kw_only=True)
class Watchdog:
    """Watches the progress of one process, by its own and the others' reports.

    Time in which this process itself did not run, because it was stopped or the machine slept, does
    not count; the other processes judge that.

    deadlines: {phase: seconds}, including "step"; phases that are absent have no deadline.
    process, num_processes: number of this process, and of all.
    board: see `Board`; None in a job of one process.
    end: called once with a description of the fault.
    clock: returns seconds.
    """

    deadlines: Mapping[str, float]
    process: int = 0
    num_processes: int = 1
    board: Any = None
    end: Callable[[str], Any]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.interval_s = min(self.deadlines["step"] / _BEATS_A_DEADLINE, _LONGEST_INTERVAL_S)
        self.failure, self.exit_code = "", FAILED
        # Replaced as a whole by the training thread, without a lock, which could get stuck.
        self._place = (0, "start", -1, False)
        self._seen, self._waited, self._beat = self._place, 0.0, 0
        self._ticked_at, self._ticking, self._lived = self.clock(), 0.0, 0.0
        self._heard: dict[int, tuple[Report, float]] = {}  # and the time of its last new beat
        self.answered = True
        self._failed_at = math.inf

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase with a deadline of its own, which starts now."""
        moves, outer, step, sent = self._place
        self._place = (moves + 1, name, step, sent)
        try:
            yield
        finally:
            self._place = (self._place[0] + 1, outer, step, sent)

    @property
    def current_phase(self) -> str:
        return self._place[1]

    def arrive(self, step: int) -> None:
        """Call when the batch of `step` has arrived; starts the phase `step`."""
        self._place = (self._place[0] + 1, "step", step, False)

    def send(self) -> None:
        """Call when the devices have got the step."""
        moves, phase, step, _ = self._place
        self._place = (moves + 1, phase, step, True)

    def fail(self, failure: str, exit_code: int) -> None:
        """Publish that this process ends, and why."""
        self.failure, self.exit_code = failure, exit_code
        if self.board is not None:
            self.board.publish(self.report(), timeout_s=_SILENT_BEATS * self.interval_s)

    def report(self) -> Report:
        """Report of this process, as of now: it may have moved since the last tick."""
        place = self._place
        waited = self._waited if place == self._seen else 0.0
        _, phase, step, sent = place
        return Report(self._beat, phase, step, round(waited, 1), self.failure, sent)

    def tick(self) -> None:
        """Call every `interval_s`: publishes progress, and ends a run that has stopped."""
        now, place = self.clock(), self._place
        passed = self._ticking + min(now - self._ticked_at, 2 * self.interval_s)
        self._lived, self._beat = self._lived + passed, self._beat + 1
        self._waited = 0.0 if place != self._seen else self._waited + passed
        self._seen = place
        self._check(late=self._waited > self.deadlines.get(place[1], math.inf))
        self._ticked_at = self.clock()
        # Time spent waiting for the coordinator; the process may have been stopped meanwhile.
        self._ticking = min(self._ticked_at - now, 2 * _ANSWER_BEATS * self.interval_s)

    def _check(self, late: bool) -> None:
        if self.board is None:
            if late and not self.failure:
                self.end(f"no progress: {self.report()}")
            return
        self.board.publish(self.report())
        failed = {i for i, report in self._ask("failed").items() if i != self.process}
        if failed:
            self._failed_at = min(self._failed_at, self._lived)  # the first time
        # Reports read now will explain JAX's own message about a missed heartbeat.
        waits = self._seen[1] == "step" and self._waited > self.deadlines["step"] / 2
        if self.answered and (late or failed or self.failure or waits):
            for i, report in self._ask("report").items():
                if i not in self._heard or self._heard[i][0].beat != report.beat:
                    self._heard[i] = (report, self._lived)
        if self.failure:
            return  # already ending
        if failed and self._lived - self._failed_at > 2 * _SILENT_BEATS * self.interval_s:
            # By now the training thread would have found the same fault, with more detail.
            self.end(self.describe_others())
        elif late and not failed and (verdict := self._judge()):
            self.end(verdict)

    def _ask(self, name: str) -> dict[int, Report]:
        found = self.board.read(name, _ANSWER_BEATS * self.interval_s)
        self.answered = found is not None
        return found or {}

    def _silent(self) -> dict[int, Report | None]:
        """Processes whose watchdog is silent, with their last report; None if never seen."""
        limit = self._lived - _SILENT_BEATS * self.interval_s
        silent = {
            i: report
            for i, (report, heard_at) in self._heard.items()
            if heard_at < limit and not report.failure and i != self.process
        }
        known = {*self._heard, self.process}
        return silent | {i: None for i in range(self.num_processes) if i not in known}

    def describe_others(self) -> str:
        """Processes that are unreachable, lost or ending; "" if none is known."""
        me = f"this process: {self.report()}"
        if not self.answered:
            return f"process 0, the coordinator, is unreachable; {me}; {_GO_ON}"
        lost = "is lost (killed, stopped or without network)"
        silent = self._silent()
        said = [
            f"process {i} {lost}, {f'last seen at {report}' if report else 'without a report'}"
            for i, report in silent.items()
        ]
        said += [
            f"process {i} is ending, at {report}: {report.failure}"
            for i, (report, _) in self._heard.items()
            if report.failure not in ("", self.failure) and i != self.process
        ]
        return "; ".join([*said, me, *[_GO_ON] * bool(silent)]) if said else ""

    def _judge(self) -> str:
        """Name the process that this one waits for; "" while another is within its deadline."""
        silent = self._silent()
        # Compiling and saving may block even a watchdog; JAX's own heartbeat continues.
        if not self.answered or any(r is None or r.phase == "step" for r in silent.values()):
            return self.describe_others()
        reports = {i: report for i, (report, _) in self._heard.items()}
        for r in reports.values():
            if r.phase != "step" and r.waited_s <= self.deadlines.get(r.phase, math.inf):
                return ""
        first, last = (pick((r.step, r.sent) for r in reports.values()) for pick in (min, max))
        if first == last:
            return f"all processes have arrived, but none makes progress: {self.report()}"
        behind = {i: report for i, report in reports.items() if (report.step, report.sent) == first}
        what = "has not passed" if first[0] < last[0] else "has not given its devices"
        late = "; ".join(f"process {i} {what} {report}" for i, report in behind.items())
        return f"{late}; the others wait for it, the first at step {last[0]}"


_watchdog: Watchdog | None = None
_has_spoken = threading.Event()  # set once the fault has been reported


def start(job: Job) -> None:
    """Start the watchdog of this process, with the deadlines of `job`."""
    global _watchdog
    num_processes = jax.process_count()
    compiling, saving = job.compile_deadline_s, job.save_deadline_s
    deadlines = {"start": compiling, "compile": compiling, "save": saving, "leave": saving}
    deadlines["step"] = step_deadline(job, num_processes)
    watchdog = _watchdog = Watchdog(
        deadlines=deadlines | {"evaluation": job.evaluation_deadline_s},
        process=jax.process_index(),
        num_processes=num_processes,
        board=Board(jax.process_index()) if num_processes > 1 else None,
        end=lambda what: _end(watchdog, what),
    )

    def keep_ticking() -> None:
        while watchdog is _watchdog:
            watchdog.tick()
            time.sleep(watchdog.interval_s)

    threading.Thread(target=keep_ticking, name="watchdog", daemon=True).start()
    if num_processes > 1:
        processes.on_abort(lambda: _speak_on_abort(watchdog))


def stop() -> None:
    """Stop the watchdog."""
    global _watchdog
    _watchdog = None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Enter a phase of this process's watchdog, if it was started; see `Watchdog.phase`."""
    return contextlib.nullcontext() if _watchdog is None else _watchdog.phase(name)


def current_phase() -> str:
    """The phase of this process; "start" before its watchdog is started."""
    return "start" if _watchdog is None else _watchdog.current_phase


def arrive(step: int) -> None:
    """Report a batch to this process's watchdog, if it was started; see `Watchdog.arrive`."""
    if _watchdog is not None:
        _watchdog.arrive(step)


def send() -> None:
    """Report a step to this process's watchdog, if it was started; see `Watchdog.send`."""
    if _watchdog is not None:
        _watchdog.send()


def leave(code: int, error: BaseException | None = None) -> NoReturn:
    """End this process; errors have been printed already.

    Args:
      code: the exit code.
      error: why this process ends early. With an error it does not wait for the others, as JAX
        would, since they may never come; it reports which are lost and notifies the rest.
    """
    if error is None or processes.client() is None:
        with phase("leave"):
            jax.distributed.shutdown()
        stop()
        sys.exit(code)
    beat_s = 0.0 if _watchdog is None else _watchdog.interval_s
    if _watchdog is not None:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        _watchdog.fail(f"{type(error).__name__}: {first_line}", code)
        time.sleep(2 * _SILENT_BEATS * beat_s)
        if others := _watchdog.describe_others():
            processes.say(others)
        _has_spoken.set()
    processes.exit_now(code, _STORE_BEATS * beat_s)


def _end(watchdog: Watchdog, what: str) -> NoReturn:
    faulthandler.dump_traceback(all_threads=True)
    processes.say(what)  # last, where launchers show it
    _has_spoken.set()
    watchdog.fail(what, FAILED)
    processes.exit_now(FAILED, _STORE_BEATS * watchdog.interval_s)


def _speak_on_abort(watchdog: Watchdog) -> int:
    if _has_spoken.is_set():
        return watchdog.exit_code
    if not _coordinator_listens():
        watchdog.answered = False
    if not watchdog.failure:  # otherwise it was ending, and has printed its traceback
        faulthandler.dump_traceback(all_threads=True)
    processes.say(
        watchdog.describe_others()
        or f"aborted by JAX, see the message above; this process: {watchdog.report()}"
    )
    return watchdog.exit_code


def _coordinator_listens() -> bool:
    host, _, port = processes.distributed_state().coordinator_address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2.0):
        return True
    return False
