"""Errors that end a run: non-finite losses or gradients, and too many corrupt records."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vit_jax.errors import RaisedByAll

DIVERGED_FILE = "diverged.json"  # in the workdir of a run ended by a NonFiniteError
# A fraction of fewer examples means little; a smaller data set is judged by its own size.
_EXAMPLES_TO_JUDGE_BY = 10_000


class NonFiniteError(RuntimeError, RaisedByAll):
    """A loss or a gradient is infinite or NaN, so the run cannot continue."""


class CorruptDataError(RuntimeError, RaisedByAll):
    """Too many records cannot be read or decoded."""


def check_finite(pending: collections.deque, saved: int | None) -> dict[str, float]:
    """Check that the metrics of all pending steps are finite; return those of the last step.

    `saved`: step of the newest checkpoint; None: there is none.
    """
    values: dict[str, float] = {}
    steps = [step for step, _ in pending]
    for step, values in zip(steps, jax.device_get([m for _, m in pending]), strict=True):
        bad = [f"{k} is {v}" for k, v in values.items() if "/" not in k and not math.isfinite(v)]
        if bad:
            grads = {k.partition("/")[2]: v for k, v in values.items() if k[:10] == "grad_norm/"}
            layers = [layer for layer, norm in grads.items() if not math.isfinite(norm)]
            if layers:
                bad.append(f"non-finite gradients in {', '.join(layers)}")
            kept = "nothing is saved" if saved is None else f"last save: step {saved}"
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)}; {kept}. Lower optimizer.peak_lr, lengthen "
                "schedule.warmup or set optimizer.grad_clip_norm, and use a new --workdir"
            )
    pending.clear()
    return {name: float(value) for name, value in values.items()}


class CorruptRecords:
    """Count of the run's examples that could not be read or decoded, including before a resume.

    Args:
      meta: saved with the state that the run continues from; {} from scratch.
      global_batch_size: B.
      num_examples: size of the data set.
      max_fraction: largest allowed fraction of corrupt examples among those seen so far.
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
        """Add the counts of some steps."""
        self.total += round(math.fsum(jax.device_get(by_step)))

    def check(self, step: int, saved: int | None) -> None:
        """Raise CorruptDataError if there are too many; `saved` is the newest checkpoint's step."""
        seen = step * self._global_batch_size
        if self.total > self._max_fraction * max(seen, self._at_least):
            kept = "nothing is saved" if saved is None else f"last save: step {saved}"
            raise CorruptDataError(
                f"step {step}: {self.total} of {seen} examples are corrupt and were masked, more "
                f"than data.max_corrupt_fraction={self._max_fraction}; {kept}. The warnings above "
                "name the records: repair them, or raise data.max_corrupt_fraction, and run the "
                "same command again"
            )

    def read(self) -> dict[str, int]:
        """The count, to be saved with the state."""
        return {"corrupt": self.total}
