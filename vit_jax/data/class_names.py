"""Names of classes: how they are compared and sorted, and which class a label means."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vit_jax.base.errors import InputError, few

_WHOLE = re.compile(r"(-1|\d+)(\.0+)?")


def as_name(name: str) -> str:
    """`name` as names are compared and written down: composed (NFC), in characters of UTF-8."""
    return unicodedata.normalize("NFC", name.encode(errors="backslashreplace").decode())


def places_of(names: Sequence[str]) -> dict[str, int]:
    """{name: place}, for names by `as_name`; a number written as 3.0 is found as 3 too."""
    whole = {re.sub(r"^(\d+)\.0+$", r"\1", name): place for place, name in enumerate(names)}
    return whole | {as_name(name): place for place, name in enumerate(names)}


def spell(names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """`names` as `known` spells them; the others by `as_name`."""
    places = places_of(known)
    return tuple(known[places[n]] if n in places else n for n in map(as_name, names))


def sorted_classes(names: Iterable[str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The different `names`: first the `known` ones in their order, then others, sorted.

    They are sorted as numbers if all are whole numbers, else as text.
    """
    place = {name: i for i, name in enumerate(known)}
    found = {*spell(names, known)}
    others = found - place.keys()
    by_number = all(map(str.isdecimal, others))
    others_sorted = sorted(others, key=(lambda name: (int(name), name)) if by_number else None)
    return (*sorted(found & place.keys(), key=place.__getitem__), *others_sorted)


def as_label(value: Any) -> str | None:
    """A label of a table, of a list or of JSON as text; None for none: -1, None, NaN or no text.

    Raises: ValueError if it is neither text nor a whole number.
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = value.strip().partition(".")[0]  # pandas writes whole numbers beside NaN so
        value = None if value == "-1" else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or value != value or value == -1:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not (isinstance(value, str) or is_number):
        raise ValueError(
            f"has the label {value!r}; needed: text, a whole number from 0, -1 or null for no "
            "label, or a list of these"
        )
    return as_name(str(value).strip()) or None


def number_labels(
    where: str, labels: Collection[str], names: Sequence[str], named_by: str, *, counted: bool
) -> dict[str, int]:
    """{label: its class} of the different labels of a data set, as text.

    Labels that are digits are all names, or, if `counted`, all numbers of the classes from 0,
    whichever is possible. Beside labels that are no digits they are names if they can be.

    Args:
      where: the data set, in messages.
      labels: all that the data set has, so that all its splits are read alike.
      names: of the classes.
      named_by: what has the names, in messages.
      counted: whether labels may be numbers.

    Raises: InputError if labels are neither, or if they may be both and then mean other classes.
    """
    places = places_of(names)
    digits = {label for label in labels if label.isdecimal()}
    as_names = {label: places[as_name(label)] for label in labels if as_name(label) in places}
    as_numbers = {label: int(label) for label in digits if counted and int(label) < len(names)}
    are_names, are_numbers = digits <= as_names.keys(), digits == as_numbers.keys()
    differ = sorted(label for label in as_numbers if as_names.get(label) != int(label))
    if digits == {*labels} and are_names and are_numbers and differ:
        label = differ[0]
        raise InputError(
            f"{where}: the label {label} may be the class of this name, number "
            f"{as_names[label]} in {named_by}, or the class number {label} from 0, "
            f"{names[int(label)]!r}; rename the classes in {named_by} so that no name is a number, "
            f"as in 'class {names[int(label)]}', and give label numbers from 0"
        )
    found = {**as_names, **as_numbers} if are_numbers and not are_names else as_names
    if unknown := {*labels} - found.keys():
        raise InputError(
            f"{where} has the labels {few(sorted(unknown))}, which {named_by} lacks; add them there"
        )
    return found


def read_names(text: str, where: str) -> tuple[str, ...]:
    """The names in the text of a file, one a line; raises InputError naming a faulty line."""
    lines = [as_name(line.strip()) for line in text.removeprefix("\ufeff").rstrip().splitlines()]
    first: dict[str, int] = {}  # line of each name
    for number, name in enumerate(lines, 1):
        if not name or first.setdefault(name, number) < number:
            fault = f"is {name!r} as line {first[name]}" if name else "is empty"
            raise InputError(
                f"{where}, line {number}: {fault}; needed: one name a line for each class, in the "
                "order of the label numbers, each another one"
            )
    return tuple(lines)
