"""Several runs side by side: the keys in which they differ, their curves, their last metrics."""

import csv
import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax import files
from vit_jax.config import flatten
from vit_jax.config.stored import read_config
from vit_jax.errors import Faults, InputError, collect_faults, nearest
from vit_jax.insight import figures
from vit_jax.run import writers

_CURVES = 4  # panels, unless metrics are chosen
ABSENT = "absent"


class RunRecord(NamedTuple):
    """What a workdir says of its run.

    name: as short as it can be among the runs compared.
    config: {key: value}.
    curves: {metric: [(step, value)]}, by step; None values (not finite) are left out.
    step: the last step with a row; 0 without rows.
    """

    name: str
    config: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    step: int


def find_runs(paths: Sequence[epath.Path]) -> tuple[list[epath.Path], list[epath.Path]]:
    """(runs, studies) among the workdirs `paths`; the members of a study are runs too.

    Raises:
      InputError: names each that holds neither run nor study.
    """
    runs, studies, faults = [], [], Faults()
    for path in paths:
        if (path / "study.json").exists():
            studies.append(path)
            runs += sorted(p for p in path.iterdir() if (p / "config.json").exists())
        elif (path / "config.json").exists():
            runs.append(path)
        else:
            faults.append(f"{path}: has no config.json or study.json; give the workdir of a run "
                          "or study")  # fmt: skip
    collect_faults(faults)
    return list(dict.fromkeys(runs)), studies


def read_runs(workdirs: Sequence[str | os.PathLike]) -> list[RunRecord]:
    """Read the runs in `workdirs`, finished or not; a study stands for its runs.

    Raises:
      InputError: for fewer than two runs; names each workdir that holds neither run nor study.
    """
    paths = [files.absolute(workdir) for workdir in workdirs]
    runs = find_runs(paths)[0]
    if len(set(paths)) < len(paths) or len(runs) < 2:
        raise InputError(
            f"compare: got {', '.join(map(str, workdirs)) or 'no workdir'}; needs at least two "
            "different runs; give the workdir of each run, or the workdir of a study"
        )
    return [read_run(name, path) for name, path in zip(short_names(runs), runs, strict=True)]


def read_run(name: str, workdir: epath.Path) -> RunRecord:
    """Read the run in `workdir`, finished or not, under that name."""
    points: dict[str, dict[int, float]] = {}
    step = 0
    for row in writers.read_history(workdir):
        at = int(row.pop("step") or 0)
        step = max(step, at)
        for metric, value in row.items():
            if value is not None:
                points.setdefault(metric, {})[at] = value
    curves = {metric: sorted(by_step.items()) for metric, by_step in points.items()}
    return RunRecord(name, flatten(read_config(workdir)), curves, step)


def short_names(paths: Sequence[epath.Path]) -> list[str]:
    """As many last parts of each path as tell all paths apart."""
    parts = [os.fspath(path).split("/") for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [os.fspath(path) for path in paths]


def differences(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """{config key: the value in each run, or ABSENT} for the keys in which the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def last_values(runs: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """{metric: its last value in each run}, and "step"; None where a run has no such metric.

    Metrics of the clock (`time/...`) are left out.
    """
    names = dict.fromkeys(m for run in runs for m in run.curves if not m.startswith("time/"))
    order = sorted(names, key=lambda name: (name.startswith("train/"), name))
    found: dict[str, list[float | None]] = {"step": [run.step for run in runs]}
    for name in order:
        found[name] = [run.curves[name][-1][1] if name in run.curves else None for run in runs]
    return found


def choose_curves(runs: Sequence[RunRecord], asked: Sequence[str] = ()) -> list[str]:
    """The metrics to draw: those `asked` for, else train/loss and the evaluators' top-1.

    Raises:
      InputError: if no run has a metric that is asked for, or no run has any metric.
    """
    known = list(dict.fromkeys(metric for run in runs for metric in run.curves))
    if not known:
        raise InputError("compare: no run has a metric yet; wait for the first line of one")
    for metric in asked:
        if metric not in known:
            raise InputError(f"--metric={metric}: {nearest(metric, known)}")
    if asked:
        return list(dict.fromkeys(asked))
    own = [m for m in known if m.endswith("top1") and not m.startswith("train/")]
    chosen = ["train/loss"] * ("train/loss" in known) + own
    return (chosen or [m for m in known if not m.startswith("time/")] or known)[:_CURVES]


def draw(runs: Sequence[RunRecord], curves: Sequence[str]) -> bytes:
    """A PNG with a panel for each metric and a line for each run."""
    panels = {
        metric: {run.name: run.curves[metric] for run in runs if metric in run.curves}
        for metric in curves
    }
    return figures.draw_runs(panels, [run.name for run in runs])


def as_csv(runs: Sequence[RunRecord]) -> str:
    """The differences and the last metrics as CSV: kind, name, and a column for each run."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", "name", *(run.name for run in runs)])
    for kind, table in (("config", differences(runs)), ("metric", last_values(runs))):
        for name, values in table.items():
            writer.writerow([kind, name, *values])
    return text.getvalue()
