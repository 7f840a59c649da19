"""Where the wall time of a run goes, by its rows: the share of its steps is the goodput.

The rows of a run that went on are those up to the restored step, so what was computed in vain is
not in them. It is in the row of the next start: `lost` is the time from the restored step's row to
the last row of the earlier part, `restart` the time from there to the compilation. `lost` also has
the steps up to a spike, which are computed again.
"""

import datetime
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.run.setup.workdir import read_starts

logger = logging.getLogger("vit_jax")

KINDS = ("input_wait", "compile", "evaluation", "save", "callbacks", "restart", "lost")


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
    workdir: epath.Path, history: Iterable[Mapping[str, Any]], restored_step: int | None
) -> Past:
    """The past of a run that goes on from `restored_step`; None: from scratch.

    Needs the line of this start in starts.jsonl. `history`: the rows before any is dropped.
    """
    rows = [row for row in history if row.get("time/wall_s") is not None]
    wall_s = max(time.time() - _began(workdir, rows), 0.0)
    kept = [row for row in rows if row["step"] <= (restored_step or 0)]
    kept_until, until = (part[-1]["time/wall_s"] if part else 0.0 for part in (kept, rows))
    counted, whole = add_up(kept), add_up(rows)
    seconds = {kind: whole[kind] - counted[kind] for kind in KINDS if kind != "input_wait"}
    lost_s = until - kept_until - sum(seconds.values())
    seconds["restart"] += max(wall_s - until, 0.0)
    if until > kept_until:
        seconds["lost"] += lost_s
        steps = rows[-1]["step"] - (restored_step or 0)
        logger.info("lost: %d steps, %.1f s; and the steps after the last row", steps, lost_s)
    return Past(wall_s, add_up(kept)["input_wait"], seconds)


def _began(workdir: epath.Path, rows: Iterable[Mapping[str, Any]]) -> float:
    """When a run began, by `time.time`; a branch pauses until it is trained for the first time."""
    before_s, began = 0.0, time.time()
    for line in reversed(read_starts(workdir)):
        if "branch_of" in line:
            past = [row["time/wall_s"] for row in rows if row["step"] <= line["resumed_at"]]
            before_s = past[-1] if past else 0.0
            break
        began = datetime.datetime.fromisoformat(line["time"]).timestamp()
    return began - before_s


def add_up(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by kind up to the last row: `step`, each of KINDS, and `other`."""
    found, steps_s, wall_s = dict.fromkeys(KINDS, 0.0), 0.0, 0.0
    for row in rows:
        for kind in KINDS:
            found[kind] += row.get(f"time/{kind}_s") or 0.0
        steps_s, wall_s = row.get("time/seconds") or steps_s, row.get("time/wall_s") or wall_s
    found = {"step": max(steps_s - found["input_wait"], 0.0)} | found
    return found | {"other": max(wall_s - sum(found.values()), 0.0)}


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of the steps in all `seconds` of `add_up`; 0 if there are none."""
    return seconds["step"] / (sum(seconds.values()) or 1.0)


def say(seconds: Mapping[str, float]) -> str:
    """The seconds of `add_up` in one line."""
    parts = [f"{kind.replace('_', ' ')} {s:.1f} s" for kind, s in seconds.items() if s >= 0.05]
    return f"goodput {goodput(seconds):.1%} of {sum(seconds.values()):.1f} s: {', '.join(parts)}"
