"""Parts: what a config chooses by name. A part is one class; its fields are its keys.

    class Lion(Part):
        \"\"\"Chen et al. 2023 (arXiv:2302.06675), algorithm 2.\"\"\"

        b1: float = key(0.9, "share of the first moment that stays", within="[0, 1)")

    OPTIMIZERS["lion"] = Lion

The sections of a config are declared in the same way. Placeholders, checks, errors and the tables
of the docs are made from these declarations; a key stands nowhere else.
"""

import dataclasses
import functools
import importlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.base.errors import InputError, collect_faults, nearest

P = TypeVar("P", bound="Part")


_SAID = {bool: "true or false", int: "int", float: "number", str: "text", tuple: "list",
         object: "int or pair", "duration": "steps, epochs, examples or % of the run",
         "interval": "steps, epochs, examples or % of the run"}  # fmt: skip


class Key(typing.NamedTuple):
    """The declaration of a key.

    kind: bool, int, float, str, tuple, or object for "int or pair".
    default: `...` if the key must be set; None if it is optional.
    meaning: for users, without a full stop.
    within: the interval of its numbers, such as "(0, 1]"; "": any.
    choices: the texts that it may have; (): any.
    form: of its text: "duration", "interval" (a duration above 0), "length" (an interval that is no
      share of the run), "regex", "list" of durations, "ops", "entries" of a study, or
      "" for any.
    before: its value in a stored run whose resolved config lacks it; `...`: the default.
    item: the type of a tuple's items; None: it is no tuple.
    """

    kind: type
    default: Any
    meaning: str
    within: str
    choices: tuple[str, ...]
    form: str
    before: Any
    item: type | None

    def describe(self) -> str:
        """What values it takes: "number in [0, inf)", "duration", "bilinear, bicubic"."""
        what = ", ".join(self.choices) or _SAID.get(self.form or self.kind, self.form)
        return f"{what} in {self.within}" if self.within else what

    def find_fault(self, value: Any) -> str | None:
        """What `value` needs, of the right type or None; None: nothing."""
        if value is None:
            return None
        if self.form == "regex":
            try:
                re.compile(value)
            except re.error as error:
                return f"needs a regular expression: {error}"
        if self.choices and value not in self.choices:
            return nearest(value, self.choices)
        numbers = value if isinstance(value, tuple) else (value,)
        allowed = (int, float) if self.item is float else self.item
        if allowed and not all(isinstance(number, allowed) for number in numbers):
            return f"needs items of type {self.item.__name__}"  # type: ignore[union-attr]
        if self.within and not (numbers and all(_lies_in(n, self.within) for n in numbers)):
            return f"needs {'numbers' if self.kind is tuple else 'a number'} in {self.within}"
        return None


def _lies_in(number: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    from_low = number >= low if interval[0] == "[" else number > low
    return from_low and (number <= high if interval[-1] == "]" else number < high)


def key(
    default: Any, meaning: str, *,
    within: str = "", choices: Sequence[str] = (), form: str = "", before: Any = ...,
) -> Any:  # fmt: skip
    """Declare a key as a field of a `Section` or `Part`; see `Key` for the arguments."""
    about = {"meaning": meaning, "within": within, "choices": tuple(choices), "form": form}
    about["before"] = before
    if default is ...:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(key,))
