"""The registry of evaluators; each declares the keys of its entries in `evals`.

An evaluator is one module with an `EVALUATOR`, and one line in EVALUATORS. Its module is imported
only when a config asks for it.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import Faults, InputError, nearest

Inputs = TypeVar("Inputs")  # `EvalInputs`; this room may not import it
Made = TypeVar("Made")


class Evaluator(NamedTuple, Generic[Inputs, Made]):
    """A kind of entry in `evals`.

    entry: makes an entry; its arguments are the keys of the entry, with their defaults.
    make: `EvalInputs` -> an object with `run(state) -> {name: float}`.
    check: raises InputError if values of a valid entry contradict each other; its faults start
      with the key, without the name of the entry.
    learns_classes: whether it takes data with any classes, since it learns them from features, maps
      them or needs none; all others need data with the model's classes.
    output: the method of the model that it calls; None: "features" if it learns classes, else
      "__call__".
    multi_label: whether it evaluates images with several labels instead of one; None: either.
    metrics: an entry -> {metric: "higher", "lower" or "neither"}, the metrics that it may report
      and which values are better, before there are data; None: only the object of `make` knows.
    """

    entry: Callable[..., ConfigDict]
    make: Callable[[Inputs], Made]
    check: Callable[[ConfigDict], None] = lambda entry: None
    learns_classes: bool = False
    output: str | None = None
    multi_label: bool | None = False
    metrics: Callable[[ConfigDict], Mapping[str, str]] | None = None


# kind -> the evaluator, or the module that declares it.
EVALUATORS: dict[str, Evaluator | str] = {
    "classification": "vit_jax.evaluators.classification",
    "real": "vit_jax.evaluators.real",
    "mapped": "vit_jax.evaluators.mapped",
    "fewshot": "vit_jax.evaluators.fewshot",
    "knn": "vit_jax.evaluators.knn",
    "linear_probe": "vit_jax.evaluators.linear_probe",
    "multilabel": "vit_jax.evaluators.multilabel",
    "rank": "vit_jax.evaluators.rank",
    "reconstruction": "vit_jax.evaluators.reconstruction",
    "patch_features": "vit_jax.evaluators.patch_features",
}

OPTIONAL_KEYS = {"batch_size": int, "data_name": str, "data_dir": str, "classes": tuple}
# Used when the data of an entry are opened.
REQUIRED_KEYS = ("every", "ops", "batch_size", "data_name", "data_dir")


def find_evaluator(kind: str) -> Evaluator:
    """The evaluator for entries of type `kind`.

    Raises:
      InputError: if there is none.
    """
    found = EVALUATORS.get(kind)
    if found is None:
        raise InputError(f"type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return importlib.import_module(found).EVALUATOR if isinstance(found, str) else found


def learning_kinds() -> list[str]:
    """Kinds of entries that learn classes from features."""
    found = {kind: find_evaluator(kind) for kind in EVALUATORS}
    return [k for k, e in found.items() if e.learns_classes and e.output is None]


def entry_keys(kind: str) -> set[str]:
    """Keys of an entry of type `kind`."""
    return {"type", *inspect.signature(find_evaluator(kind).entry).parameters}


def typed_entry(kind: str, values: dict[str, Any]) -> ConfigDict:
    """Make an entry of `evals`, locked; only the keys in OPTIONAL_KEYS may be None.

    Raises:
      InputError: if `values` lack some of REQUIRED_KEYS.
    """
    missing = [key for key in REQUIRED_KEYS if key not in values]
    if missing:
        raise InputError(
            f"type={kind!r}: its entries lack {', '.join(missing)}; the function that makes them "
            f"needs the arguments {', '.join(REQUIRED_KEYS)}, even if the evaluator does not use "
            "them"
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    optional = {key: placeholder(OPTIONAL_KEYS[key]) for key in OPTIONAL_KEYS if key in values}
    entry = ConfigDict({"type": kind} | values | optional)
    for key in optional:
        entry[key] = values[key]
    return entry.lock()


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the names of the entries of `evals`, and each entry by its evaluator's own check."""
    for name, entry in config.evals.items():
        taken = name in ("train", "time") or not re.fullmatch(r"\w+", name)
        faults.need(
            not taken,
            f"evals.{name}: choose a name of letters, digits and _, other than train and time, "
            "which name the run's own metrics",
        )
        faults.check(find_evaluator(entry.type).check, entry, prefix=f"evals.{name}.")
