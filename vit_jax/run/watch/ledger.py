"""Where the wall time of a run goes, by its rows: the share of its steps is the goodput.

The rows of a run that went on are those up to the restored step, so what was computed in vain is
not in them. It is in the row of the next start: `lost` is the time from the restored step's row to
the last row of the earlier part, `restart` the time from there to the start of the new process,
and `start` the time from there to the compilation without the measurement of kernels, which is
`choose`. `lost` also has the steps up to a spike, which are computed again.
"""

import datetime
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.run.setup.workdir import read_starts

logger = logging.getLogger("vit_jax")

KINDS = ("start", "choose", "input_wait", "compile", "evaluation", "save", "callbacks", "restart",
         "lost")  # fmt: skip


class Past(NamedTuple):
    """The time before a start, in seconds.

    wall_s: since the first start of the run.
    input_wait_s: in the steps that count.
    seconds: by kind, since the last row that counts.
    """

    wall_s: float = 0.0
    input_wait_s: float = 0.0
    seconds: Mapping[str, float] = {}

    def after_compiling(self, seconds: float) -> "Past":
        """The past at the first step."""
        return self._replace(
            wall_s=self.wall_s + seconds,
            seconds={**self.seconds, "compile": seconds + self.seconds.get("compile", 0.0)},
        )


NO_PAST = Past()


def read_past(
    workdir: epath.Path,
    history: Iterable[Mapping[str, Any]],
    restored_step: int | None,
    start_s: float = 0.0,
    choose_s: float = 0.0,
    train_s: float = 0.0,
) -> Past:
    """The past of a run that goes on from `restored_step`; None: from scratch.

    Needs the line of this start in starts.jsonl.

    Args:
      workdir: of the run.
      history: the rows before any is dropped.
      restored_step: see above.
      start_s: since the time in the line of this start.
      choose_s: of these, what the measurement of kernels took.
      train_s: of training up to the restored step; a killed process may have saved without a row.
    """
    began, branched_at = began_at(workdir)
    whole, kept, of_branch = _Sums(), _Sums(), _Sums()
    for row in history:
        if row.get("time/wall_s") is not None:
            for sums, until in (kept, restored_step or 0), (of_branch, branched_at):
                if row["step"] <= until:
                    sums.add(row)
            whole.add(row)
    # The clock may have been set back meanwhile.
    wall_s = max(time.time() - began + of_branch.wall_s, whole.wall_s + start_s)
    seconds = {k: whole.seconds[k] - kept.seconds[k] for k in KINDS if k != "input_wait"}
    lost_s = whole.wall_s - kept.wall_s - sum(seconds.values())
    seconds["start"] += start_s - choose_s
    seconds["choose"] += choose_s
    unwritten_s = max(train_s - kept.steps_s, 0.0)
    if whole.wall_s > kept.wall_s:  # then these steps are among the lost rows' steps
        lost_s, unwritten_s = max(lost_s - unwritten_s, 0.0), 0.0
        seconds["lost"] += lost_s
        steps = whole.step - (restored_step or 0)
        logger.info("lost: %d steps, %.1f s; and the steps after the last row", steps, lost_s)
    seconds["restart"] += max(wall_s - start_s - whole.wall_s - unwritten_s, 0.0)
    return Past(wall_s, kept.seconds["input_wait"], seconds)


def began_at(workdir: epath.Path) -> tuple[float, int]:
    """When a run or a branch was trained for the first time, by `time.time`; the branch's step.

    The step is -1 of a run that is no branch.
    """
    began = time.time()
    for line in reversed(read_starts(workdir)):
        if "branch_of" in line:
            return began, line["resumed_at"]
        began = datetime.datetime.fromisoformat(line["time"]).timestamp()
    return began, -1


class _Sums:
    """Sums over rows, added one by one.

    seconds: of each of KINDS. steps_s, wall_s, step: in the last row that has them.
    """

    def __init__(self) -> None:
        self.seconds, self.steps_s, self.wall_s = dict.fromkeys(KINDS, 0.0), 0.0, 0.0
        self.step = 0

    def add(self, row: Mapping[str, Any]) -> None:
        for kind in KINDS:
            self.seconds[kind] += row.get(f"time/{kind}_s") or 0.0
        self.steps_s = row.get("time/seconds") or self.steps_s
        self.wall_s, self.step = row.get("time/wall_s") or self.wall_s, row["step"]


def add_up(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by kind up to the last row: `step`, each of KINDS, and `other`."""
    sums = _Sums()
    for row in rows:
        sums.add(row)
    found = {"step": max(sums.steps_s - sums.seconds["input_wait"], 0.0)} | sums.seconds
    return found | {"other": max(sums.wall_s - sum(found.values()), 0.0)}


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of the steps in all `seconds` of `add_up`; 0 if there are none."""
    return seconds["step"] / (sum(seconds.values()) or 1.0)


def say(seconds: Mapping[str, float]) -> str:
    """The seconds of `add_up` in one line."""
    parts = [f"{kind.replace('_', ' ')} {s:.1f} s" for kind, s in seconds.items() if s >= 0.05]
    return f"goodput {goodput(seconds):.1%} of {sum(seconds.values()):.1f} s: {', '.join(parts)}"
