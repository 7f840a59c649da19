"""The entries of `evals`: a registry of evaluators. Each declares the keys of its own entry.

An evaluator is one file with an `EVALUATOR` and one line in EVALUATORS. Its module is loaded when
a config asks for it, so that reading a config loads no evaluator that it does not have.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import Faults, InputError, nearest

Inputs = TypeVar("Inputs")  # `EvalInputs`, which this room does not import
Made = TypeVar("Made")


class Evaluator(NamedTuple, Generic[Inputs, Made]):
    """A kind of entry of `evals`.

    entry: makes the entry; its arguments are the entry's keys, with their defaults.
    make: `EvalInputs` -> an object with `run(state) -> {name: float}`.
    check: raises InputError for a valid entry's values that do not go together; keys without the
      entry's name.
    learns_classes: whether it learns the classes of its data from features; the others need data
      of the model's classes.
    """

    entry: Callable[..., ConfigDict]
    make: Callable[[Inputs], Made]
    check: Callable[[ConfigDict], None] = lambda entry: None
    learns_classes: bool = False


# kind -> the evaluator, or the module that declares it.
EVALUATORS: dict[str, Evaluator | str] = {
    "classification": "vit_jax.evaluators.classification",
    "real": "vit_jax.evaluators.real",
    "fewshot": "vit_jax.evaluators.fewshot",
    "knn": "vit_jax.evaluators.knn",
    "linear_probe": "vit_jax.evaluators.linear_probe",
}

OPTIONAL_KEYS = {"batch_size": int, "data_name": str, "data_dir": str}
REQUIRED_KEYS = ("every", "ops", *OPTIONAL_KEYS)  # which whatever opens an entry's data reads


def find_evaluator(kind: str) -> Evaluator:
    """The evaluator whose entries have `kind` as their type.

    Raises:
      InputError: there is none.
    """
    found = EVALUATORS.get(kind)
    if found is None:
        raise InputError(f"type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
    return importlib.import_module(found).EVALUATOR if isinstance(found, str) else found


def learning_kinds() -> list[str]:
    """The kinds of entries that learn the classes of their data."""
    return [kind for kind in EVALUATORS if find_evaluator(kind).learns_classes]


def entry_keys(kind: str) -> set[str]:
    """The keys of an entry whose type is `kind`."""
    return {"type", *inspect.signature(find_evaluator(kind).entry).parameters}


def entry_defaults(kind: str) -> dict[str, Any]:
    """{key: default} of the keys that an entry of that kind may leave out."""
    parameters = inspect.signature(find_evaluator(kind).entry).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


def typed_entry(kind: str, values: dict[str, Any]) -> ConfigDict:
    """An entry of `evals`, locked; only the keys in OPTIONAL_KEYS may be None.

    Raises:
      InputError: `values` lack some of REQUIRED_KEYS.
    """
    missing = [key for key in REQUIRED_KEYS if key not in values]
    if missing:
        raise InputError(
            f"type={kind!r}: its entries lack {', '.join(missing)}; give the function that makes "
            f"them the arguments {', '.join(REQUIRED_KEYS)}, whether the evaluator reads them or "
            "not"
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    optional = {key: placeholder(OPTIONAL_KEYS[key]) for key in OPTIONAL_KEYS if key in values}
    entry = ConfigDict({"type": kind} | values | optional)
    for key in optional:
        entry[key] = values[key]
    return entry.lock()


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks the names of the entries of `evals`, and each by its evaluator."""
    for name, entry in config.evals.items():
        taken = name in ("train", "time") or not re.fullmatch(r"\w+", name)
        faults.need(
            not taken,
            f"evals.{name}: choose a name of letters other than train and time, which the run's "
            "own metrics have",
        )
        faults.need_positive(f"evals.{name}.batch_size", entry.batch_size)
        faults.check(find_evaluator(entry.type).check, entry, prefix=f"evals.{name}.")
