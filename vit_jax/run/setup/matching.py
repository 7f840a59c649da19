"""How a model's classes and its reading of files match the data's."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.base.errors import InputError
from vit_jax.config.sections import Data
from vit_jax.transfer.pretrained import Spec

logger = logging.getLogger("vit_jax")

SYNSET = re.compile(r"n\d{8}")  # as data sets call the classes of ImageNet, and models do not
GENERIC_NAME = re.compile(r"LABEL_\d+")  # as Hugging Face calls classes that were given no names
_NUMBER = re.compile(f"{SYNSET.pattern}|{GENERIC_NAME.pattern}")


def say_other_names(
    theirs: Sequence[str] | None, ours: Sequence[str] | None, place: str, source: str
) -> str:
    """Which classes of `place` have other names in `source`, the model; "" if none has.

    Their case does not count. "" if one side has no names, or has synset numbers.
    """
    pairs = _other_names(theirs, ours)
    if not pairs:
        return ""
    label, name, output = pairs[0]
    return (
        f"{len(pairs)} of {len(ours or ())} classes have other names in {place} than in {source}: "
        f"label {label} is {name!r}, but output {label} is {output!r}"
    )


def _other_names(
    theirs: Sequence[str] | None, ours: Sequence[str] | None
) -> list[tuple[int, str, str]]:
    """(label, their name, our name) where the names differ; see `say_other_names`."""
    pairs = list(zip(theirs or (), ours or (), strict=False))
    if any(all(map(SYNSET.fullmatch, side)) for side in zip(*pairs, strict=True)):
        return []
    return [(i, a, b) for i, (a, b) in enumerate(pairs) if a.lower() != b.lower()]


def say_places(where: str, names: Sequence[str], source: str) -> None:
    """Logs that the data's classes `names` are the outputs of `source` of the same places.

    A warning if the names are other numbers than the places.
    """
    ends = [(names[0], 0), (names[-1], len(names) - 1)]
    other = [(n, i) for i, n in enumerate(names) if n.isdecimal() and int(n) != i]
    said = ", ".join(f"{name!r} is output {i}" for name, i in other[:2] or ends)
    logger.log(
        logging.WARNING if other else logging.INFO,
        "%s: %s has none of the classes' names, so the places are matched: %s%s",
        where, source, said,
        "; accuracy is meaningful only if this is the order of the outputs" if other else "",
    )  # fmt: skip


def compare_reading(d: Data, spec: Spec, source: str) -> None:
    """Warn if files become other pixels than those that the model of `source` was trained with."""
    for key in ("exif", "pixel_range"):
        ours, theirs = getattr(d, key), getattr(spec, key)
        if theirs not in (None, ours):
            say_other_pixels(key, ours, source, theirs)


def say_other_pixels(key: str, ours: Any, source: str, theirs: Any) -> None:
    """Warn that `data.KEY` is `ours`, but was `theirs` for the model of `source`."""
    text = ",".join(map(str, theirs)) if isinstance(theirs, Sequence) else str(theirs).lower()
    logger.warning("data.%s=%s, but %s was trained with %s; set --config.data.%s=%s",
                   key, ours, source, theirs, key, text)  # fmt: skip


def find_places(
    names: Sequence[str] | None, known: Sequence[str] | None, source: str
) -> list[int] | None:
    """The place of each class of `names` in `known`, the classes of `source`.

    None if one side has no names, or numbers for names, as then only the places can match.

    Raises:
      InputError: `known` lacks a class, or has two of its name.
    """
    if not names or not known or any(all(map(_NUMBER.fullmatch, side)) for side in (names, known)):
        return None
    if len(names) <= len(known) and not _other_names(names, known):
        return list(range(len(names)))
    for name in names:
        if (number := known.count(name)) != 1:
            has = "no class" if number == 0 else f"{number} classes"
            raise InputError(f"{source} has {has} {name!r}, which the data have")
    return [known.index(name) for name in names]
