"""Entries of `evals`: evaluators with a name. An entry's keys are the fields of its evaluator.

class Rank(SplitEvaluator):
    num_images: int = key(25_600, "images to take of a larger split", within="[2, inf)")

    def bind(self, inputs):
        ...

EVALUATORS["rank"] = Rank
c.evals.own = config.rank(split="test", every="1 epochs", num_images=1000)
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, collect_faults, nearest
from vit_jax.config.node import Node
from vit_jax.config.parts import BATCH, Part, Registry, add_keys, key
from vit_jax.config.plugins import warn_of_removal

Better = Literal["higher", "lower", "neither"]  # which values of a metric are better


class Evaluator(Part):
    """A kind of entry in `evals`; the keys here are those by which a run opens its data.

    learns_classes: whether it takes data with any classes, since it learns them from features, maps
      them or needs none; all others need data with the model's classes.
    output: the method of the model that it calls.
    multi_label: whether it evaluates images with several labels instead of one; None: either.
    reads_captions: whether it needs the captions of its splits.
    shows_worth: whether its figures show what the features are worth.
    measures_rank: whether it measures the rank of the features, by which a collapse is seen.
    shows_images: whether it gives its prediction for each image to whoever asks (`EvalInputs.see`).
    """

    every: int = key(
        ..., "duration between two evaluations; the last step has one too", form="interval"
    )
    ops: str = key("", "host ops; '': none, or for a model without a run its source's", form="ops")
    batch_size: int | None = key(
        None, "images, over all devices; None: global_batch_size", within=BATCH
    )
    data_name: str | None = key(None, "data set; None: data.name")
    data_dir: str | None = key(None, "its folder; None: data.data_dir")

    learns_classes: ClassVar[bool] = False
    output: ClassVar[str] = "__call__"
    multi_label: ClassVar[bool | None] = False
    shows_images: ClassVar[bool] = False
    shows_worth: ClassVar[bool] = True
    reads_captions: ClassVar[bool] = False
    measures_rank: ClassVar[bool] = False

    @property
    def measures_start(self) -> bool:
        """Whether a new run also evaluates before its first step: the row has step 0."""
        return False

    def reports(self) -> Mapping[str, Better] | None:
        """The metrics that it may report, and which of their values are better.

        "neither" marks counts, settings and other values without a better direction. The data may
        rule some metrics out: see `lacking`. None: the names are known after the first evaluation
        only.
        """
        return self.reports_before()

    def reports_before(self) -> Mapping[str, Better] | None:
        """The result of the method `metrics` that plug-ins of earlier versions have; None: there is
        none.
        """
        for cls in type(self).__mro__:
            if callable(method := vars(cls).get("metrics")):
                warn_of_removal("metrics()", "reports()")
                return method(self)
        return None

    def lacking(self, sources: Mapping[str, Any]) -> Mapping[str, str]:
        """{metric: why} for each of `reports` that the data rule out.

        Args:
          sources: {key of the entry: `Source`} for the splits that it names.
        """
        return {}

    def bind(self, inputs: Any) -> Callable[[Any], dict[str, float]]:
        """The function that measures a state: {metric: value}; all processes call it.

        It reads only `params` and `model_state` of the state, and counts every example once.

        Args:
          inputs: the `EvalInputs` of the entry.

        Raises:
          InputError: the data, the model and the keys do not fit together; names the key.
        """
        raise NotImplementedError


class SplitEvaluator(Evaluator):
    """An evaluator that passes over one split."""

    split: str = key(..., "split to evaluate; own images: 'val?' is left out if it is not there")


EVALUATORS: Registry[Evaluator] = Registry(
    "type",
    Evaluator,
    {
        "classification": "vit_jax.evaluators.classification:Classification",
        "real": "vit_jax.evaluators.real:Real",
        "mapped": "vit_jax.evaluators.mapped:Mapped",
        "fewshot": "vit_jax.evaluators.fewshot:FewShot",
        "knn": "vit_jax.evaluators.knn:Knn",
        "linear_probe": "vit_jax.evaluators.linear_probe:LinearProbe",
        "multilabel": "vit_jax.evaluators.multilabel:MultiLabel",
        "rank": "vit_jax.evaluators.rank:Rank",
        "reconstruction": "vit_jax.evaluators.reconstruction:ReconstructionLoss",
        "patch_features": "vit_jax.evaluators.patch_features:PatchFeatures",
        "segmentation": "vit_jax.evaluators.dense_probe:Segmentation",
        "depth": "vit_jax.evaluators.dense_probe:Depth",
        "zeroshot": "vit_jax.evaluators.zero_shot:ZeroShot",
        "retrieval": "vit_jax.evaluators.retrieval:Retrieval",
    },
)


def make_entry(kind: str, /, **values: Any) -> ConfigDict:
    """Make an entry of `evals` with every key, typed and locked; `kind`: its evaluator.

    Raises:
      InputError: a key is unknown, missing or of another type.
    """
    known = EVALUATORS.find(kind).declared()
    faults = [f"{k}: no such key; {nearest(k, list(known))}" for k in values if k not in known]
    faults += [f"{k}: missing; {kind} needs it" for k, declared in known.items()
               if declared.default is ... and k not in values]  # fmt: skip
    entry = Node({"type": kind})
    add_keys(entry, known)
    for k in values.keys() & known.keys():
        try:
            entry[k] = tuple(values[k]) if isinstance(values[k], list) else values[k]
        except TypeError:
            faults.append(f"{k}={values[k]!r}: needs a value of type {known[k].kind.__name__}")
    collect_faults(faults, f"config.{kind}()")
    return entry.lock()


# Keys of an entry that hold the data to test on, each the stand-in for the other.
_TESTED = {"split": "test_split", "test_split": "split"}


def entry_like(kind: str, config: ConfigDict, entries: Iterable[ConfigDict]) -> ConfigDict:
    """Make an entry of the evaluator `kind` for `config`, which gives what it needs.

    The keys that all evaluators have, and keys without a default, are taken from the first of
    `entries` that has them, and `train_split` is else `data.split`. Others are None.

    Raises:
      InputError: there is no such evaluator.
    """
    known, common = EVALUATORS.find(kind).declared(), Evaluator.declared()

    def is_optional(entry: ConfigDict) -> bool:
        return any(str(value).endswith("?") for value in entry.values())

    others = sorted(entries, key=is_optional)
    entry = Node({"type": kind})
    add_keys(entry, known)
    for k in known:
        if k in common or known[k].default is ...:
            found = [e[name] for e in others for name in (k, _TESTED.get(k)) if name in e]
            entry[k] = next(iter(found), config.data.split if k == "train_split" else entry[k])
    return entry.lock()


def learning_kinds() -> list[str]:
    """Kinds of entries that need features of the model and no classes."""
    found = {kind: EVALUATORS.find(kind) for kind in EVALUATORS}
    return [k for k, e in found.items() if e.learns_classes and e.output == "features"]


def check_names(names: Iterable[str], faults: Faults) -> None:
    """Check the names of the entries of `evals`."""
    for name in names:
        taken = name in ("train", "time") or not re.fullmatch(r"\w+", name)
        faults.need(
            not taken,
            f"evals.{name}: choose a name of letters, digits and _, other than train and time, "
            "which name the run's own metrics",
        )
