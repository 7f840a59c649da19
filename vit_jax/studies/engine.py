"""The engine of studies: what a study declares, and what all studies share.

A study is a subclass of `Study`, a frozen dataclass whose fields are the keys `study.*` that it
reads, and one line in STUDIES. A key with `form="entries"` has texts "name: key=value; key=value",
and in `cells` two names, "row | column". A study declares functions of the results so far,
without side effects:

    members   its runs, each with its config, its place in the tables, and the runs before it;
              `choose` picks the best of some that have ended, and other members follow from that
    report    the rows of its table, whose cells are `Measured` over seeds

The engine checks the keys, never chooses by test data, reads each run's metrics at `study.point`,
and writes the table, `study.json` and `study.csv`; running.py starts the members.
"""

import copy
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, collect_faults, few, nearest
from vit_jax.config import STUDIES, Part, Settings, eval_splits
from vit_jax.config.metric_names import declared_metrics, is_named
from vit_jax.config.text import apply_overrides
from vit_jax.insight.tables import as_csv
from vit_jax.studies.tables import DIVERGED, FINISHED, Best, Measured, Report

T = TypeVar("T")

_IN_CSV = ("num_params", "images_seen", "exaflops")  # of a summary, beside the metrics
_LONGEST_NAME = 255  # bytes of a file's name, on nearly every disk
_DIGITS = 16  # of the digest in a shortened name

Entries = dict[tuple[str, ...], dict[str, str]]


class Member(NamedTuple):
    """A training run of a study, or another command that writes WORKDIR/summary.json.

    name: name of its workdir, a folder in the workdir of the study.
    overrides: changes to the study's config, as after `--config.`: {"optimizer.peak_lr": "0.01"}.
    place: its place in tables and in study.csv: {"row": "1-D", "seed": 0}.
    after: name of the member that must finish first; "": none.
    command: train, or label.
    """

    name: str
    overrides: Mapping[str, str]
    place: Mapping[str, Any] = {}
    after: str = ""
    command: str = "train"


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


Results = Mapping[str, Result]  # {name of a member: its result}


class Metric(NamedTuple):
    """A metric that a study reads.

    key: of `study.*`, which names it in errors.
    name: "evaluator/metric".
    config: of the members that report it.
    chooses: whether members are chosen by it.
    """

    key: str
    name: str
    config: ConfigDict
    chooses: bool = False


