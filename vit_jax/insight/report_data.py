"""What a report shows of its runs and studies, read from their workdirs."""

import base64
import contextlib
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.insight.compare import RunRecord, find_runs, read_run, short_names
from vit_jax.run.guards import DIVERGED_FILE
from vit_jax.studies.engine import mean_and_std

_PNG = b"\x89PNG\r\n\x1a\n"
_MEASURES = ("accuracy", "average_precision")  # of classes; the second with several labels each
_ROWS = 10  # of the tables of classes and confusions


class Run(NamedTuple):
    """A run: what `compare` reads of it, and the rest of its workdir.

    summary: summary.json; {} unless it has finished. diverged: the error; None unless it has.
    starts: the lines of starts.jsonl, oldest first. teachers: the text of teachers.json, or "".
    """

    record: RunRecord
    workdir: epath.Path
    summary: Mapping[str, Any]
    diverged: str | None
    starts: Sequence[Mapping[str, Any]]
    teachers: str

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def state(self) -> str:
        if self.diverged is not None:
            return "diverged"
        step = f"{self.record.step:,}"
        return (
            f"finished at step {step}" if self.summary else f"not finished; last row: step {step}"
        )


class Picture(NamedTuple):
    """A PNG: its caption, and its content as base64."""

    caption: str
    content: str


class StudyRecord(NamedTuple):
    """A study: its table, its warnings, its pictures, and members without a result.

    unfinished: {member: its state and error}.
    """

    name: str
    workdir: epath.Path
    kind: str
    complete: bool
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    warnings: Sequence[str]
    unfinished: Mapping[str, str]
    pictures: Sequence[Picture]


class ClassResults(NamedTuple):
    """Results by class that `evaluate --output` wrote.

    weakest: classes by accuracy or average precision, the lowest first. confusions: pairs of
    classes, the most frequent first. Both are tables; their first row names the columns.
    """

    name: str
    pictures: Sequence[Picture]
    weakest: Sequence[Sequence[str]]
    confusions: Sequence[Sequence[str]]


def read_all(workdirs: Sequence[str | os.PathLike]) -> tuple[list[Run], list[StudyRecord]]:
    """Read runs and studies; the members of a study are runs too.

    Raises:
      InputError: for no workdir or one given twice; names each that holds neither run nor study.
    """
    paths = [files.absolute(workdir) for workdir in workdirs]
    if not paths or len(set(paths)) < len(paths):
        shown = ", ".join(map(str, workdirs)) or "no workdir"
        raise InputError(f"report: got {shown}; needs different workdirs of runs or studies")
    found, studies = find_runs(paths)
    runs = [_read_run(*pair) for pair in zip(short_names(found), found, strict=True)]
    return runs, [_read_study(*pair) for pair in zip(short_names(studies), studies, strict=True)]


def _read_run(name: str, workdir: epath.Path) -> Run:
    diverged, teachers = workdir / DIVERGED_FILE, workdir / "teachers.json"
    return Run(
        read_run(name, workdir),
        workdir,
        _read_json(workdir / "summary.json"),
        str(_read_json(diverged).get("error", "")) if diverged.exists() else None,
        list(_json_lines(workdir / "starts.jsonl")),
        teachers.read_text() if teachers.exists() else "",
    )


