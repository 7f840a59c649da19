"""Training speed, excluding pauses."""

import contextlib
import time
from collections.abc import Callable, Iterator

from vit_jax.devices.flops import mfu


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
