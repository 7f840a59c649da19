"""Runs and studies, read from their workdirs, and what is shown of several of them together."""

import array
import collections
import json
import logging
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base import files, latex
from vit_jax.base.errors import Faults, InputError, collect_faults, few, nearest, shown
from vit_jax.checkpoints.history import check_summary, read_history
from vit_jax.config.metric_names import PIXELS, guess_direction
from vit_jax.config.stored import read_values
from vit_jax.run.setup.workdir import read_starts
from vit_jax.run.terminal import is_accuracy, is_of_class
from vit_jax.run.watch.ledger import add_up, goodput

logger = logging.getLogger("vit_jax")

ABSENT = "absent"
_DEPTH = 2  # folders below a given one that may hold runs
_ASKED = {"user", "recipe", "branch"}  # who else decides a key follows what these decide


class Run(NamedTuple):
    """The state of a run, as its workdir gives it; it may not have finished.

    name: as short as it can be among the runs read.
    config: {key: value}, without the section `study`.
    decided_by: {key: who decided it}; see `run.setup.resolve`.
    curves: {metric: rows of (step, value)}, by step; None values (not finite) are left out. Of
      counts whole numbers, of other metrics float64.
    step: the last step with a row; 0 without rows.
    summary: summary.json; {} unless it has finished. diverged: the error; None unless it has.
    starts: the lines of starts.jsonl, oldest first. teachers: the text of teachers.json, or "".
    seconds: where the wall time went, as `ledger.add_up` gives it.
    """

    name: str
    workdir: epath.Path
    config: Mapping[str, Any]
    decided_by: Mapping[str, str]
    curves: Mapping[str, np.ndarray]
    step: int
    summary: Mapping[str, Any]
    diverged: str | None
    starts: Sequence[Mapping[str, Any]]
    teachers: str
    seconds: Mapping[str, float]

    @property
    def state(self) -> str:
        if self.diverged is not None:
            return "diverged"
        said = "finished at" if self.summary else "not finished; last row:"
        return f"{said} step {self.step:,}"

    @property
    def short_state(self) -> str:
        """The last step, and the state unless the run has finished."""
        state = "diverged" if self.diverged is not None else "unfinished" * (not self.summary)
        return f"{self.step:,} {state}".strip()


def read_all(workdirs: Sequence[str | os.PathLike]) -> tuple[list[Run], list[dict[str, Any]]]:
    """Read runs and studies; the members of a study are runs too.

    A folder stands for the runs and studies in it, up to two folders deep. Those of them that
    cannot be read are left out, with a warning.

    Returns:
      (runs, the study.json of each study with its "name" and "workdir").

    Raises:
      InputError: for no workdir or one given twice; names each that holds neither run nor study.
    """
    paths = [files.absolute(workdir) for workdir in workdirs]
    if not paths or len(set(paths)) < len(paths):
        shown = ", ".join(map(str, workdirs)) or "no workdir"
        raise InputError(f"got {shown}; needs different workdirs of runs or studies")
    found, studies, faults = [], [], Faults()
    for path in paths:
        inside = _find(path)
        found += inside[0]
        studies += inside[1]
        faults.need(any(inside), f"{path}: {_say_content(path)}; give the workdir of a run or "
                    f"study, or a folder of them, up to {_DEPTH} deep")  # fmt: skip
    collect_faults(faults)
    found, studies = [*dict.fromkeys(found)], [*dict.fromkeys(studies)]
    runs = []
    for name, path in zip(short_names(found), found, strict=True):
        try:
            runs.append(_read_run(name, path))
        except (InputError, OSError) as e:
            said = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else str(e)
            if path in paths:
                raise InputError(said) from None
            logger.warning("%s; left out", said)
    read = [files.read_json(path / "study.json") for path in studies]
    return runs, [
        {"name": name, "workdir": path} | content
        for name, path, content in zip(short_names(studies), studies, read, strict=True)
        if content is not None
    ]


