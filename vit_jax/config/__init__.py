"""The configuration of an experiment: its keys, its text forms, and the entries of `evals`.

A config file imports from here: `from vit_jax.config import base_config, classification`.
"""

import functools
from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, nearest
from vit_jax.config.base import (
    LAYOUT_KEYS,
    REQUIRED,
    REQUIRED_TO_EVALUATE,
    SplitKey,
    Subset,
    add_plugins,
    base_config,
    decided_later,
    declared_keys,
    default_config,
    eval_splits,
    find_unrecorded,
    flatten,
    image_hw,
    own_keys,
    own_split,
    refuse_words,
    split_words,
    step_range,
    train_split,
    values_in_force,
    with_values,
)
from vit_jax.config.evals import EVALUATORS, Evaluator, SplitEvaluator, make_entry
from vit_jax.config.parts import FROM_0, POSITIVE, SHARE, Key, Part, Section, key
from vit_jax.config.registries import (
    FAMILIES,
    LOSSES,
    METRICS,
    OBJECTIVES,
    OPS,
    OPTIMIZERS,
    POSITIONS,
    SCHEDULES,
    SOURCES,
    STUDIES,
)
from vit_jax.config.settings import Settings
from vit_jax.config.stored import (
    changed_evals,
    changed_keys,
    is_free_on_resume,
    say_changes,
)

__all__ = [
    "EVALUATORS",
    "FAMILIES",
    "FROM_0",
    "LAYOUT_KEYS",
    "LOSSES",
    "METRICS",
    "OBJECTIVES",
    "OPS",
    "OPTIMIZERS",
    "POSITIONS",
    "POSITIVE",
    "REQUIRED",
    "REQUIRED_TO_EVALUATE",
    "SCHEDULES",
    "SHARE",
    "SOURCES",
    "STUDIES",
    "Evaluator",
    "InputError",
    "Key",
    "Part",
    "Section",
    "Settings",
    "SplitEvaluator",
    "SplitKey",
    "Subset",
    "add_plugins",
    "base_config",
    "changed_evals",
    "changed_keys",
    "decided_later",
    "declared_keys",
    "default_config",
    "eval_splits",
    "find_unrecorded",
    "flatten",
    "image_hw",
    "is_free_on_resume",
    "key",
    "own_keys",
    "own_split",
    "refuse_words",
    "say_changes",
    "split_words",
    "step_range",
    "train_split",
    "values_in_force",
    "with_values",
]


def __getattr__(kind: str) -> Callable[..., ConfigDict]:
    """A maker of entries of `evals`, from its keys: `from vit_jax.config import knn`."""
    if kind in EVALUATORS:
        return functools.partial(make_entry, kind)
    hint = nearest(kind, __dir__())
    raise AttributeError(f"module {__name__!r} has no attribute {kind!r}; {hint}")


def __dir__() -> list[str]:
    return [*__all__, *EVALUATORS]
