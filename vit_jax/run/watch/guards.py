"""Reasons to end a run, or to warn: non-finite values, corrupt records, collapsed features."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from vit_jax.base.errors import RaisedByAll
from vit_jax.config.sections import Checkpoint, Data
from vit_jax.objectives.contract import Collapse

DIVERGED_FILE = "diverged.json"  # in the workdir of a run ended by a NonFiniteError
# A fraction of fewer examples means little; a smaller data set is judged by its own size.
_EXAMPLES_TO_JUDGE_BY = 10_000

_LEAST_SHARE = 0.05  # of the width that the effective rank of healthy features fills
_NEAR = 0.01  # of the greatest entropy: as near to 0 or to it counts as there
_ROWS = 5  # one after another, so that a single row warns of nothing
_STALL_S, _STALL_SHARE = 10.0, 0.1
_JUMP_S = 5.0  # between two rows; the host's time service may correct less
_MORE = "docs/explanation/does_it_learn.md shows healthy and sick runs"


class NonFiniteError(RuntimeError, RaisedByAll):
    """A loss or a gradient is infinite or NaN, or spikes too often: the run cannot continue.

    step: the one that is not finite; None: not known.
    """

    def __init__(self, text: str, step: int | None = None):
        super().__init__(text)
        self.step = step


class CorruptDataError(RuntimeError, RaisedByAll):
    """Too many records cannot be read or decoded."""


def say_saved(saved: int | None) -> str:
    """The part of an error message about the newest checkpoint, of step `saved`; None: there is
    none.
    """
    return "nothing is saved" if saved is None else f"last save: step {saved}"


def check_finite(steps: Sequence[tuple[int, Mapping[str, Any]]], saved: int | None) -> None:
    """Check that the metrics of all `steps`, (number, {name: value}), are finite.

    `saved`: step of the newest checkpoint; None: there is none.
    """
    for step, values in steps:
        own = {k: v for k, v in values.items() if not isinstance(v, dict)}
        bad = [f"{k} is {v}" for k, v in own.items() if "/" not in k and not math.isfinite(v)]
        if bad:
            norms = {k: v for k, v in values.items() if k.startswith("grad_norm/")}
            layers = [k.partition("/")[2] for k, v in norms.items() if not math.isfinite(v)]
            if layers:
                bad.append(f"non-finite gradients in {', '.join(layers)}")
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)}; {say_saved(saved)}. Lower optimizer.peak_lr, "
                "lengthen schedule.warmup or set optimizer.grad_clip_norm, and use a new --workdir",
                step,
            )


class CorruptRecords:
    """Count of the run's examples that could not be read or decoded, including before a resume.

    Args:
      meta: saved with the state that the run continues from; {} from scratch.
      data: of the run.
      images: the number of images of the first so many steps.

    total: the count, to be saved with the state.
    """

    def __init__(self, meta: Mapping[str, Any], data: Data, images: Callable[[int], int]):
        self.total = int(meta.get("corrupt", 0))
        self._images = images
        self._max_fraction = data.max_corrupt_fraction
        self._at_least = min(data.num_examples, _EXAMPLES_TO_JUDGE_BY)

    def count(self, by_step: Sequence[float], step: int, saved: int | None) -> None:
        """Add the counts of the last steps, up to `step`; `saved` is as in `check_finite`.

        Raises CorruptDataError if there are too many among all examples so far.
        """
        self.total += round(math.fsum(by_step))
        seen = self._images(step)
        if self.total > self._max_fraction * max(seen, self._at_least):
            raise CorruptDataError(
                f"step {step}: {self.total} of {seen} examples are corrupt and were masked, more "
                f"than data.max_corrupt_fraction={self._max_fraction}; {say_saved(saved)}. The "
                "warnings above name the records: repair them and use a new --workdir, as they are "
                "other data then; or raise data.max_corrupt_fraction and run the same command again"
            )


class Health:
    """Watches the rows of a run's metrics; each finding is said once, and again after a recovery.

    Args:
      collapse: from the objective; None: nothing is watched.
      ranks: names of the evaluators of type `rank`.
      meta: saved with the state that the run continues from; {} from scratch.
    """

    def __init__(self, collapse: Collapse | None, ranks: Collection[str], meta: Mapping[str, Any]):
        self._collapse, self._ranks = collapse, ranks
        known = meta.get("health", {})
        self._rows: dict[str, int] = {"low": 0, "high": 0} | known.get("rows", {})
        self._said: set[str] = {*known.get("said", ())}

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add a row, {"train/loss": 2.3, ...} or {"rank/share": 0.4, ...}; return new warnings."""
        if self._collapse is None:
            return []
        new = []
        for finding, is_there, text in self._judge(row, self._collapse):
            if is_there and finding not in self._said:
                new.append(f"{text}; {_MORE}")
            (self._said.add if is_there else self._said.discard)(finding)
        return new

    def _judge(
        self, row: Mapping[str, float], collapse: Collapse
    ) -> Iterator[tuple[str, bool, str]]:
        """(name of a finding, whether it is there with this row, its warning)."""
        entropy, limit = row.get("train/teacher_entropy"), collapse.entropy_limit
        if entropy is not None and limit:
            for kind, near, what, remedy in (
                ("low", entropy <= _NEAR * limit, "0: the teacher is sure of every image, as it is "
                 "where all images get one prototype", collapse.low_entropy),
                ("high", entropy >= (1 - _NEAR) * limit, f"{limit:.4g}, its greatest value: the "
                 "teacher prefers no prototype for any image", collapse.high_entropy),
            ):  # fmt: skip
                self._rows[kind] = self._rows[kind] + 1 if near else 0
                text = f"train/teacher_entropy={entropy:.4g}: for {_ROWS} rows within 1 % of {what}"
                yield f"entropy_{kind}", self._rows[kind] >= _ROWS, f"{text}. {remedy}"
        for name in self._ranks:
            if (share := row.get(f"{name}/share")) is not None:
                text = (
                    f"{name}/rank={row[f'{name}/rank']:.3g}: the features fill {100 * share:.2g} % "
                    f"of the model's width, less than {100 * _LEAST_SHARE:.0f} %, so they hardly "
                    "tell images apart"
                )
                yield name, share < _LEAST_SHARE, f"{text}. {collapse.low_rank}"

    def read(self) -> dict[str, Any]:
        """The values that a resumed run needs, saved with the state; {} if nothing was found."""
        if not any(self._rows.values()) and not self._said:
            return {}
        return {"health": {"rows": self._rows.copy(), "said": sorted(self._said)}}


