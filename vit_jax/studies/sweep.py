"""Every combination of values of some keys, each a run: --sweep=KEY=VALUE,VALUE, given again.

`study.sweep` has a text for each key, as `--sweep` takes it: "optimizer.peak_lr=1e-3,3e-3". Commas
within brackets or quotes belong to a value: "data.mean=[0.5,0.5,0.5],[0,0,0]". `seed` is a key like
others, but that the report gives mean and deviation over its values. Beside the report is
`study.csv`, a row for each run.
"""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import flatten
from vit_jax.config.text import apply_overrides
from vit_jax.errors import Faults, collect_faults
from vit_jax.studies.members import (
    DIVERGED,
    FINISHED,
    Member,
    Report,
    Result,
    Study,
    check_evaluator,
    check_report,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    name_member,
    value_of,
    write_csv,
)

_FORM = "needs KEY=VALUE,VALUE, e.g. optimizer.peak_lr=1e-3,3e-3"
_VALUE = r"""(?:[^,()\[\]{}"']|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|"[^"]*"|'[^']*')+"""


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """{key: its values} of `study.sweep`.

    Raises:
      InputError: naming all that are not of the form, or give a key or a value twice.
    """
    sweep: dict[str, list[str]] = {}
    faults = Faults()
    for text in texts:
        key, _, rest = (part.strip() for part in text.partition("="))
        values = [value.strip() for value in re.findall(_VALUE, rest)]
        is_whole = re.fullmatch(rf"{_VALUE}(,{_VALUE})*", rest) is not None
        if not (key and is_whole and all(values)):
            faults.append(f"--sweep={text}: {_FORM}")
        elif key in sweep:
            faults.append(f"--sweep={text}: {key} is given twice; give all its values at once")
        elif len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            faults.append(f"--sweep={text}: gives {twice} twice; leave one out")
        else:
            sweep[key] = values
    collect_faults(faults)
    return sweep


def find_keys(config: ConfigDict) -> set[str]:
    """The keys that are swept."""
    return set(parse_sweep(config.study.sweep))


def check(config: ConfigDict) -> None:
    """Raises InputError if the config's `study` does not describe a sweep."""
    faults = Faults()
    if not config.study.sweep:
        faults.append(f"study.sweep: has nothing; {_FORM}")
    elif faults.check(parse_sweep, config.study.sweep) is not None:
        names = [member.name for member in find_members(config, {})]
        faults.need(len(set(names)) == len(names), "study.sweep: two runs would have the workdir "
                    "of one, as their values differ in signs only; leave one out")  # fmt: skip
        faults += _find_equal_values(config)
    check_report(config, faults)
    check_evaluator(config, faults)
    collect_faults(faults)


def _find_equal_values(config: ConfigDict) -> list[str]:
    """A fault for each value of a key that another spelling gives too, such as 1e-3 and 0.001."""
    faults = []
    for key, texts in parse_sweep(config.study.sweep).items():
        first: dict[Any, str] = {}
        for text in texts:
            own = copy.deepcopy(config)
            if not apply_overrides(own, [(key, text)]):  # members report faults of values
                same = first.setdefault(flatten(own)[key], text)
                if same != text:
                    faults.append(f"study.sweep: {key}={same} and {text} are equal; leave one out")
    return faults


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """Every combination with the first seed, then every one with the second, and so on."""
    del results  # none waits for another
    members = [[_member(config, {**row, **seed}) for row in _rows(config)]
               for seed in _seeds(config)]  # fmt: skip
    return list(itertools.chain.from_iterable(members))


def _rows(config: ConfigDict) -> list[dict[str, str]]:
    """{key: value} of each combination but for the seed."""
    sweep = parse_sweep(config.study.sweep)
    sweep.pop("seed", None)
    return [dict(zip(sweep, row, strict=True)) for row in itertools.product(*sweep.values())]


def _seeds(config: ConfigDict) -> list[dict[str, str]]:
    """{"seed": value} of each seed; one {} where it is not swept."""
    values = parse_sweep(config.study.sweep).get("seed")
    return [{}] if values is None else [{"seed": value} for value in values]


def _member(config: ConfigDict, overrides: Mapping[str, str]) -> Member:
    leaves = [key.rpartition(".")[2] for key in parse_sweep(config.study.sweep)]
    parts = []
    for key, value in overrides.items():
        leaf = key.rpartition(".")[2]
        parts.append(f"{leaf if leaves.count(leaf) == 1 else key}_{value}")
    return Member(name_member("__".join(parts)), overrides)


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each combination, over its seeds: the best first, those that diverged behind."""
    table = []  # of (rank, line, its content for study.json, its members)
    keys = list(parse_sweep(config.study.sweep))
    shown = [key for key in keys if key != "seed"]
    for row in _rows(config):
        members = [_member(config, {**row, **seed}) for seed in _seeds(config)]
        ended = [results[member.name] for member in members if member.name in results]
        found = [value_of(config, result) for result in ended]
        values = [value for value in found if value is not None]
        measured = mean_and_std(values)
        otherwise = ", ".join(dict.fromkeys(result.state for result in ended)) or "waits"
        some = f" ({len(values)} of {len(members)})" * (0 < len(values) < len(members))
        line = [*(row[key] for key in shown), format_mean_std(measured, otherwise) + some]
        run = {"overrides": row, **measured, "values": values}
        diverged = DIVERGED in (result.state for result in ended)
        rank = (not values, diverged, -(measured["mean"] or 0.0))
        table.append((rank, line, run, [member.name for member in members]))
    table.sort(key=lambda row: row[0])
    _, lines, runs, names = map(list, zip(*table, strict=True))
    everyone = find_members(config, {})
    have_ended = [m for m in everyone if m.name in results]
    states = [results[member.name].state for member in have_ended]
    is_over = len(states) == len(everyone) and {*states} <= {FINISHED, DIVERGED}
    csv = write_csv(keys, [([member.overrides[key] for key in keys], results[member.name])
                           for member in have_ended])  # fmt: skip
    return Report(
        columns=[*shown, metric_in_percent(config)],
        rows=lines,
        values={"metric": config.study.metric, "combinations": runs},
        complete=is_over and any(run["values"] for run in runs),
        files={"study.csv": csv.encode()},
        best=names[0] if len(runs) > 1 and runs[0]["values"] else (),
    )


STUDY = Study(find_keys, check, find_members, report)
