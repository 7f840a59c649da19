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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.base.errors import Faults, InputError, collect_faults, nearest
from vit_jax.config import plugins
from vit_jax.config.drawn import TOKENS, find_fault_of_draws, split_draws
from vit_jax.config.durations import check_duration, split_durations
from vit_jax.config.sizes import EXAMPLE, find_fault_of_sizes, split_sizes

P = TypeVar("P", bound="Part")

LARGEST_SIDE = 65535  # pixels, as in JPEG files
LARGEST_BATCH = 2**24  # images, over all devices
POSITIVE, FROM_0, SHARE = "(0, inf)", "[0, inf)", "[0, 1]"  # ranges of numbers
BATCH = f"[1, {LARGEST_BATCH}]"
_LARGEST = {float: 3.4028234e38, int: 2**40}  # of float32; more than any count of a run
InSteps = Callable[[str, str], int]  # (duration, its key) -> steps; an interval has at least one

_SAID = {bool: "true or false", int: "int", float: "number", str: "text", tuple: "list",
         object: "int or pair", "duration": "steps, epochs, examples or % of the run",
         "interval": "steps, epochs, examples or % of the run",
         "sizes": "int, pair, or ints with their starts",
         "draws": "int, or ints with shares"}  # fmt: skip


DURATIONS = ("duration", "interval", "length", "list")  # forms of a key


class Key(typing.NamedTuple):
    """The declaration of a key.

    kind: bool, int, float, str, tuple, or object for "int or pair".
    default: `...` if the key must be set; None if it is optional.
    meaning: for users, without a full stop.
    within: the interval of its numbers, such as "(0, 1]"; "": any.
    choices: the texts that it may have; (): any.
    form: of its text: "duration", "interval" (a duration above 0), "length" (an interval that is no
      share of the run), "regex", "list" of durations, "ops", "entries" of a study, "sizes" (an
      image size, or a schedule of them), "draws" (a number, or several drawn by shares), or "" for
      any.
    before: its value in a stored run whose resolved config lacks it; `...`: the default.
    decided: whether `run.setup.resolve` sets it if it is None, so that no room finds None.
    item: the type of a tuple's items; None: it is no tuple.
    example: of the values of the form "draws".
    """

    kind: type
    default: Any
    meaning: str
    within: str
    choices: tuple[str, ...]
    form: str
    before: Any
    decided: bool
    item: type | None
    example: str = TOKENS

    def describe(self) -> str:
        """The values that it takes: "number in [0, inf)", "duration", "bilinear, bicubic"."""
        what = ", ".join(self.choices) or _SAID.get(self.form or self.kind, self.form)
        return f"{what} in {self.within}" if self.within else what

    def find_fault(self, value: Any) -> str | None:
        """The fault of `value`, of the right type or None; None: it has none."""
        if value is None:
            return None
        if self.form == "sizes" and isinstance(value, str):
            return find_fault_of_sizes(value)
        if self.form == "draws":
            return find_fault_of_draws(value, self.example)
        if self.kind is object and as_pair(value) is None:
            schedule = f', or a schedule, "{EXAMPLE}"' if self.form == "sizes" else ""
            return f"needs a positive int or a pair of them, up to {LARGEST_SIDE}{schedule}"
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
        for number in (n for n in numbers if type(n) in _LARGEST):
            most = _LARGEST[type(number)]
            if not abs(number) <= most:  # also of NaN
                return f"needs a finite number, up to {most:.3g}"
        return None

    def read(self, value: Any, name: str, in_steps: InSteps | None) -> Any:
        """`value` as rooms take it: a size as a pair, and by `in_steps` a duration as steps.

        Of a schedule of sizes it is the last one, of numbers that are drawn the largest.
        """
        if value is None:
            return None
        if self.form == "draws":
            return value if self.find_fault(value) else split_draws(value)[-1][0]
        if self.kind is object:
            return as_pair(self.sizes(value)[-1][0]) or value
        if in_steps is None or self.form not in DURATIONS:
            return value
        steps = tuple(in_steps(text, name) for text in self.durations(value))
        return steps if self.form == "list" else max(*steps, int(self.form != "duration"))

    def durations(self, value: Any) -> list[str]:
        """The durations that `value` holds, as texts."""
        if self.form == "sizes":
            return [start for _, start in self.sizes(value)[1:]]
        if value is None or self.form not in DURATIONS:
            return []
        return split_durations(value) if self.form == "list" else [value]

    def sizes(self, value: Any) -> list[tuple[Any, str]]:
        """(size, start) of each stage of a schedule; of another value one, also of a wrong one."""
        is_schedule = self.form == "sizes" and isinstance(value, str) and not self.find_fault(value)
        return split_sizes(value) if is_schedule else [(value, "0 steps")]


