"""The data types of a study: members, their results, and the report."""

import csv
import hashlib
import io
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import Faults, InputError, nearest
from vit_jax.evaluators.metric_names import declared_metrics

_IN_CSV = ("num_params", "images_seen", "exaflops")  # of a summary, beside the metrics

_LONGEST_NAME = 255  # bytes of a file's name, on nearly every disk
_DIGITS = 16  # of the digest in a shortened name

FINISHED, DIVERGED, FAILED, HANDED_OVER = "finished", "diverged", "failed", "handed over"


WORKDIR = "{workdir}"  # in an override: the workdir of the study


class Member(NamedTuple):
    """A training run of a study, or another command that writes WORKDIR/summary.json.

    name: name of its workdir, a folder in the workdir of the study.
    overrides: changes to the study's config, as after `--config.`: {"optimizer.peak_lr": "0.01"}.
      `WORKDIR` in a value stands for the workdir of the study.
    command: train, or label.
    """

    name: str
    overrides: Mapping[str, str]
    command: str = "train"


def name_member(text: str) -> str:
    """A member's name made of `text`: a folder name that every disk takes.

    A name longer than 255 bytes is cut, and a digest of the whole is added.
    """
    name = re.sub(r"[^\w.+-]+", "_", text)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    kept = name.encode()[: _LONGEST_NAME - _DIGITS - 2].decode(errors="ignore")
    return f"{kept}__{digest}"


class Result(NamedTuple):
    """The outcome of a member.

    state: FINISHED; DIVERGED, i.e. its loss became non-finite; FAILED for other failures;
      HANDED_OVER to a launcher, and not known to have ended.
    summary: its summary.json, if it has finished.
    error: its last output, if it has not finished.
    """

    state: str
    summary: Mapping[str, Any] = {}
    error: str = ""


class Report(NamedTuple):
    """Results of a study so far.

    columns, rows: a table, starting with the members.
    values: content for study.json.
    complete: whether all planned results are there.
    files: {name: content} of additional files.
    best: the members of the best row, by seeds; () if the study compares no rows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    values: Mapping[str, Any]
    complete: bool
    files: Mapping[str, bytes] = {}
    best: Sequence[str] = ()


class Study(NamedTuple):
    """A study, as functions of its config and of the results so far, {member name: result}.

    sets: config -> keys that the study sets for its members, so the user may not.
    check: raises InputError if the config does not fit this study.
    members: all members known so far, including those with a result, in the order of running.
    report: see `Report`.
    """

    sets: Callable[[ConfigDict], Collection[str]]
    check: Callable[[ConfigDict], None]
    members: Callable[[ConfigDict, Mapping[str, Result]], list[Member]]
    report: Callable[[ConfigDict, Mapping[str, Result]], Report]


def check_report(config: ConfigDict, faults: Faults) -> None:
    """Check the keys that every study uses to report; adds to `faults`."""
    study = config.study
    if study.seeds < 1:
        faults.append(f"study.seeds={study.seeds}: needs a positive int")
    name = study.metric.partition("/")[0]
    if name in config.evals:  # checked now, not when the first member has ended
        known = faults.check(accuracies, config, name)
        faults.need(
            known is None or study.metric in known,
            f"study.metric={study.metric!r}: needs an accuracy; known: {', '.join(known or ())}",
        )


def accuracies(config: ConfigDict, name: str) -> list[str] | None:
    """The metrics of the evaluator `name` that a study may report; None: they are not known yet."""
    found = declared_metrics(config, name)
    return None if found is None else [m for m, better in found.items() if better == "higher"]


def check_evaluator(config: ConfigDict, faults: Faults) -> None:
    """Adds a fault if no evaluator of the config gives `study.metric`."""
    name = config.study.metric.partition("/")[0]
    if name not in config.evals:
        faults.append(
            f"study.metric={config.study.metric!r}: no such evaluator; "
            f"{nearest(name, list(config.evals))}"
        )


def write_csv(columns: Sequence[str], runs: Sequence[tuple[Sequence[Any], Result]]) -> str:
    """A row for each run: the values of `columns`, its state, and what its summary says."""
    metrics = dict.fromkeys(key for _, result in runs for key in result.summary if "/" in key)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "state", *metrics, *_IN_CSV])
    for values, result in runs:
        numbers = [result.summary.get(key, "") for key in (*metrics, *_IN_CSV)]
        writer.writerow([*values, result.state, *numbers])
    return text.getvalue()


def value_of(config: ConfigDict, result: Result | None) -> float | None:
    """The study's metric of a member; None if it has diverged, failed or not ended."""
    if result is None or result.state != FINISHED:
        return None
    if config.study.metric not in result.summary:
        known = ", ".join(name for name in result.summary if "/" in name)
        raise InputError(f"study.metric={config.study.metric!r}: members report only {known}")
    return result.summary[config.study.metric]


def mean_and_std(values: list[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation.

    The deviation is None for one value; both are None for an empty list or any None.
    """
    if not values or None in values:
        return {"mean": None, "std": None}
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


def metric_in_percent(config: ConfigDict) -> str:
    """Label of the study's metric in tables and figures."""
    return f"{config.study.metric}, %"


def format_mean_std(found: Mapping[str, float | None], otherwise: str) -> str:
    """Format the result of `mean_and_std` in percent; `otherwise` if there is no mean."""
    if found["mean"] is None:
        return otherwise
    deviation = "" if found["std"] is None else f" ± {100 * found['std']:.2f}"
    return f"{100 * found['mean']:.2f}{deviation}"