class Study(Part):
    """The base of all studies; see the module.

    config: of every member, before its overrides.
    workdir: of the study; members are folders in it.
    """

    config: ClassVar[ConfigDict]  # both set by `of`
    workdir: ClassVar[str]

    may_be_empty: ClassVar[Sequence[str]] = ()  # of the lists of entries
    flag: ClassVar[str] = "--config."  # by which a user sets its members' keys

    @staticmethod
    def of(config: ConfigDict, workdir: str = "WORKDIR") -> "Study":
        """The study that the section `study` of a config describes."""
        study = STUDIES.make(config.study)
        vars(study).update(config=config, workdir=workdir)
        return study

    @property
    def metric(self) -> str:
        """ "evaluator/metric" of the report; higher is better."""
        return self.config.study.metric

    # What a study declares.

    def members(self, results: Results) -> list[Member]:
        """All members that follow from the results, in the order of running."""
        raise NotImplementedError

    def report(self, found: "Found") -> Report:
        """The table of the results so far."""
        raise NotImplementedError

    @property
    def own_keys(self) -> Sequence[str]:
        """Keys that it sets for its members, other than those in its entries and the seed."""
        return ()

    def metrics(self) -> list[Metric]:
        """The metrics that it reads."""
        return [Metric("metric", self.metric, self.config)]

    def check_own(self, faults: Faults) -> None:
        """Adds faults of its own keys."""

    # What it may use.

    @property
    def all_seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.study.seeds)

    @property
    def label(self) -> str:
        """Column of the study's metric."""
        return f"{self.metric}, %"

    @functools.cached_property
    def entries(self) -> dict[str, Entries]:
        """{key: its entries} of the lists that the study reads; raises InputError for faults."""
        faults = Faults()
        keys = [key for key, declared in self.declared().items() if declared.form == "entries"]
        found = {key: faults.check(parse_entries, key, getattr(self, key)) or {} for key in keys}
        collect_faults(faults)
        return found

    def config_of(
        self, overrides: Mapping[str, str], faults: list[str] | None = None
    ) -> ConfigDict:
        """The config of a member; faults of its overrides are added to `faults`."""
        own = copy.deepcopy(self.config)  # keeps the types of keys that are None
        found = apply_overrides(own, list(overrides.items()), self.flag)
        if faults is not None:
            faults += found
        return own

    def choose(self, results: Results, candidates: Mapping[T, Member], metric: str) -> T | None:
        """The key of the candidate with the best metric, the first of equally good ones.

        None until all have ended, or if all have diverged; of one candidate its key.
        """
        if len(candidates) == 1:
            return next(iter(candidates))
        ended = {key: results.get(member.name, Result("")) for key, member in candidates.items()}
        if not {result.state for result in ended.values()} <= {FINISHED, DIVERGED}:
            return None
        known = {key: value for key, result in ended.items()
                 if (value := self.value_of(result, metric)) is not None}  # fmt: skip
        return max(known, key=known.__getitem__, default=None)

    def value_of(self, result: Result | None, metric: str) -> float | None:
        """A metric of a member; None if it has not finished, or lacks the metric."""
        if result is None or result.state != FINISHED:
            return None
        return self.numbers_of(result).get(metric)

    def numbers_of(self, result: Result) -> Mapping[str, Any]:
        """The summary of a member, with the metrics of the step that counts."""
        if self.config.study.point == "last" or "best" not in result.summary:
            return result.summary
        kept = {key: value for key, value in result.summary.items() if "/" not in key}
        return kept | result.summary["best"]

    # What the engine does with it.

    @property
    def sets(self) -> set[str]:
        """Keys that the study sets for its members, so the user may not."""
        entries = [changes for found in self.entries.values() for changes in found.values()]
        return {*self.own_keys, *(key for changes in entries for key in changes)}

    def ready(self, results: Results) -> list[Member]:
        """The members that can run, or have run."""
        finished = {name for name, result in results.items() if result.state == FINISHED}
        return [m for m in self.members(results) if not m.after or m.after in finished]

    def all_members(self) -> list[Member]:
        """All members, as if each finished when its turn comes, equally well."""
        equal = {"step": 1} | {metric.name: 0.5 for metric in self.metrics()}
        done = Result(FINISHED, equal | {"best": equal})
        results: dict[str, Result] = {}
        while new := [m for m in self.members(results) if m.name not in results]:
            results |= {member.name: done for member in new}
        return self.members(results)

    def say_axes(self) -> str:
        """The differences of its runs: "peak_lr: 1e-3, 3e-3; seed: 0, 1"."""
        places = [member.place for member in self.all_members()]
        axes = {key: dict.fromkeys(str(place.get(key)) for place in places) for key in places[0]}
        return "; ".join(f"{key}: {few(axis)}" for key, axis in axes.items() if len(axis) > 1)

    def check_all(self) -> None:
        """Raise InputError if the config does not describe such a study."""
        faults = Faults()
        if faults.check(lambda: self.entries) is None:
            collect_faults(faults)
        for key, entries in self.entries.items():
            faults.need(entries or key in self.may_be_empty,
                        f"study.{key}: is empty; {_form(key)}")  # fmt: skip
            wrong = {name for changes in entries.values() for name in changes}
            wrong &= {"seed", *self.own_keys}
            faults.need(not wrong, f"study.{key}: must not set {', '.join(sorted(wrong))}, which "
                        "the study sets; leave it out")  # fmt: skip
        self.check_own(faults)
        self._check_metrics(faults)
        collect_faults(faults)
        members = self.all_members()
        for member in members:
            self.config_of(member.overrides, faults)
        names = [member.name for member in members]
        faults += [f"study: two runs have the workdir {name}; rename one, or leave it out"
                   for name in names if names.count(name) > 1]  # fmt: skip
        collect_faults(list(dict.fromkeys(faults)))

    def _check_metrics(self, faults: Faults) -> None:
        """Adds faults of metrics that members will not report, and of choices by test data."""
        best = self.config.checkpoint.keep_best
        faults.need(
            self.config.study.point != "best" or best is not None,
            "study.point='best': needs --config.checkpoint.keep_best=METRIC, which finds that step",
        )
        found = []
        for metric in self.metrics():
            evals, name = metric.config.evals, metric.name.partition("/")[0]
            where = f"study.{metric.key}={self.config.study[metric.key]!r}"
            if name not in evals:
                faults.append(f"{where}: no such evaluator; {nearest(name, list(evals))}")
                continue
            number = len(faults)
            known = faults.check(accuracies, metric.config, name)
            if len(faults) > number:  # the evaluator has faults of its own
                continue
            faults.need(known is None or is_named(metric.name, known),
                        f"{where}: needs an accuracy; known: {', '.join(known or ())}")  # fmt: skip
            finder = evals.get((metric.config.checkpoint.keep_best or "").partition("/")[0])
            if self.config.study.point == "best" and finder is not None:
                faults.need(evals[name].every == finder.every, f"{where}: evals.{name}.every="
                            f"{evals[name].every!r} must be {finder.every!r}, as of the metric "
                            "that finds the best step, so that it is known there")  # fmt: skip
            settings = Settings.of(metric.config)
            splits = {*eval_splits(settings.data, settings.evals[name]).values()}
            found.append((metric, where, splits))
        for chooser, where, splits in found:
            for other, _, reported in found:
                is_same = (chooser.name, chooser.config) == (other.name, other.config)
                faults.need(not chooser.chooses or is_same or not splits & reported,
                            f"{where}: chooses by the data of study.{other.key}={other.name!r}, "
                            "which the study reports; choose by other data")  # fmt: skip


