"""What ends a run that cannot go on: what is not finite, and too many corrupt records."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

DIVERGED_FILE = "diverged.json"  # in the workdir of a run that a NonFiniteError has ended
_EXAMPLES_TO_JUDGE_BY = 10_000  # or the data set, if it is smaller; before, few may be many


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or not a number: the run cannot go on."""


class CorruptDataError(RuntimeError):
    """Too many records cannot be read or decoded."""


def check_finite(pending: collections.deque, saved: int | None) -> dict[str, float]:
    """The metrics of the last pending step, once those of all have been seen to be finite.

    `saved` is the step of the newest checkpoint.
    """
    values: dict[str, float] = {}
    steps = [step for step, _ in pending]
    for step, values in zip(steps, jax.device_get([m for _, m in pending]), strict=True):
        bad = [f"{k} is {v}" for k, v in values.items() if "/" not in k and not math.isfinite(v)]
        if bad:
            grads = {k.partition("/")[2]: v for k, v in values.items() if k[:10] == "grad_norm/"}
            layers = [layer for layer, norm in grads.items() if not math.isfinite(norm)]
            if layers:
                bad.append(f"with gradients of that kind in {', '.join(layers)}")
            kept = "nothing was saved before it" if saved is None else f"step {saved} is saved"
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)}; {kept}. Lower optimizer.peak_lr, lengthen "
                "schedule.warmup or set optimizer.grad_clip_norm, and take a new --workdir"
            )
    pending.clear()
    return {name: float(value) for name, value in values.items()}


class CorruptRecords:
    """How many examples of a run could not be read or decoded, earlier parts of it included.

    Args:
      meta: saved with the state that the run goes on from; {} from scratch.
      global_batch_size: B.
      num_examples: of the data set.
      max_fraction: of the examples so far that may be corrupt.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        *,
        global_batch_size: int,
        num_examples: int,
        max_fraction: float,
    ):
        self.total = int(meta.get("corrupt", 0))
        self._global_batch_size, self._max_fraction = global_batch_size, max_fraction
        self._at_least = min(num_examples, _EXAMPLES_TO_JUDGE_BY)

    def count(self, by_step: Sequence[jax.Array]) -> None:
        """Adds those of some steps."""
        self.total += round(math.fsum(jax.device_get(by_step)))

    def check(self, step: int, saved: int | None) -> None:
        """Raises CorruptDataError if they are too many; `saved` is the newest checkpoint's step."""
        seen = step * self._global_batch_size
        if self.total > self._max_fraction * max(seen, self._at_least):
            kept = "nothing was saved" if saved is None else f"step {saved} is saved"
            raise CorruptDataError(
                f"step {step}: {self.total} of {seen} examples are corrupt and were masked, more "
                f"than data.max_corrupt_fraction={self._max_fraction}; {kept}. The warnings above "
                "name the records: repair them, or set data.max_corrupt_fraction higher and start "
                "the same command again"
            )

    def read(self) -> dict[str, int]:
        """To be saved."""
        return {"corrupt": self.total}