def read_goodput(workdir: str | os.PathLike, name: str) -> float:
    """The share of steps in the time of a run, or of the runs in a folder.

    `name`: of the caller's flag or argument, for errors.

    Raises:
      InputError: no step is timed yet, or as `read_all`.
    """
    seconds: collections.Counter[str] = collections.Counter()
    for run in read_all([workdir])[0]:
        seconds.update(run.seconds)
    if found := goodput(seconds):
        return found
    raise InputError(f"{name}={workdir}: no step is timed yet; give a longer run")


def _find(path: epath.Path, depth: int = _DEPTH) -> tuple[list[epath.Path], list[epath.Path]]:
    """(the runs, the studies) at `path`, or else up to `depth` folders below it, by name."""
    if (path / "study.json").exists():
        return sorted(p for p in path.iterdir() if (p / "config.json").exists()), [path]
    config = path / "config.json"
    if config.exists() and (depth == _DEPTH or (path / "starts.jsonl").exists()):
        return [path], []
    if config.is_file() and b'"resolved"' in config.read_bytes():  # an export has no such key
        return [path], []
    below = sorted(path.iterdir()) if depth and path.is_dir() else []
    parts = [_find(p, depth - 1) for p in below if p.is_dir()]
    return [p for runs, _ in parts for p in runs], [p for _, studies in parts for p in studies]


def _say_content(path: epath.Path) -> str:
    if not path.is_dir():
        return "is no folder" if path.exists() else "no such folder"
    return f"holds no run or study, but {few(sorted(p.name for p in path.iterdir())) or 'nothing'}"


def short_names(paths: Sequence[epath.Path]) -> list[str]:
    """As many last parts of each path as tell all paths apart."""
    length = 0
    names: list[str] = []
    while len(set(names)) < len(paths):
        length += 1
        names = [shown("/".join(os.fspath(path).split("/")[-length:])) for path in paths]
    return names


def _read_run(name: str, workdir: epath.Path) -> Run:
    points: dict[str, array.array] = {}  # steps and values in turn: 16 bytes, an object takes 100
    measures = set[str]()  # metrics that are no counts

    def noted() -> Iterator[Mapping[str, Any]]:
        for row in read_history(workdir):
            for metric, value in row.items():
                if value is not None:
                    points.setdefault(metric, array.array("d")).extend((row["step"], value))
                    if not isinstance(value, int):
                        measures.add(metric)
            yield row

    seconds = add_up(noted())
    curves = {metric: _by_step(points.pop(metric)) for metric in [*points]}
    curves |= {metric: curves[metric].astype(int) for metric in {*curves} - measures}
    steps = curves.pop("step", [[0]])
    values, decided_by = read_values(workdir)
    config = {k: v for k, v in values.items() if not k.startswith("study.")}
    diverged, teachers = workdir / "diverged.json", workdir / "teachers.json"
    return Run(
        name,
        workdir,
        config,
        decided_by,
        curves,
        int(steps[-1][0]),
        files.read_json(workdir / "summary.json", check_summary) or {},
        (files.read_json(diverged, lambda found: shown(found["error"])) or {}).get("error", "")
        if diverged.exists()
        else None,
        read_starts(workdir),
        teachers.read_bytes().decode(errors="replace") if teachers.exists() else "",
        seconds,
    )


def _by_step(points: array.array) -> np.ndarray:
    """Rows of (step, value) by step, float64 (N, 2); of one step the last one counts."""
    rows = np.frombuffer(points).reshape(-1, 2)[::-1]
    return rows[np.unique(rows[:, 0], return_index=True)[1]]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """{config key: the value in each run, or ABSENT} for the keys in which the runs differ.

    Keys that only follow from others are left out: those that neither the user nor the recipe nor
    the branch of any run decides, such as what the source of the weights gives. If there are no
    others, these are what differs. For an evaluator that some runs lack, only the type is listed.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    found = {
        key: row
        for key, row in values.items()
        if any(v != row[0] for v in row)
        and not (ABSENT in row and key.startswith("evals.") and not key.endswith(".type"))
    }
    deciders = {key: {run.decided_by.get(key, "user") for run in runs} for key in found}
    return {key: row for key, row in found.items() if deciders[key] & _ASKED} or found


def last_values(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """{metric: its last value in each run}, and "step"; None where a run has no such metric.

    Metrics of the clock (`time/...`) are left out; metrics of single classes come last.
    """
    found: dict[str, list[float | None]] = {"step": [run.step for run in runs]}
    of_classes = [name for name in _known(runs) if is_of_class(name)]
    for name in [*evaluated(runs), *_known(runs, "train/"), *of_classes]:
        last = [run.curves[name][-1][1].item() if name in run.curves else None for run in runs]
        found[name] = last
    return found


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Names of runs, the keys in which they differ, their last metrics; see `api.compare`."""
    names = [run.name for run in runs]
    return {"runs": names, "config": differences(runs), "metrics": last_values(runs)}


