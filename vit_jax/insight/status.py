"""Where runs are, by the files in their workdirs."""

import dataclasses
import datetime
import os
from collections.abc import Sequence

from vit_jax.config.durations import parse_duration
from vit_jax.insight.runs import Run, read_all
from vit_jax.run.setup.workdir import say_holder
from vit_jax.run.watch import replay, spikes


@dataclasses.dataclass(frozen=True)
class Status:
    """A run, by its files; fields that they do not say yet are None.

    step, total_steps: of its last row, and of its end.
    images_per_s, loss: in its last row.
    eta_s: seconds left, by the wall time of the steps so far, restarts included.
    health: "finished", "diverged", "training", "stopped" or "not heard of for ...", and findings.
    where: the host of its process 0 and its devices.
    goodput: see `ledger`.
    """

    name: str
    step: int
    total_steps: int
    images_per_s: float | None
    eta_s: float | None
    loss: float | None
    health: str
    where: str
    goodput: float | None

    def cells(self) -> dict[str, str]:
        """{column: text}."""
        eta = "" if self.eta_s is None else str(datetime.timedelta(seconds=round(self.eta_s)))
        return {
            "run": self.name,
            "step": f"{self.step:,}/{self.total_steps:,}",
            "images/s": "" if self.images_per_s is None else f"{self.images_per_s:,.0f}",
            "ETA": eta,
            "train/loss": "" if self.loss is None else f"{self.loss:.4g}",
            "health": self.health,
            "where": self.where,
            "goodput": "" if self.goodput is None else f"{self.goodput:.0%}",
        }


def read_status(workdirs: Sequence[str | os.PathLike]) -> list[Status]:
    """The status of the runs in `workdirs`, as `read_all` finds them.

    Raises:
      InputError: names each workdir that holds neither run nor study.
    """
    return [_status(run) for run in read_all(workdirs)[0]]


def _status(run: Run) -> Status:
    def last(metric: str) -> float | None:
        return run.curves[metric][-1][1] if metric in run.curves else None

    examples, batch = run.config["data.num_examples"], run.config["global_batch_size"]
    total_steps = parse_duration(
        run.config["duration"], num_examples=examples, global_batch_size=batch, key="duration"
    )
    wall_s, is_done = last("time/wall_s"), bool(run.summary) or run.diverged is not None
    eta_s = None
    if wall_s is not None and run.step and not is_done:
        eta_s = wall_s / run.step * (total_steps - run.step)
    goodput = run.summary.get("goodput", last("time/goodput"))
    return Status(run.name, run.step, total_steps, last("time/images_per_s"), eta_s,
                  last("train/loss"), _health(run), _where(run), goodput)  # fmt: skip


def _health(run: Run) -> str:
    if run.diverged is not None:
        said = "diverged"
    elif run.summary:
        said = "finished"
    else:
        said = say_holder(run.workdir)
    for folder, what in ((spikes.FOLDER, "spikes"), (replay.FOLDER, "wrong bits")):
        files = (run.workdir / folder).glob("*.json") if (run.workdir / folder).exists() else ()
        if number := len([*files]):
            said += f"; {what}: {number}"
    return said


def _where(run: Run) -> str:
    if not run.starts:
        return ""
    hardware = run.starts[-1]["hardware"]
    return f"{hardware['host']}, {hardware['devices']} x {hardware['device_kind']}"
