"""What a study is made of: its members, what became of them, and what it reports."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import Faults, InputError

FINISHED, DIVERGED, FAILED, HANDED_OVER = "finished", "diverged", "failed", "handed over"


class Member(NamedTuple):
    """A training run of a study.

    name: of its workdir below that of the study.
    overrides: of the study's config, as after `--config.`: {"optimizer.peak_lr": "0.01"}.
    """

    name: str
    overrides: Mapping[str, str]


class Result(NamedTuple):
    """What became of a member.

    state: FINISHED; DIVERGED, its loss was not finite; FAILED otherwise; HANDED_OVER to a launcher
      and not known to have ended.
    summary: its summary.json, if it is finished.
    error: what it said last, if it is not.
    """

    state: str
    summary: Mapping[str, Any] = {}
    error: str = ""


class Report(NamedTuple):
    """What a study has come to, so far.

    columns, rows: a table, the members first.
    values: for study.json.
    complete: whether it has all that it was made for.
    files: {name: content} of what else is written.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    values: Mapping[str, Any]
    complete: bool
    files: Mapping[str, bytes] = {}


class Study(NamedTuple):
    """A study, as functions of its config and of the results so far, {name of a member: result}.

    sets: config -> keys that members get their values of from the study, not from the user.
    check: raises InputError if the config is none for this study.
    members: all that are known so far, those with a result included, in the order of running.
    report: see `Report`.
    """

    sets: Callable[[ConfigDict], Collection[str]]
    check: Callable[[ConfigDict], None]
    members: Callable[[ConfigDict, Mapping[str, Result]], list[Member]]
    report: Callable[[ConfigDict, Mapping[str, Result]], Report]


def check_report(config: ConfigDict, faults: Faults) -> None:
    """Adds to `faults` what is wrong with the keys by which any study reports."""
    study = config.study
    if study.seeds < 1:
        faults.append(f"study.seeds={study.seeds}: needs a positive int")
    name, _, kind = study.metric.partition("/")
    if kind not in ("top1", "top5"):  # told now, not when the first member has ended
        faults.append(f"study.metric={study.metric!r}: needs an accuracy, such as {name}/top1")


def value_of(config: ConfigDict, result: Result | None) -> float | None:
    """The metric that counts; None of a member that has none, as it diverged or has not ended."""
    if result is None or result.state != FINISHED:
        return None
    if config.study.metric not in result.summary:
        known = ", ".join(name for name in result.summary if "/" in name)
        raise InputError(f"study.metric={config.study.metric!r}: a member has {known}")
    return result.summary[config.study.metric]


def mean_and_std(values: list[float]) -> dict[str, float | None]:
    """Of a sample, of which one value has no deviation; of none, and with a None, neither is there.

    None is what was not finite.
    """
    if not values or None in values:
        return {"mean": None, "std": None}
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


def metric_in_percent(config: ConfigDict) -> str:
    """How tables and figures call the metric that counts."""
    return f"{config.study.metric}, %"


def format_mean_std(found: Mapping[str, float | None], otherwise: str) -> str:
    """What `mean_and_std` found, in per cent, for a table; `otherwise` where it found nothing."""
    if found["mean"] is None:
        return otherwise
    deviation = "" if found["std"] is None else f" ± {100 * found['std']:.2f}"
    return f"{100 * found['mean']:.2f}{deviation}"