def _lies_in(number: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    from_low = number >= low if interval[0] == "[" else number > low
    return from_low and (number <= high if interval[-1] == "]" else number < high)


def as_pair(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size given as int or pair; None if it is neither."""
    pair = (size, size) if isinstance(size, int) else size
    if not (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(type(side) is int and 0 < side <= LARGEST_SIDE for side in pair)
    ):
        return None
    height, width = pair
    return height, width


def key(
    default: Any, meaning: str, *,
    within: str = "", choices: Sequence[str] = (), form: str = "", before: Any = ...,
    decided: bool = False, example: str = TOKENS,
) -> Any:  # fmt: skip
    """Declare a key as a field of a `Section` or `Part`; see `Key` for the arguments."""
    about: dict[str, Any] = {
        "meaning": meaning,
        "within": within,
        "choices": tuple(choices),
        "form": form,
    }
    about |= {"before": before, "decided": decided, "example": example}
    if default is ...:
        return dataclasses.field(metadata=about)
    return dataclasses.field(default=default, metadata=about)


# `key` is no field specifier here: mypy would see only defaults that are keyword arguments.
@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Keys that belong together, declared as fields by `key`; every subclass is a dataclass."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, Key]:
        """{name: declaration}, in the order of the fields."""
        hints = typing.get_type_hints(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type] # every subclass is a dataclass
        others = ("own",) if issubclass(cls, OpenSection) else ()
        return {
            field.name: _declared(field, hints[field.name], field.metadata)
            for field in fields
            if field.name not in others
        }

    def check(self) -> list[str]:
        """Faults of several keys together, each starting with its key, without the section."""
        return []

    def _check_all(self) -> list[str]:
        """The faults that its class finds, and those that the classes find from which it derives.

        So a part that has a `check` of its own keeps the one of its section.
        """
        checks = [vars(cls)["check"] for cls in reversed(type(self).mro()) if "check" in vars(cls)]
        return [*dict.fromkeys(fault for check in checks for fault in check(self))]

    @classmethod
    def read(
        cls, values: Mapping[str, Any], in_steps: InSteps | None = None
    ) -> tuple[Self, list[str]]:
        """The section with `values`, and their faults, each starting with its key.

        A key that is None or missing has its default. Sizes become pairs, and durations steps. A
        value in fault stays as it is; `check` sees its default instead.

        Args:
          values: by key; other keys' values are left out.
          in_steps: converts durations; None: the config is open, and they stay as they are.
        """
        known = cls.declared()
        given = {k: values[k] for k in known if k in values and values[k] is not None}
        given |= {k: None for k in known if known[k].default is ... and k not in given}
        section = cls(**given)
        wrong = {k: found for k, value in given.items() if (found := find_wrong(known, {k: value}))}
        unset = {k: None if known[k].default is ... else known[k].default for k in wrong}
        sound = dataclasses.replace(section, **unset)  # type: ignore[type-var]
        faults = [fault for found in wrong.values() for fault in found]
        faults += [text for text in sound._check_all() if re.split(r"\W", text)[0] not in wrong]
        read = {
            name: declared.read(getattr(section, name), name, None if faults else in_steps)
            for name, declared in known.items()
        }
        return dataclasses.replace(section, **read), faults  # type: ignore[type-var]


class OpenSection(Section):
    """A section whose other keys belong to the part that its name selects, or to several parts.

    own: {key: value} for those that are set.
    """

    own: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def read(
        cls, values: Mapping[str, Any], in_steps: InSteps | None = None
    ) -> tuple[Self, list[str]]:
        """As `Section.read`; `own` holds the other values."""
        section, faults = super().read(values, in_steps)
        own = {k: v for k, v in values.items() if k not in cls.declared() and v is not None}
        return dataclasses.replace(section, own=own), faults


_KINDS = (bool, int, float, str, tuple, object)


def _declared(field: dataclasses.Field, hint: Any, about: Mapping[str, Any]) -> Key:
    if "meaning" not in about:
        raise TypeError(f"{field.name}: declare it as `{field.name}: TYPE = key(DEFAULT, MEANING)`")
    kind, item = _kind_of(hint)
    if kind not in _KINDS:
        raise TypeError(f"{field.name}: {hint} is no type of a key")
    default = ... if field.default is dataclasses.MISSING else field.default
    if about["form"] in DURATIONS:
        kind, item = str, None  # in a config; `Section.read` gives steps
    elif about["form"] == "draws":
        kind = object  # in a config also a text; `Section.read` gives the largest number
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
    """A choice of a config, made by `Registry.make`. A subclass adds what binds it to a run.

    It has the keys of its section too, if it derives from it.
    """


def find_wrong(keys: Mapping[str, Key], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A fault for each of `values` that its declaration in `keys` rules out."""
    faults = Faults()
    for name, value in values.items():
        if name in keys:
            fault = keys[name].find_fault(value)
            faults.need(fault is None, f"{prefix}{name}={value!r}: {fault}")
            for text in keys[name].durations(value):
                faults.check(check_duration, text, key=prefix + name, form=keys[name].form)
    return faults


def load(name: str) -> Any:
    """The object called "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(dict[str, "type[P] | str"], Generic[P]):
    """{name: a part, or "module:class" of one, which is imported when it is asked for}.

    selector: the key of a config whose value selects a part, such as "objective.name".
    common: the keys of its section that belong to no part. A part's keys are None in the section
      until they are set.
    added: {name of a part that was added: module of the plug-in that was being imported, or None}.
    """

    def __init__(self, selector: str, common: type[Section], parts: Mapping[str, "type[P] | str"]):
        super().__init__(parts)
        self.selector, self.common = selector, common
        self.section, dot, self._leaf = selector.rpartition(".")
        self._prefix = self.section + dot
        self.added: dict[str, str | None] = {}

    def entry(self, name: str) -> str:
        """The name in this dict of the part that a config calls `name`."""
        return name

    def find(self, name: str) -> type[P]:
        """The class of the part called `name`; raises InputError if there is none."""
        name = self.entry(name)
        found = self.get(name)
        if found is None:
            raise InputError(f"{self.selector}={name!r}: {nearest(str(name), list(self))}")
        if isinstance(found, str):
            found = load(found)
            super().__setitem__(name, found)
        return found

    def name_of(self, part: P) -> str:
        """The name by which a config selects `part`; a model may be one of `contract.about`."""
        kind = type(part).__module__, type(part).__name__
        return next(n for n in self if (self.find(n).__module__, self.find(n).__name__) == kind)

    def __setitem__(self, name: str, part: "type[P] | str") -> None:
        """Add a part; raises InputError if another one has its name, TypeError if it is no part."""
        there = self.get(name)
        texts = isinstance(there, str) or isinstance(part, str)
        if there is not None and (texts or there.__module__ != part.__module__):
            raise InputError(f"{self.selector}={name!r}: exists; give your part another name")
        if not isinstance(part, str):
            self.keys_of(part)  # here, so that the error has the line of the plug-in
        self.added[name] = plugins.importing()
        super().__setitem__(name, part)

    def make(
        self, values: Mapping[str, Any], prefix: str | None = None, in_steps: InSteps | None = None
    ) -> P:
        """The part that `values` select, with its keys that are set.

        Args:
          values: of the section.
          prefix: before the keys in errors; None: the section of the registry.
          in_steps: as for `Section.read`.

        Raises:
          InputError: with all faults: no such part, a key of another part, a value out of range.
        """
        prefix = self._prefix if prefix is None else prefix
        name, common = values[self._leaf], self.common.declared()
        part = self.find(name)
        known = part.declared()
        own = {k for k in values if values[k] is not None and k not in (self._leaf, *common)}
        collect_faults([
            f"{prefix}{k}={values[k]!r}: {name} has no such key; set it to None"
            for k in values
            if k in own and k not in known
        ])  # fmt: skip
        collect_faults([
            f"{prefix}{k}: {name} needs it; set --config.{prefix}{k}=..."
            for k, declared in known.items()
            if declared.default is ... and values.get(k) is None
        ])  # fmt: skip
        made, faults = part.read(values, in_steps)
        collect_faults([f"{prefix}{fault}" for fault in faults])
        return made

    def keys_of(self, part: type[P]) -> dict[str, Key]:
        """{key: declaration} of a part, without its section's keys."""
        if not issubclass(part, Section):
            raise TypeError(f"{part.__name__}: derive it from the class in docs/how_to/extend")
        common = self.common.declared()
        return {k: d for k, d in part.declared().items() if d != common.get(k)}

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
