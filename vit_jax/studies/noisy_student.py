"""Noisy Student: a teacher labels images, and a noised student learns from them; again.

    teacher_seed_0             trained on data.split
    teacher_labels_seed_0      its labels of study.unlabelled, by the command `label`
    student_seed_0             trained on both, `study.ratio` images with pseudo labels for each
                               labelled one
    student_labels_seed_0 ...  if another stage follows

An entry of `study.stages` names a stage and the keys that it changes:

    "student: model.dropout=0.5; data.ops=inception_crop|randaugment(2, 27)|flip"

The first is the teacher. A later one may also set study.ratio, study.confidence, study.per_class
and study.soft_labels, for the pseudo labels that it learns from. With study.ratio=0 it learns from
none: it goes on from the weights of the stage before, on labelled images only. Every stage can be
interrupted and continued; the labels are files, which a repeated command uses again.

Source: Xie et al. 2019 (arXiv:1911.04252), algorithm 1.
"""

import functools
import math
import statistics

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults
from vit_jax.config import key
from vit_jax.studies.engine import Found, Member, Results, Study, seeded
from vit_jax.studies.tables import Report, best_first

_OF_LABELS = ("study.confidence", "study.per_class", "study.soft_labels")


class NoisyStudent(Study):
    """See the module."""

    stages: tuple[str, ...] = key((), 'runs by name, "name: key=value; key=value"', form="entries")

    own_keys = ("init_from", "init_head", "data.mix", "data.soft_labels")

    @functools.cached_property
    def _settings(self) -> dict[str, ConfigDict]:
        """{stage: its section `study`}."""
        stages = self.entries["stages"]
        return {name: self.config_of(keys).study for (name,), keys in stages.items()}

    def check_own(self, faults: Faults) -> None:
        faults.need(len(self.stages) != 1, f"study.stages={self.stages}: has no student; needs "
                    "the teacher, then its students")  # fmt: skip
        for name, study in self._settings.items():
            faults.need(0 <= study.ratio < math.inf,
                        f"study.ratio={study.ratio}: needs at least 0, in {name}")  # fmt: skip
        unlabelled = self.config.study.unlabelled
        faults.need(unlabelled, f"study.unlabelled={unlabelled!r}: needs the images to label, NAME "
                    "or NAME@SPLIT")  # fmt: skip

    def members(self, results: Results) -> list[Member]:
        """Of every seed the stages and their labels, each after the one that it needs."""
        return [member for seed in self.all_seeds for member in self._chain(seed)]

    def _chain(self, seed: int) -> list[Member]:
        found: list[Member] = []
        before = after = ""  # names of the stage before, and of its run
        for (stage,), changes in self.entries["stages"].items():
            overrides, study = dict(changes), self._settings[stage]
            if before and not study.ratio:
                overrides |= {"init_from": f"{self.workdir}/{after}", "init_head": "kept"}
            elif before:
                labels = f"{before}_labels_seed_{seed}"
                how = {key: changes[key] for key in _OF_LABELS if key in changes}
                how |= {"init_from": f"{self.workdir}/{after}", "seed": str(seed)}
                found.append(Member(labels, how, {"labels_of": before}, after, "label"))
                share = study.ratio / (1 + study.ratio)
                overrides["data.mix"] = f"pseudo@{self.workdir}/{labels}/labels.npz={share:.6g}"
                overrides["data.soft_labels"] = str(study.soft_labels)
                after = labels
            found.append(seeded(f"{stage}_seed_{seed}", overrides, {"stage": stage}, seed, after))
            before, after = stage, found[-1].name
        return found

    def report(self, found: Found) -> Report:
        """A row for each stage: its accuracy, and what its labels came to, over the seeds."""
        rows = []
        for (stage,) in self.entries["stages"]:
            kept, right = (found.measure(metric, labels_of=stage)
                           for metric in ("labels/kept", "labels/top1"))  # fmt: skip
            rows.append({
                "stage": stage,
                self.label: found.measure(stage=stage),
                "images it labels": f"{statistics.fmean(kept.known):,.0f}" if kept.known else "-",
                "labels right, %": right if right.known else "-",
            })  # fmt: skip
        trained = [member for member in found.members if member.command == "train"]
        return Report(best_first(rows, self.label), best=found.best_of(trained))
