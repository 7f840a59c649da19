"""The values that a run has measured, read from its workdir.

The rows of metrics.jsonl may be damaged or lost. So the values by which the run decides are saved
with each state too, and count before the rows; runs stored before have only the rows.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from vit_jax.base import files
from vit_jax.checkpoints import restore

logger = logging.getLogger("vit_jax")

ROWS = "metrics.jsonl"


def check_row(row: Mapping[str, Any]) -> None:
    """Raise an error unless the row has its step, and nothing but numbers and None."""
    operator.index(row["step"])
    sum(filter(None, row.values()))


def check_summary(summary: Mapping[str, Any]) -> None:
    """Raise an error unless the steps of a summary.json are whole, and its metrics numbers."""
    best = summary.get("best", {})
    for found in (summary, best):
        operator.index(found.get("step", 0))
        sum(value for name, value in found.items() if "/" in name and value is not None)
    sum(summary.get(name, 0) for name in ("goodput", "exaflops"))


def read_history(workdir: epath.Path) -> Iterator[dict[str, Any]]:
    """The rows of WORKDIR/metrics.jsonl, each with its `step`; None: not finite."""
    found = files.read_lines(workdir / ROWS, check_row)
    return (row for _, row in found if row is not None)


def warn_of_lost_rows(workdir: epath.Path, last: int, meta: Mapping[str, Any]) -> None:
    """Warn if the rows end at step `last`, and `meta` of a saved state names a later row."""
    logged = meta.get("logged", 0)  # not in older runs
    if last < logged:
        logger.warning(
            "%s: ends at step %d, but has had rows up to step %d; restore it from a copy if you "
            "have one: reports lack what is lost", workdir / ROWS, last, logged,
        )  # fmt: skip


def read_values(
    workdir: epath.Path,
    last_step: int,
    meta: Mapping[str, Any] | None = None,
    is_asked: Callable[[str], bool] = lambda metric: True,
) -> dict[str, dict[int, float | None]]:
    """{metric: {step: value}} up to and with `last_step`, in the order of steps.

    Args:
      workdir: of the run.
      last_step: a step.
      meta: saved with the state of that step; None: with the newest intact one up to it.
      is_asked: whether a metric is read; the others take no memory.
    """
    if meta is None:
        meta = restore.newest_meta(workdir / "checkpoints", last_step)
    found: dict[str, dict[int, float | None]] = {}
    for row in read_history(workdir):
        for metric in filter(is_asked, row):
            found.setdefault(metric, {})[row["step"]] = row[metric]
    for metric, values in meta.get("evaluated", {}).items():
        found.setdefault(metric, {}).update({int(at): value for at, value in values.items()})
    return {
        m: {at: of_m[at] for at in sorted(of_m) if at <= last_step} for m, of_m in found.items()
    }