class Section:
    """Keys that belong together, declared as fields by `key`; every subclass is a dataclass."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, Key]:
        """{name: declaration}, in the order of the fields."""
        hints = typing.get_type_hints(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type] # every subclass is a dataclass
        return {field.name: _declared(field, hints[field.name], field.metadata) for field in fields}


_KINDS = (bool, int, float, str, tuple, object)


def _declared(field: dataclasses.Field, hint: Any, about: Mapping[str, Any]) -> Key:
    if "meaning" not in about:
        raise TypeError(f"{field.name}: declare it as `{field.name}: TYPE = key(DEFAULT, MEANING)`")
    kind, item = _kind_of(hint)
    if kind not in _KINDS:
        raise TypeError(f"{field.name}: {hint} is no type of a key")
    default = ... if field.default is dataclasses.MISSING else field.default
    return Key(kind, default, **about, item=item)


def _kind_of(hint: Any) -> tuple[Any, type | None]:
    """(the type of a key with this annotation, the type of a tuple's items).

    A pair of ints is an `object`: a config may also give one int for both.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    kinds = [kind for kind in options if kind is not types.NoneType]
    if len(kinds) > 1 or typing.get_args(kinds[0]) == (int, int):
        return object, None
    items = typing.get_args(kinds[0])
    return typing.get_origin(kinds[0]) or kinds[0], items[0] if items else None


@functools.cache
def keys_of_fields(module: Any) -> dict[str, Key]:
    """The keys that the fields of a Linen module declare, by `key` or by their type alone.

    A subclass that gives a field another default keeps the rest of its declaration.
    """
    hints = typing.get_type_hints(module)
    declared: dict[str, Mapping[str, Any]] = {}
    for ancestor in reversed(module.__mro__):
        fields = vars(ancestor).get("__dataclass_fields__", {}).values()
        declared |= {f.name: f.metadata for f in fields if "meaning" in f.metadata}
    plain = key(..., f"field of {module.__name__}").metadata
    return {
        field.name: _declared(field, hints[field.name], declared.get(field.name, plain))
        for field in dataclasses.fields(module)
        if field.name not in ("name", "parent") and _kind_of(hints[field.name])[0] in _KINDS
    }


class Part(Section):
    """A choice of a config, made by `Registry.make`. A subclass adds what binds it to a run."""

    def check(self) -> list[str]:
        """Faults of several keys together, each starting with its key, without the section."""
        return []


def find_faults(part: Section) -> list[str]:
    """All faults of the values of a part, each starting with its key."""
    values = {name: getattr(part, name) for name in part.declared()}
    return find_wrong(part.declared(), values) or (part.check() if isinstance(part, Part) else [])


def find_wrong(keys: Mapping[str, Key], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A fault for each of `values` that its declaration in `keys` rules out."""
    found = {name: keys[name].find_fault(value) for name, value in values.items() if name in keys}
    return [f"{prefix}{n}={values[n]!r}: {fault}" for n, fault in found.items() if fault]


def load(name: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(dict[str, "type[P] | str"], Generic[P]):
    """{name: a part, or "module:class" of one, which is imported when it is asked for}.

    selector: the key of a config whose value selects a part, such as "objective.name".
    common: the keys of its section that belong to no part. A part's keys are None in the section
      until they are set.
    """

    def __init__(self, selector: str, common: type[Section], parts: Mapping[str, "type[P] | str"]):
        super().__init__(parts)
        self.selector, self.common = selector, common
        self.section, dot, self._leaf = selector.rpartition(".")
        self._prefix = self.section + dot

    def find(self, name: str) -> type[P]:
        """The class of the part called `name`; raises InputError if there is none."""
        found = self.get(name)
        if found is None:
            raise InputError(f"{self.selector}={name!r}: {nearest(str(name), list(self))}")
        if isinstance(found, str):
            found = load(found)
            super().__setitem__(name, found)
        return found

    def __setitem__(self, name: str, part: "type[P] | str") -> None:
        """Add a part; raises InputError if another one has its name."""
        there = self.get(name)
        if there is not None and (isinstance(there, str) or there.__module__ != part.__module__):
            raise InputError(f"{self.selector}={name!r}: exists; give your part another name")
        super().__setitem__(name, part)

    def make(self, values: Mapping[str, Any], prefix: str | None = None) -> P:
        """The part that `values` select, with those of its keys that are set.

        `prefix`: before the keys in errors; None: the section of the registry.

        Raises:
          InputError: with all faults: no such part, a key of another part, a value out of range.
        """
        prefix = self._prefix if prefix is None else prefix
        name, common = values[self._leaf], self.common.declared()
        part = self.find(name)
        known = part.declared()
        own = {
            k: v for k, v in values.items()
            if v is not None and k != self._leaf and (k in known or k not in common)
        }  # fmt: skip
        collect_faults([
            f"{prefix}{k}={v!r}: {name} has no such key; set it to None"
            for k, v in own.items()
            if k not in known
        ])  # fmt: skip
        collect_faults([
            f"{prefix}{k}: {name} needs it; set --config.{prefix}{k}=..."
            for k, declared in known.items()
            if declared.default is ... and k not in own
        ])  # fmt: skip
        made = part(**own)
        collect_faults([f"{prefix}{fault}" for fault in find_faults(made)])
        return made

    def keys_of(self, part: type[P]) -> dict[str, Key]:
        """{key: declaration} of a part."""
        return part.declared()

    def chosen_keys(self, name: str | None) -> dict[str, Key]:
        """`keys_of` the part called `name`; no keys if there is none."""
        try:
            return self.keys_of(self.find(name))  # type: ignore[arg-type] # None finds no part
        except InputError:
            return {}

    def keys_of_parts(self, module: str | None = None) -> dict[str, Key]:
        """The keys of the parts that `module`, or one in it, defines (None: any), as optional."""
        parts = [p for p in map(self.find, self)
                 if module is None or f"{p.__module__}.".startswith(f"{module}.")]  # fmt: skip
        return {k: declared._replace(default=None) for part in parts
                for k, declared in self.keys_of(part).items()}  # fmt: skip


def add_keys(node: ConfigDict, keys: Mapping[str, Key]) -> None:
    """Add `keys` that it lacks to an unlocked section of a config."""
    for name, declared in keys.items():
        if name not in node:
            unset = declared.default is None or declared.default is ...
            node[name] = placeholder(declared.kind) if unset else declared.default