def main_metric(runs: Sequence[Run]) -> str | None:
    """The metric that orders the runs: `checkpoint.keep_best`, else an accuracy; None: no metric.

    Of those that most runs have, one of validation data comes before one of test data.
    """
    known = [name for name in evaluated(runs) if not name.endswith(("/num_examples", "_raw"))]
    kept = [run.config.get("checkpoint.keep_best") for run in runs]

    def place(name: str) -> tuple[Any, ...]:
        number = sum(name in run.curves for run in runs)
        rest = name.startswith("test"), not is_accuracy(name), guess_direction(name) == "lower"
        return -number, name not in kept, *rest

    return min(known, key=place, default=None)


def best_first(runs: Sequence[Run]) -> list[Run]:
    """The runs by the last value of their main metric; those without one come last, by name."""
    metric = main_metric(runs)
    if metric is None:
        return [*runs]
    sign = 1 if guess_direction(metric) == "lower" else -1

    def place(run: Run) -> tuple[bool, float]:
        is_there = metric in run.curves and run.diverged is None
        return not is_there, sign * run.curves[metric][-1][1] if is_there else 0.0

    return sorted(runs, key=place)


def _known(runs: Sequence[Run], begins: str | tuple[str, ...] = "") -> list[str]:
    """The metrics that any of the runs has, by name."""
    return sorted({name for run in runs for name in run.curves if name.startswith(begins)})


def evaluated(runs: Sequence[Run]) -> list[str]:
    """The metrics of evaluators that any of the runs has: by evaluator, accuracies first.

    Without the metrics of single classes.
    """

    def place(name: str) -> tuple[Any, ...]:
        evaluator, _, leaf = name.partition("/")
        rest = not is_accuracy(leaf), not leaf.startswith("loss"), len(leaf), leaf
        return evaluator, leaf == "num_examples", *rest

    found = {*_known(runs)} - {*_known(runs, ("train/", "time/"))}
    return sorted((name for name in found if not is_of_class(name)), key=place)


def by_use(runs: Sequence[Run]) -> list[str]:
    """The evaluators' metrics for a table with room for some, without counts.

    The main metric comes first, then the first one of each run that has none of the earlier ones,
    accuracies first, then the others, beginning with the metrics of most runs.
    """
    names = [name for name in evaluated(runs) if not name.endswith("/num_examples")]
    known = [name for name in [main_metric(runs)] if name is not None]
    for run in runs:
        if not run.curves.keys() & {*known}:
            own = [name for name in names if name in run.curves]
            known += sorted(own, key=lambda name: not is_accuracy(name))[:1]
    names.sort(key=lambda name: -sum(name in run.curves for run in runs))
    return [*dict.fromkeys([*known, *names])]


def choose_metrics(runs: Sequence[Run], asked: Sequence[str] = ()) -> list[str]:
    """The metrics to draw: those `asked` for, else all but counts, the clock's and baselines.

    The loss comes first, then the evaluators' accuracies, the evaluators' other metrics, and those
    of training.

    Raises:
      InputError: if no run has a metric that is asked for.
    """
    for metric in asked:
        if metric not in _known(runs):
            raise InputError(f"--metric={metric}: {nearest(metric, _known(runs))}")
    if asked:
        return list(dict.fromkeys(asked))
    names = [*evaluated(runs), *_known(runs, "train/")]
    names.sort(key=lambda name: (
        name != "train/loss", not is_accuracy(name),
        name.endswith("_raw") or name == "train/corrupt",
    ))  # fmt: skip
    return [
        name
        for name in names
        if not name.endswith("/num_examples") and not name.partition("/")[2].startswith(PIXELS)
    ]


