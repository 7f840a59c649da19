"""The speed of training, without the pauses."""

import contextlib
import time
from collections.abc import Callable, Iterator

from vit_jax.devices.flops import mfu


class Throughput:
    """The speed of training alone: between two readings, without the pauses.

    The device works behind the program's back: wait for the last step's result before `read` and
    before `pause`, or its time is taken for another's.

    Args:
      step: the step that the run starts at.
      global_batch_size: images a step, over all devices.
      flops_per_image: forward and backward; None: the model FLOPs utilisation is not known.
      device_kind, num_chips: what `flops.mfu` needs.
      clock: seconds.
    """

    def __init__(
        self,
        step: int,
        *,
        global_batch_size: int,
        flops_per_image: float | None,
        device_kind: str,
        num_chips: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._step, self._global_batch_size = step, global_batch_size
        self._flops_per_image = flops_per_image
        self._device_kind, self._num_chips = device_kind, num_chips
        self._clock = clock
        self._total_s = 0.0
        self._paused_s: dict[str, float] = {}
        self._since = clock()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Around what is not training; `what` names it, e.g. "save"."""
        start = self._clock()
        try:
            yield
        finally:
            passed = self._clock() - start
            self._since += passed
            self._paused_s[what] = self._paused_s.get(what, 0.0) + passed

    def seconds(self) -> float:
        """Seconds of training by this process so far; not to be asked in a pause."""
        return self._total_s + self._clock() - self._since

    def read(self, step: int) -> dict[str, float]:
        """The metrics since the last reading, at `step` steps.

        `time/seconds`: of training by this process so far; `time/images_per_s`: over all devices;
        `time/mfu`: a share, absent where the chip's peak or the FLOPs are not known;
        `time/save_s` and so on: of each pause since the last reading, where there was one.
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
