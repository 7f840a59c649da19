"""The speed of a run: throughput without pauses, chip-hours, and traces of some steps."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax.config import step_range
from vit_jax.devices.chips import count_chips
from vit_jax.devices.flops import mfu

logger = logging.getLogger("vit_jax")


@dataclasses.dataclass
class Throughput:
    """Training speed between two readings, excluding pauses.

    Devices run asynchronously: wait for the result of the last step before `read` and `pause`, or
    its time is counted elsewhere.

    step: the step that the run starts at.
    global_batch_size: images per step, over all devices.
    flops_per_image: forward and backward.
    device_kind, num_chips: arguments of `flops.mfu`.
    total_s: seconds of training up to that step.
    clock: returns seconds.
    """

    step: int
    global_batch_size: int
    flops_per_image: float
    device_kind: str
    num_chips: int
    total_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        self._paused_s: dict[str, float] = {}
        self._since = self.clock()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Exclude the time within the context; `what` names it, e.g. "save"."""
        start = self.clock()
        try:
            yield
        finally:
            passed = self.clock() - start
            self._since += passed
            self._paused_s[what] = self._paused_s.get(what, 0.0) + passed

    def seconds(self) -> float:
        """Seconds of training so far; must not be called during a pause."""
        return self.total_s + self.clock() - self._since

    def read(self, step: int) -> dict[str, float]:
        """Metrics since the last reading; `step` is the number of steps done.

        `time/seconds`: training so far; `time/images_per_s`: over all devices;
        `time/mfu`: a fraction, absent if the chip's peak is unknown; `time/save_s`
        and so on: duration of each kind of pause since the last reading.
        """
        now = self.clock()
        seconds = now - self._since
        images_per_s = (step - self.step) * self.global_batch_size / seconds
        self.step, self._since = step, now
        self.total_s += seconds
        scalars = {"time/seconds": self.total_s, "time/images_per_s": images_per_s}
        scalars |= {f"time/{what}_s": paused for what, paused in self._paused_s.items()}
        self._paused_s = {}
        flops_per_s = self.flops_per_image * images_per_s
        share = mfu(flops_per_s, device_kind=self.device_kind, num_chips=self.num_chips)
        return scalars if share is None else scalars | {"time/mfu": share}


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

    def __exit__(self, *_) -> None:
        self.close()