def _read_json(path: epath.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _json_lines(path: epath.Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # cut off by a kill
            yield json.loads(line)


def _read_study(name: str, workdir: epath.Path) -> StudyRecord:
    content = _read_json(workdir / "study.json")
    unfinished = {
        member: ": ".join([found["state"], *found["error"].strip().splitlines()[-1:]])
        for member, found in content.get("members", {}).items()
        if found["state"] != "finished"
    }
    return StudyRecord(
        name=name,
        workdir=workdir,
        kind=content["study"],
        complete=content["complete"],
        columns=content["columns"],
        rows=content["rows"],
        warnings=content.get("warnings", []),
        unfinished=unfinished,
        pictures=read_pictures(files.LiteralPath(workdir).glob("*.png"), workdir),
    )


def read_pictures(paths: Iterable[epath.Path], folder: epath.Path) -> list[Picture]:
    """The PNGs among `paths`, in the order of their names below `folder`, which are captions."""
    pictures = []
    for path in sorted(paths):
        content = path.read_bytes()
        if content.startswith(_PNG):
            caption = os.path.relpath(path, folder).removesuffix(".png")
            pictures.append(Picture(caption, base64.b64encode(content).decode()))
    return pictures


def read_figures(
    runs: Sequence[Run], folders: Sequence[epath.Path]
) -> list[tuple[str, list[Picture]]]:
    """(name, pictures) of each RUN/figures and of each of `folders`, one folder deep or less."""
    places = {run.workdir / "figures": run.name for run in runs}
    places |= {f: name for f, name in _named(folders) if f not in places}
    found = []
    for folder, name in places.items():
        paths = [
            path
            for pattern in ("*.png", "*/*.png")
            for path in files.LiteralPath(folder).glob(pattern)
        ]
        pictures = read_pictures((p for p in paths if p.name != "confusion.png"), folder)
        if pictures:
            found.append((name, pictures))
    return found


def _named(folders: Sequence[epath.Path]) -> list[tuple[epath.Path, str]]:
    """(folder, name) of each folder once."""
    different = list(dict.fromkeys(folders))
    return list(zip(different, short_names(different), strict=True))


def read_classes(runs: Sequence[Run], folders: Sequence[epath.Path]) -> list[ClassResults]:
    """What `evaluate --output` wrote into the workdirs, one or two folders deep, or `folders`."""
    found = []
    for place, name in [*((run.workdir, run.name) for run in runs), *_named(folders)]:
        patterns = ("classes.csv", "*/classes.csv", "*/*/classes.csv")
        for path in sorted(
            {path for pattern in patterns for path in files.LiteralPath(place).glob(pattern)}
        ):
            inner = os.path.relpath(path.parent, place)
            found.append(_read_classes(f"{name}: {inner}", path.parent))
    return found


def _read_classes(name: str, folder: epath.Path) -> ClassResults:
    head, *rows = _read_csv(folder / "classes.csv")
    for at in [head.index(name) for name in _MEASURES if name in head]:
        rows = sorted((row for row in rows if row[at]), key=lambda row: float(row[at]))
    confusions = _read_csv(folder / "confusions.csv")
    return ClassResults(
        name,
        read_pictures(files.LiteralPath(folder).glob("confusion.png"), folder),
        [head, *rows[:_ROWS]],
        confusions[: _ROWS + 1],
    )


def _read_csv(path: epath.Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(), newline=""))) if path.exists() else []


class Group(NamedTuple):
    """Runs whose configs differ in nothing but the seed.

    values: {metric: {"mean": its mean over last values, "std": deviation}} of the runs that have
      not diverged. num_measured: their number. steps: their last steps; a deviation over several is
      no deviation over seeds only.
    """

    name: str
    runs: Sequence[Run]
    values: Mapping[str, Mapping[str, float | None]]
    num_measured: int
    steps: Sequence[int]


def group_seeds(runs: Sequence[Run]) -> list[Group]:
    """Group the runs, with the mean and the sample deviation of each evaluator's last values."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        config = {key: value for key, value in run.record.config.items() if key != "seed"}
        by_config.setdefault(json.dumps(config, default=str), []).append(run)
    return [_group(members) for members in by_config.values()]


def _group(runs: Sequence[Run]) -> Group:
    measured = [run for run in runs if run.diverged is None]
    curves = [run.record.curves for run in measured]
    values = {}
    for metric in evaluated(measured):
        last = [curve[metric][-1][1] for curve in curves if metric in curve]
        values[metric] = mean_and_std(last)
    steps = sorted({run.record.step for run in measured})
    return Group(_group_name([run.name for run in runs]), runs, values, len(measured), steps)


def _group_name(names: Sequence[str]) -> str:
    """What all names begin with, without a dangling `seed_`; else all names."""
    if len(names) == 1:
        return names[0]
    same = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    shared = re.sub(r"([_./-]*seed)?[_./=-]*$", "", "".join(letter for letter, *_ in same))
    return shared or ", ".join(names)


def evaluated(runs: Sequence[Run]) -> list[str]:
    """The metrics of evaluators that any of the runs has: by evaluator, accuracies first."""
    known = dict.fromkeys(metric for run in runs for metric in run.record.curves)
    names = [name for name in known if not name.startswith(("train/", "time/"))]

    def place(name):
        evaluator, _, leaf = name.partition("/")
        return evaluator, leaf == "num_examples", not leaf.startswith("top"), leaf

    return sorted(names, key=place)


def seconds_by_kind(record: RunRecord) -> dict[str, float]:
    """{"training": seconds of steps, "evaluation": ..., "save": ...} as far as rows say."""
    clock = record.curves.get("time/seconds")
    found = {"training": clock[-1][1]} if clock else {}
    for name, points in record.curves.items():
        kind = re.fullmatch(r"time/(\w+)_s", name)
        if kind and not kind[1].endswith("_per"):
            found[kind[1]] = sum(value for _, value in points)
    return found