class Found:
    """The members of a study with their results so far."""

    def __init__(self, study: Study, results: Results):
        self.study, self.results, self.members = study, results, study.members(results)

    def at(self, **place: Any) -> list[Member]:
        """The members at a place."""
        return [member for member in self.members if place.items() <= member.place.items()]

    def measure(self, metric: str = "", *, note: str = "", **place: Any) -> Measured:
        """A metric of the members at a place, by default the study's."""
        metric = metric or self.study.metric
        ended = [self.results.get(member.name) for member in self.at(**place)]
        values = [self.study.value_of(result, metric) for result in ended]
        states = [f"without {metric}" if result.state == FINISHED else result.state
                  for result in ended if result is not None]  # fmt: skip
        return Measured(values, states, note)

    def best_of(self, members: Iterable[Member], metric: str = "") -> Best:
        """The best place of `members` by a metric; none if there is only one place."""
        places = [*{repr(place): place for m in members if (place := without_seed(m))}.values()]
        cells = [self.measure(metric, **place) for place in places]
        if len(places) < 2:
            return Best()
        best = min(range(len(places)), key=lambda i: cells[i].rank)
        near = [p for i, p in enumerate(places) if i != best and cells[i].is_near(cells[best])]
        return Best(self.measured(self.at(**places[best]), metric), near)

    def measured(self, members: Iterable[Member], metric: str = "") -> list[str]:
        """The names of the `members` that have finished, with the metric."""
        value_of, metric = self.study.value_of, metric or self.study.metric
        return [m.name for m in members if value_of(self.results.get(m.name), metric) is not None]

    def csv(self) -> str:
        """A row for each training run that has ended: its place, state and summary."""
        ended = [(m, self.results[m.name]) for m in self.members
                 if m.name in self.results and m.command == "train"]  # fmt: skip
        numbers_of = self.study.numbers_of
        rows = [{"member": m.name, **m.place, "state": result.state, **numbers_of(result)}
                for m, result in ended]  # fmt: skip
        places = dict.fromkeys(key for member, _ in ended for key in member.place)
        metrics = dict.fromkeys(key for row in rows for key in row if "/" in key)
        columns = ["member", *places, "state", *metrics, *_IN_CSV]
        return as_csv([columns, *([row.get(key) for key in columns] for row in rows)]).decode()


def without_seed(member: Member) -> dict[str, Any]:
    """The place of a member in tables, over its seeds."""
    return {key: value for key, value in member.place.items() if key != "seed"}


def seeded(
    name: str, changes: Mapping[str, str], place: Mapping[str, Any], seed: int, after: str = ""
) -> Member:
    """A training run with a seed."""
    return Member(name, {**changes, "seed": str(seed)}, {**place, "seed": seed}, after)


def join_name(*parts: Any) -> str:
    """A member's name made of `parts`, without empty ones: a folder name that every disk takes.

    A name longer than 255 bytes is cut, and a digest of the whole is added.
    """
    name = re.sub(r"[^\w.+-]+", "_", "__".join(str(part) for part in parts if part != ""))
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    kept = name.encode()[: _LONGEST_NAME - _DIGITS - 2].decode(errors="ignore")
    return f"{kept}__{digest}"


def parse_changes(text: str) -> dict[str, str]:
    """Parse "key=value; key=value"; raises ValueError for another form, or a key given twice."""
    pairs = [pair.partition("=") for pair in text.split(";") if pair.strip()]
    changes = {key.strip(): value.strip() for key, _, value in pairs}
    if len(changes) < len(pairs) or not all(changes) or not all(equals for _, equals, _ in pairs):
        raise ValueError
    return changes


def parse_entries(key: str, texts: Sequence[str]) -> Entries:
    """{names: changes} of the entries of `study.{key}`.

    Raises:
      InputError: lists all entries that are malformed or not unique.
    """
    found: Entries = {}
    faults = Faults()
    for text in texts:
        head, colon, changes = text.partition(":")
        names = tuple(name.strip() for name in head.split("|"))
        try:
            if not colon or not all(names) or len(names) != 1 + (key == "cells") or names in found:
                raise ValueError
            found[names] = parse_changes(changes)
        except ValueError:
            faults.append(f"study.{key}: {text!r}: {_form(key)}, each name and key once")
    collect_faults(faults)
    return found


def _form(key: str) -> str:
    return f'needs "{"row | column" if key == "cells" else "name"}: key=value; key=value"'


def accuracies(config: ConfigDict, name: str) -> list[str] | None:
    """The metrics of the evaluator `name` that a study may report; None: they are not known yet."""
    settings, faults = Settings.read_open(config)
    collect_faults([fault for fault in faults if fault.startswith(f"evals.{name}.")])
    found = declared_metrics(name, settings.evals[name], settings.has_average)
    return None if found is None else [m for m, better in found.items() if better == "higher"]
