"""Nodes of a config, whose errors name the nearest key."""

import copy
import difflib
import re
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference

from vit_jax.base.errors import InputError, nearest
from vit_jax.config.other_words import flags_named

_CONSTANTS = (str, int, float, type(None))  # values that cannot change
_MOST = 12  # keys of a section in a message

# {names of a key that no library has just so: its name here}
_SYNONYMS = {
    re.compile(r"((num|max|total|train)_)?(steps|epochs|iterations)"): "duration",
    re.compile(r"((base|init|max)_)?learning_rate"): "optimizer.peak_lr",
}


class NoSuchKeyError(InputError, AttributeError, KeyError):
    """A key that a config does not have; also the errors that Python's protocols ask for."""

    __str__ = Exception.__str__


class WrongTypeError(InputError, TypeError):
    """A value of another type than its key."""


class Node(ConfigDict):
    """A config or a section: typed values by key; see `base_config`.

    Raises:
      NoSuchKeyError: a key is read that does not exist, or set in a locked node.
      WrongTypeError: a value does not have the type of its key.
    """

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            raise self._lacks(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        if self.is_locked and key not in self:
            raise self._lacks(key)
        try:
            super().__setitem__(key, value)
        except TypeError:
            kind = self.get_type(key)
            if kind is str and is_list_of_dicts(value):
                super().__setitem__(key, repr(tuple(value)))  # as overrides keep it
                return
            needed = (
                "its keys set one by one" if kind is Node else f"a value of type {kind.__name__}"
            )
            raise WrongTypeError(f"{key}={value!r}: needs {needed}") from None

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # a protocol of Python, such as copying, asks whether it is there
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> "Node":
        """An equal node, in a tenth of the usual time; it is copied many times before a run."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        fields = {key: _copy_field(field, memo) for key, field in self._fields.items()}
        copied.__dict__.update(vars(self) | {"_fields": fields})
        return copied

    def _lacks(self, key: str) -> NoSuchKeyError:
        return NoSuchKeyError(f"{key}: no such key; {nearest_key(key, list(flatten(self)))}")


def _copy_field(field: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a value, or of the typed place of a value that was None."""
    is_place = isinstance(field, FieldReference) and not field._ops
    if is_place and isinstance(field._value, _CONSTANTS):
        copied = memo.setdefault(id(field), FieldReference.__new__(FieldReference))
        copied.__dict__.update(vars(field))
        return copied
    return field if isinstance(field, _CONSTANTS) else copy.deepcopy(field, memo)


def is_list_of_dicts(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(item, dict) for item in value)


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """{"model.name": "ViT-B/16", ...}: every leaf by its dotted key; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, field in config.items(preserve_field_references=True):
        value = field.get() if isinstance(field, FieldReference) else field
        if isinstance(value, ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = tuple(value) if isinstance(value, list) else value
    return flat


def keys_named(leaf: str, known: Sequence[str]) -> list[str]:
    """Those of the `known` keys that are called `leaf` in any section, or in other libraries."""
    found = [name for name in known if name.rpartition(".")[2] == leaf]
    meant = [name for pattern, name in _SYNONYMS.items() if pattern.fullmatch(leaf)]
    meant += [flag.own_key for flag in flags_named(leaf)]
    return found or [name for name in dict.fromkeys(meant) if name in known]


def nearest_key(key: str, known: Sequence[str]) -> str:
    """The hint for an unknown `key`: how to list a section, `known` keys whose last component
    matches, else its section's keys, else the nearest.

    `peak_lr` and `lr` suggest `optimizer.peak_lr`, whatever section they were written in;
    `batch_size` suggests the top-level key `global_batch_size`, not the key of an evaluator.
    """
    if below := [name for name in known if name.startswith(key + ".")]:
        return f"its keys include {', '.join(below[:4])}; see `vit_jax keys {key}`"
    leaf = key.rpartition(".")[2]
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    of_no_section = [name for name in by_leaf if f"_{key}_" in f"_{name}_" and name in known]
    found = (
        of_no_section
        or keys_named(leaf, known)
        or [name for other in by_leaf if f"_{leaf}_" in f"_{other}_" for name in by_leaf[other]]
        or [
            name
            for other in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
            for name in by_leaf[other]
        ]
    )
    if not found:
        section = key.removesuffix(leaf)
        of_section = [name.removeprefix(section) for name in known if name.startswith(section)]
        if not section or not of_section:
            return nearest(key, known)
        name, more = section[:-1], ""
        if len(of_section) > _MOST:
            more = f" and {len(of_section) - _MOST} more; see `vit_jax keys {name}`"
            of_section = difflib.get_close_matches(leaf, of_section, n=_MOST, cutoff=0.0)
        return f"{name} has the keys {', '.join(of_section)}{more}"
    if "." in key:
        found = difflib.get_close_matches(key, found, n=1, cutoff=0.0)
    return f"did you mean {' or '.join(found)}?"
