"""Noisy Student: a teacher labels pictures, and a noised student learns from them; again.

    teacher_seed_0             trained on data.split
    teacher_labels_seed_0      its labels of study.unlabelled, by the command `label`
    student_seed_0             trained on both, `study.ratio` pictures with pseudo labels for each
                               labelled one
    student_labels_seed_0 ...  if another stage follows

An entry of `study.stages` names a stage and the keys that it changes:

    "student: model.dropout=0.5; data.ops=inception_crop|randaugment(2, 27)|flip"

The first is the teacher. A later one may also set study.ratio, study.confidence, study.per_class
and study.soft_labels, for the pseudo labels that it learns from. With study.ratio=0 it learns from
none: it goes on from the weights of the stage before, on labelled pictures only. Every stage can be
interrupted and continued; the labels are files, which a repeated command uses again.

Source: Xie et al. 2019 (arXiv:1911.04252), algorithm 1.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.studies.members import (
    FINISHED,
    WORKDIR,
    Member,
    Report,
    Result,
    Study,
    check_evaluator,
    check_report,
    format_mean_std,
    mean_and_std,
    metric_in_percent,
    value_of,
    write_csv,
)

_FORM = 'needs "name: key=value; key=value"'
_FIRST = f"{_FORM}, the teacher first"
_OF_LABELS = ("study.confidence", "study.per_class", "study.soft_labels")
_SET = ("seed", "init_from", "init_head", "data.mix", "data.soft_labels")  # for the members


class Stage(NamedTuple):
    """A stage: its name and the keys that it changes."""

    name: str
    overrides: Mapping[str, str]


def parse_stages(texts: Sequence[str], key: str = "study.stages") -> list[Stage]:
    """Parse `study.stages`, or other entries of that form from the key `key`.

    Raises:
      InputError: lists all entries that are malformed or not unique.
    """
    stages, faults = [], Faults()
    for text in texts:
        name, colon, changes = text.partition(":")
        pairs = [change.partition("=") for change in changes.split(";") if change.strip()]
        overrides = {key.strip(): value.strip() for key, _, value in pairs}
        if not colon or not re.fullmatch(r"[\w.+-]+", name.strip()) or not all(overrides):
            faults.append(f"{key}: {text!r}: {_FORM}")
        elif len(overrides) < len(pairs):
            faults.append(f"{key}: {text!r}: sets a key twice; remove one")
        else:
            stages.append(Stage(name.strip(), overrides))
    names = [stage.name for stage in stages]
    faults.need(len({*names}) == len(names), f"{key}: two have one name; rename one")
    collect_faults(faults)
    return stages


def find_keys(config: ConfigDict) -> set[str]:
    """Keys that the study sets for its members."""
    return {*_SET, *(key for stage in parse_stages(config.study.stages) for key in stage.overrides)}


def check(config: ConfigDict) -> None:
    """Raise InputError if the section `study` does not describe a teacher and students."""
    study, faults = config.study, Faults()
    stages = faults.check(parse_stages, study.stages) or []
    faults.need(len(stages) != 1, f"study.stages={study.stages}: has no student; {_FIRST}")
    faults.need(study.stages, f"study.stages: is empty; {_FIRST}")
    for stage in stages:
        wrong = sorted({*stage.overrides} & {*_SET})
        faults.need(not wrong, f"study.stages: {stage.name} sets {', '.join(wrong)}, which the "
                    "study sets; leave it out")  # fmt: skip
        ratio = faults.check(_ratio, config, stage)
        faults.need(
            ratio is None or 0 <= ratio < math.inf, f"study.ratio={ratio}: needs at least 0"
        )
    faults.need(study.unlabelled, f"study.unlabelled={study.unlabelled!r}: needs the pictures to "
                "label, NAME or NAME@SPLIT")  # fmt: skip
    faults.need(0 <= study.confidence < 1, f"study.confidence={study.confidence}: needs a number "
                "from 0, less than 1")  # fmt: skip
    faults.need_positive("study.per_class", study.per_class)
    faults.need(not config.data.mix, f"data.mix={config.data.mix!r}: the study sets it; leave it "
                "out")  # fmt: skip
    check_report(config, faults)
    check_evaluator(config, faults)
    collect_faults(faults)


def _ratio(config: ConfigDict, stage: Stage) -> float:
    """`study.ratio` of a stage."""
    text = stage.overrides.get("study.ratio", str(config.study.ratio))
    try:
        return float(text)
    except ValueError:
        raise InputError(f"study.stages: {stage.name}: study.ratio={text}: is no number") from None


def _seeds(config: ConfigDict) -> Sequence[int]:
    return range(config.seed, config.seed + config.study.seeds)


def _chain(config: ConfigDict, seed: int) -> list[Member]:
    """The members of one seed, in the order in which they need each other."""
    stages = parse_stages(config.study.stages)
    members: list[Member] = []
    for i, stage in enumerate(stages):
        overrides = {**stage.overrides, "seed": str(seed)}
        teacher = f"{WORKDIR}/{members[-1].name}" if i else ""
        ratio = _ratio(config, stage)
        if i and not ratio:
            overrides |= {"init_from": teacher, "init_head": "kept"}
        elif i:
            labels = f"{stages[i - 1].name}_labels_seed_{seed}"
            of_labels = {key: overrides[key] for key in _OF_LABELS if key in overrides}
            how = {"init_from": teacher, "seed": str(seed), **of_labels}
            members.append(Member(labels, how, "label"))
            soft = of_labels.get("study.soft_labels", str(config.study.soft_labels))
            overrides["data.soft_labels"] = soft
            share = ratio / (1 + ratio)
            overrides["data.mix"] = f"pseudo@{WORKDIR}/{labels}/labels.npz={share:.6g}"
        members.append(Member(f"{stage.name}_seed_{seed}", overrides))
    return members


def find_members(config: ConfigDict, results: Mapping[str, Result]) -> list[Member]:
    """Of every seed the members with a result, and the next one if all before have finished."""
    found = []
    for seed in _seeds(config):
        for member in _chain(config, seed):
            found.append(member)
            if member.name not in results or results[member.name].state != FINISHED:
                break
    return found


def report(config: ConfigDict, results: Mapping[str, Result]) -> Report:
    """A row for each stage: its accuracy, and what its labels came to, over the seeds."""
    stages = parse_stages(config.study.stages)
    rows, values = [], []
    for stage in stages:
        runs = [results.get(f"{stage.name}_seed_{seed}") for seed in _seeds(config)]
        labels = [results.get(f"{stage.name}_labels_seed_{seed}") for seed in _seeds(config)]
        found = [value for run in runs if (value := value_of(config, run)) is not None]
        states = dict.fromkeys(run.state for run in runs if run is not None)
        measured = mean_and_std(found)
        kept, right = (_mean_of(labels, key) for key in ("labels/kept", "labels/top1"))
        rows.append([
            stage.name,
            format_mean_std(measured, ", ".join(states) or "waits"),
            "-" if kept is None else f"{kept:,.0f}",
            "-" if right is None else f"{100 * right:.2f}",
        ])  # fmt: skip
        values.append({"stage": stage.name, **measured, "values": found,
                       "pictures_kept": kept, "labels_right": right})  # fmt: skip
    ended = [
        ([stage.name, seed], results[name])
        for stage in stages
        for seed in _seeds(config)
        if (name := f"{stage.name}_seed_{seed}") in results
    ]
    return Report(
        columns=["stage", metric_in_percent(config), "pictures it labels", "labels right, %"],
        rows=rows,
        values={"metric": config.study.metric, "stages": values},
        complete=all(len(value["values"]) == config.study.seeds for value in values),
        files={"study.csv": write_csv(["stage", "seed"], ended).encode()},
    )


def _mean_of(results: Sequence[Result | None], key: str) -> Any:
    """Mean of a number in the summaries that have it; None if none has."""
    found = [result.summary[key] for result in results if result and key in result.summary]
    return sum(found) / len(found) if found else None


STUDY = Study(find_keys, check, find_members, report)