class Group(NamedTuple):
    """Runs whose configs differ in nothing but the seed.

    values: {metric: last values of the runs that have it and have not diverged}. num_measured:
      number of runs that have not diverged. steps: their last steps; a deviation over several is
      no deviation over seeds only.
    """

    name: str
    runs: Sequence[Run]
    values: Mapping[str, Sequence[float]]
    num_measured: int
    steps: Sequence[int]

    @property
    def counted(self) -> str:
        """How many seeds its mean has, e.g. "3 seeds"; "2 of 3 seeds", where one has diverged."""
        whole = len(self.runs)
        return f"{self.num_measured} of {whole} seeds" * (self.num_measured < whole) or (
            f"{whole} seeds"
        )


def group_seeds(runs: Sequence[Run]) -> list[Group]:
    """Group the runs, with the last values of each metric; no seed comes twice in a group."""
    by_config: dict[tuple[str, int], list[Run]] = {}
    times = collections.Counter[str]()
    for run in runs:
        config = {key: value for key, value in run.config.items() if key != "seed"}
        whole = json.dumps(run.config, default=str)
        by_config.setdefault((json.dumps(config, default=str), times[whole]), []).append(run)
        times[whole] += 1
    groups = []
    for members in by_config.values():
        name = members[0].name
        if len(members) > 1:
            name = re.sub(r"[_./=-]*(seed)?[_./=-]*\d+$", "", name) or name
        measured = [run for run in members if run.diverged is None]
        values = {
            name: [run.curves[name][-1][1] for run in measured if name in run.curves]
            for name in _known(measured)
        }
        steps = sorted({run.step for run in measured})
        groups.append(Group(name, members, values, len(measured), steps))
    return groups


def as_latex(runs: Sequence[Run], metrics: Sequence[str] = ()) -> str:
    """A table with a row for each group of seeds: its name, the number n of values, their means.

    A cell with fewer values than n states their number. `metrics`: () takes all that evaluators
    measure, except counts.

    Raises:
      InputError: no run has a value.
    """
    names, rows = [*dict.fromkeys(metrics)] or by_use(runs), []
    for group in group_seeds(runs):
        found = {name: group.values.get(name, ()) for name in names}
        n = max(map(len, found.values()), default=0)
        cells = [
            show_mean(name, values) + f" (n={len(values)})" * (len(values) < n) if values else "-"
            for name, values in found.items()
        ]
        rows.append((group.name, str(n), *cells))
    if not any(n != "0" for _, n, *_ in rows):
        raise InputError("no run has a value for the table yet; wait, or give another --metric")
    note = "The number after ± is the sample standard deviation over n runs."
    return latex.as_latex([("run", "n", *names), *rows], note * ("±" in str(rows)))


def mean_curve(group: Group, metric: str) -> np.ndarray:
    """Rows of (step, mean, sample deviation) over the runs that have a step; float64 (N, 3).

    Runs that have diverged are left out, unless all have. The deviation of one run is 0.
    """
    measured = [run for run in group.runs if run.diverged is None] or group.runs
    curves = [run.curves[metric] for run in measured if metric in run.curves]
    if not curves:
        return np.zeros((0, 3))
    steps, place = np.unique(np.concatenate([c[:, 0] for c in curves]), return_inverse=True)
    values = np.concatenate([c[:, 1] for c in curves])
    count = np.bincount(place)
    mean = np.bincount(place, values) / count
    squares = np.bincount(place, (values - mean[place]) ** 2)
    return np.stack([steps, mean, np.sqrt(squares / np.maximum(count - 1, 1))], axis=1)


def show_mean(name: str, values: Sequence[float]) -> str:
    """Mean and, of several, sample deviation of a metric: accuracies in percent."""
    scale, unit = (100, " %") if is_accuracy(name) else (1, "")
    values = [float(value) for value in values]  # counts are NumPy's
    mean = scale * statistics.fmean(values)
    digits = ".2f" if unit else ",.0f" if mean.is_integer() else ".4g"
    if len(values) == 1:
        return f"{mean:{digits}}{unit}"
    deviation = scale * statistics.stdev(values)
    return f"{mean:{digits}} ± {deviation:{'.2f' if unit else '.2g'}}{unit}"
