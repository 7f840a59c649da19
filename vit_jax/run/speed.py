"""The speed of a run: throughput without pauses, chip-hours, and traces of some steps."""

import contextlib
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


class Throughput:
    """Training speed between two readings, excluding pauses.

    Devices run asynchronously: wait for the result of the last step before `read` and `pause`, or
    its time is counted elsewhere.

    Args:
      step: the step that the run starts at.
      global_batch_size: images per step, over all devices.
      flops_per_image: forward and backward; None: unknown, so no MFU is reported.
      device_kind, num_chips: arguments of `flops.mfu`.
      total_s: seconds of training up to that step.
      clock: returns seconds.
    """

    def __init__(
        self,
        step: int,
        *,
        global_batch_size: int,
        flops_per_image: float | None,
        device_kind: str,
        num_chips: int,
        total_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._step, self._global_batch_size = step, global_batch_size
        self._flops_per_image = flops_per_image
        self._device_kind, self._num_chips = device_kind, num_chips
        self._clock = clock
        self._total_s = total_s
        self._paused_s: dict[str, float] = {}
        self._since = clock()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Exclude the time within the context; `what` names it, e.g. "save"."""
        start = self._clock()
        try:
            yield
        finally:
            passed = self._clock() - start
            self._since += passed
            self._paused_s[what] = self._paused_s.get(what, 0.0) + passed

    def seconds(self) -> float:
        """Seconds of training so far; must not be called during a pause."""
        return self._total_s + self._clock() - self._since

    def read(self, step: int) -> dict[str, float]:
        """Metrics since the last reading; `step` is the number of steps done.

        `time/seconds`: training so far; `time/images_per_s`: over all devices;
        `time/mfu`: a fraction, absent if the chip's peak or the FLOPs are unknown; `time/save_s`
        and so on: duration of each kind of pause since the last reading.
        """
        now = self._clock()
        seconds = now - self._since
        images_per_s = (step - self._step) * self._global_batch_size / seconds
        self._step, self._since = step, now
        self._total_s += seconds
        scalars = {"time/seconds": self._total_s, "time/images_per_s": images_per_s}
        scalars |= {f"time/{what}_s": paused for what, paused in self._paused_s.items()}
        self._paused_s = {}
        if self._flops_per_image is not None:
            share = mfu(
                self._flops_per_image * images_per_s,
                device_kind=self._device_kind,
                num_chips=self._num_chips,
            )
            if share is not None:
                scalars["time/mfu"] = share
        return scalars


def rented_chips(devices: Sequence[jax.Device]) -> int:
    """Number of chips that `devices` are on; 0 for CPUs, which nobody rents by the chip."""
    return 0 if devices[0].platform == "cpu" else count_chips(devices)


class Clock:
    """The chip-hours of a run, including its earlier parts, which may have used other meshes.

    Args:
      meta: saved with the state that the run continues from; {} from scratch.
      devices: devices of this part of the run.
    """

    def __init__(self, meta: Mapping[str, Any], devices: Sequence[jax.Device]):
        self._since = time.perf_counter()
        self._rented_chips = rented_chips(devices)
        self._chip_hours = meta.get("chip_hours", 0.0)

    def read(self) -> dict[str, float]:
        """The total to save; it counts everything that the run does."""
        hours = (time.perf_counter() - self._since) / 3600
        return {"chip_hours": self._chip_hours + hours * self._rented_chips}


class Profiler:
    """Traces the steps in `log.profile` to a directory, by `jax.profiler`."""

    def __init__(self, steps: str | None, directory: epath.Path):
        self._steps = step_range(steps, "log.profile") if steps else range(0)
        self._directory = directory
        self._tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exc_info) -> None:
        if self._tracing:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        """Call before the step numbered `step` is dispatched."""
        if step - 1 in self._steps and not self._tracing:
            jax.profiler.start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, result: Any) -> None:
        """Call with the result of `step`; waits for it before ending a trace."""
        if self._tracing and step not in self._steps:
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            self._tracing = False
            logger.info("trace written to %s; open it with TensorBoard or XProf", self._directory)