class Stalls:
    """Names the cause of long waits in the rows of a run, once until it is over; see `add`."""

    def __init__(self, checkpoint: Checkpoint):
        saves = {"every": checkpoint.every, "memory_every": checkpoint.memory_every}
        given = " and ".join(f"checkpoint.{key} (now '{n} steps')" for key, n in saves.items() if n)
        self._remedies = {
            "input_wait": "the devices wait for images: take simpler data.ops, another data.reader "
            "or more CPU cores; `vit_jax benchmark --what=input` measures the input",
            "save": f"the run waits for saves: raise {given}, or give --workdir a faster disk",
        }
        self._since: float | None = None
        self._seconds = dict.fromkeys(self._remedies, 0.0)
        self._said: set[str] = set()

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add a row; return a warning of each new wait for more than a tenth of 10 s or more."""
        if (wall_s := row.get("time/wall_s")) is None:
            return []
        if self._since is None:
            self._since = wall_s
            return []
        for kind in self._seconds:
            self._seconds[kind] += row.get(f"time/{kind}_s", 0.0)
        if (passed := wall_s - self._since) < _STALL_S:
            return []
        new = []
        for kind, seconds in self._seconds.items():
            if (stalls := seconds > _STALL_SHARE * passed) and kind not in self._said:
                new.append(f"{seconds:.1f} of the last {passed:.1f} s: {self._remedies[kind]}")
            (self._said.add if stalls else self._said.discard)(kind)
        self._since, self._seconds = wall_s, dict.fromkeys(self._seconds, 0.0)
        return new


class Jumps:
    """Names each jump of this host's clock, `time.time`, once; see `add`."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Call with each row; return a warning if the clock has jumped since the last one."""
        before, self._ahead = self._ahead, time.time() - time.monotonic()
        jump = self._ahead - before
        if abs(jump) < _JUMP_S:
            return []
        return [
            f"this host's clock has jumped by {jump:+,.0f} s, or the host has slept; the durations "
            "of this process do not count it, the time between two starts does: check the host's "
            "time service (NTP)"
        ]
