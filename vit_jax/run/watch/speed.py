"""The speed of a run: throughput, pauses, waits for input, chip-hours, and traces of some steps."""

import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from etils import epath

from vit_jax.base.tree import Batch
from vit_jax.config import step_range
from vit_jax.devices.chips import count_chips
from vit_jax.devices.flops import mfu
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import Metrics
from vit_jax.run.build import RunStep
from vit_jax.run.watch.ledger import NO_PAST, Past

logger = logging.getLogger("vit_jax")

T = TypeVar("T")


@dataclasses.dataclass
class Throughput:
    """Training speed between two readings, excluding pauses.

    Devices run asynchronously: wait for the result of the last step before `read` and `pause`, or
    its time is counted elsewhere.

    step: the step that the run starts at.
    images, flops: of the first so many steps of the run.
    device_kind, num_chips: arguments of `flops.mfu`.
    total_s: seconds of training up to that step.
    past: what came before, see `ledger`.
    clock: returns seconds.
    """

    step: int
    images: Callable[[int], float]
    flops: Callable[[int], float]
    device_kind: str
    num_chips: int
    total_s: float = 0.0
    past: Past = NO_PAST
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._noted_s = dict(self.past.seconds)
        self._waited_s = self.past.input_wait_s
        self._began = self._since = self.clock()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Exclude the time within the context; `what` names it, e.g. "save"."""
        start = self.clock()
        try:
            yield
        finally:
            passed = self.clock() - start
            self._since += passed
            self._note(what, passed)

    def _note(self, what: str, seconds: float) -> None:
        self._noted_s[what] = self._noted_s.get(what, 0.0) + seconds

    def waits(self, batches: Iterator[T], results: "Results") -> Iterator[T]:
        """Yield the `batches`; note the waits for them while no device computes `results`."""
        while True:
            since = self.clock()
            batch = next(batches, None)
            if batch is None:
                return
            if (idle_since := results.idle_since()) is not None:
                waited = self.clock() - max(since, idle_since)
                self._waited_s += waited
                self._note("input_wait", waited)
            yield batch

    def seconds(self) -> float:
        """Seconds of training so far; must not be called during a pause."""
        return self.total_s + self.clock() - self._since

    def steps_s(self) -> float:
        """Seconds of training so far without the waits for input."""
        return self.seconds() - self._waited_s

    def lose(self, since_s: float) -> None:
        """Count the steps since `steps_s` was `since_s` as lost, not as training."""
        lost = self.steps_s() - since_s
        self._since += lost
        self._note("lost", lost)

    def read(self, step: int) -> dict[str, float]:
        """Metrics since the last reading; `step` is the number of steps done.

        `time/seconds`: training so far; `time/images_per_s`: over all devices;
        `time/mfu`: a fraction, absent if the chip's peak is unknown; and all of `read_pauses`.
        """
        now = self.clock()
        seconds = now - self._since
        images_per_s, flops_per_s = (
            (until(step) - until(self.step)) / seconds for until in (self.images, self.flops)
        )
        self.step, self._since = step, now
        self.total_s += seconds
        scalars = {"time/seconds": self.total_s, "time/images_per_s": images_per_s}
        scalars |= self.read_pauses()
        share = mfu(flops_per_s, device_kind=self.device_kind, num_chips=self.num_chips)
        return scalars if share is None else scalars | {"time/mfu": share}

    def read_pauses(self) -> dict[str, float]:
        """`time/save_s` and so on: seconds since the last reading of each kind in `ledger.KINDS`.

        And `time/wall_s`: since the run first started; `time/goodput`: the share of steps in it.
        """
        scalars = {f"time/{what}_s": seconds for what, seconds in self._noted_s.items()}
        self._noted_s = {}
        wall_s = self.past.wall_s + self.clock() - self._began
        share = (self.total_s - self._waited_s) / wall_s if wall_s else 0.0
        return scalars | {"time/wall_s": wall_s, "time/goodput": share}


class Results(contextlib.AbstractContextManager):
    """Notes, by a thread, when the devices have computed the newest of the results added."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._added, self._ended = clock, 0, (0, clock())
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._keep_waiting, name="results", daemon=True).start()

    def add(self, result: Any) -> None:
        """Add a result that is being computed."""
        self._added += 1
        self._queue.put(result)

    def idle_since(self) -> float | None:
        """Since when all results are there; None: one is being computed."""
        number, at = self._ended
        return at if number == self._added else None

    def _keep_waiting(self) -> None:
        for number in itertools.count(1):
            if (result := self._queue.get()) is None:
                return
            with contextlib.suppress(Exception):  # the main thread meets it too
                jax.block_until_ready(result)
            del result
            self._ended = number, self._clock()

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)


def rented_chips(devices: Sequence[jax.Device]) -> int:
    """Number of chips that `devices` are on; 0 for CPUs, which nobody rents by the chip."""
    return 0 if devices[0].platform == "cpu" else count_chips(devices)


def chip_hours(meta: Mapping[str, Any], devices: Sequence[jax.Device], since: float) -> float:
    """The chip-hours of a run; they count everything that it does.

    Args:
      meta: saved with the state that the run continues from, with the chip-hours of its earlier
        parts, which may have used other meshes; {} from scratch.
      devices: devices of this part of the run.
      since: `time.perf_counter` at the start of this part.
    """
    hours = (time.perf_counter() - since) / 3600
    return meta.get("chip_hours", 0.0) + hours * rented_chips(devices)


class Profiler(contextlib.AbstractContextManager):
    """Traces the steps in `log.profile` to a directory, by `jax.profiler`."""

    def __init__(self, steps: str | None, directory: epath.Path):
        self._steps = step_range(steps, "log.profile") if steps else range(0)
        self._directory = directory
        self._tracing = False

    def watch(self, step: RunStep) -> RunStep:
        """`step`, traced where it is asked for."""

        def watched(number: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            self.before(number)
            state, metrics = step(number, state, batch)
            self.after(number, metrics)
            return state, metrics

        return watched

    def before(self, step: int) -> None:
        """Call before the step numbered `step` is dispatched."""
        if step - 1 in self._steps and not self._tracing:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, result: Any) -> None:
        """Call with the result of `step`; waits for it before ending a trace."""
        if self._tracing and step not in self._steps:
            jax.block_until_ready(result)
            self.close()
            logger.info("trace written to %s; open it with TensorBoard or XProf", self._directory)

    def close(self) -> None:
        """End the trace, if there is one."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def __exit__(self, *_: object) -> None:
        self.close()
