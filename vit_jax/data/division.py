"""Which of the user's images a run trains on and which it holds out, by their names.

A name is the path of an image from the folder of the data, or from the folder of the list, with
forward slashes. A run divides its images once, before step 0, and keeps the result:

    WORKDIR/images.csv.gz     name,split: `train` or `val`. With the split `elsewhere` the name is
                              the hash of an image that is held out in what the run started from
    MODEL.held_out.npy        beside an exported model: the sorted hashes of the held-out names
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import logging
import os
import types
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from vit_jax.base.errors import InputError, few
from vit_jax.config.sections import Data
from vit_jax.data.images.files import warn_once

DIVIDED = ("folder", "list", "unlabelled")  # data sets whose images a run may hold out
FILE = "images.csv.gz"
HASHES = ".held_out.npy"  # follows the name of a model's file

# {name: group}. A name without a group is a group of its own; with None for all groups nothing more
# is held out, as the validation images lie elsewhere.
Groups = Mapping[str, str] | None

_ELSEWHERE = "elsewhere"
_SMALL = 5  # groups; a smaller class has less than half a group to hold out


class Division(NamedTuple):
    """How the images of a run, or of the run behind an export, are divided.

    splits: {name: split} of the run's images; {} for an export, which has no names.
    hashes: of the held-out images of an export, and of what a run started from.
    unlabelled: whether a run trains without labels. It then holds out none of the images, and its
      evaluators divide them anew.
    """

    splits: Mapping[str, str] = types.MappingProxyType({})
    hashes: frozenset[int] = frozenset()
    unlabelled: bool = False

    def held_out(self) -> frozenset[int]:
        """The hashes of all held-out images."""
        return self.hashes | {hash_of(n) for n, split in self.splits.items() if split == "val"}

    def holds_out(self, name: str) -> bool:
        return self.splits.get(name) == "val" or hash_of(name) in self.hashes

    def to_bytes(self) -> bytes:
        """The content of a run's FILE."""
        text = io.StringIO(newline="")
        rows = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
        rows.writerows([("name", "split"), *sorted(self.splits.items())])
        rows.writerows((f"{hashed:016x}", _ELSEWHERE) for hashed in sorted(self.hashes))
        return gzip.compress(text.getvalue().encode(errors="surrogateescape"), mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes) -> Division:
        """The division in FILE; raises OSError, EOFError or ValueError if `content` is damaged."""
        if not content:  # which gzip takes
            raise EOFError("it is empty")
        text = gzip.decompress(content).decode(errors="surrogateescape")
        rows = list(csv.reader(io.StringIO(text, newline="")))[1:]
        hashes = frozenset(int(name, 16) for name, split in rows if split == _ELSEWHERE)
        return cls({name: split for name, split in rows if split != _ELSEWHERE}, hashes)


UNKNOWN = Division()


def hash_of(name: str) -> int:
    """The 64-bit hash of a name; the same everywhere."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def divide_anew(
    where: str, classes: Mapping[str, str], groups: Groups, known: Division = UNKNOWN
) -> dict[str, str]:
    """{name: `train` or `val`}, a new division of {name: class}: a tenth of each class is `val`.

    The number of groups is rounded. Classes of fewer than 5 groups hold out a tenth of theirs
    together, at most one of each class; a class of one group holds out none. At least one of
    several groups is held out. Hashes of the names choose, so the result depends neither on the
    place nor on the order of the files, and a class of 5 groups or more not on the other classes.

    In a class from which `known` holds out images, exactly these are held out; in the others no
    image that `known` trained on, if it holds out some at all.
    """
    held = {name for name in classes if known.holds_out(name)}
    if groups is None:
        return {name: "val" if name in held else "train" for name in classes}
    trained = known.splits if "val" in known.splits.values() else {}
    of_groups: dict[str, list[str]] = {}
    for name in sorted(classes):
        of_groups.setdefault(groups.get(name, name), []).append(name)
    held = {name for names in of_groups.values() if held & {*names} for name in names}
    by_class: dict[str, dict[str, list[str]]] = {}
    for group, names in of_groups.items():
        by_class.setdefault(classes[names[0]], {})[group] = names
    settled = {classes[name] for name in held}
    sizes = {c: len(members) for c, members in by_class.items() if c not in settled}
    numbers = {c: (size + 5) // 10 for c, size in sizes.items()}
    small = [c for c, size in sizes.items() if size < _SMALL]
    small.sort(key=lambda c: (sizes[c] == 1, hash_of(c)))
    share = (sum(sizes[c] for c in small if sizes[c] > 1) + 5) // 10
    if not (held or share or any(numbers.values())) and len(of_groups) > 1:
        share = 1
    numbers |= dict.fromkeys(small[:share], 1)
    for c, number in numbers.items():
        groups_of = by_class[c]
        free = [g for g, names in groups_of.items() if "train" not in map(trained.get, names)]
        held.update(*(groups_of[group] for group in sorted(free, key=hash_of)[:number]))
    return {name: "val" if name in held else "train" for name in classes}


class Divider:
    """Divides the images of a model and of other folders.

    divider(folder for messages, {name: class}, groups) -> {name: `train` or `val`}. Images
    without an entry are in neither split.

    Args:
      known: how the images of the model are divided.
      model: its name in messages; "" for the run that goes on.
      anew: for a new run, which may train on images that `known` does not name. Otherwise
        images are divided exactly as `known` says, but for a folder that it does not know.
      class_names: of the model, which keep their order and their spelling.

    decided: {name: split} of all images divided so far.
    """

    def __init__(
        self,
        known: Division = UNKNOWN,
        model: str = "",
        *,
        anew: bool = False,
        class_names: Sequence[str] | None = None,
    ):
        self.class_names = class_names or ()
        self.decided: dict[str, str] = {}
        self._known, self._model, self._anew = known, model, anew
        self._begun = {} if anew else known.splits

    def __call__(self, where: str, classes: Mapping[str, str], groups: Groups) -> dict[str, str]:
        if self._anew:
            self._warn_of_other_names(where, classes)
            known = self._known._replace(splits={**self._known.splits, **self.decided})
            found = divide_anew(where, classes, groups, known)
        else:
            found = self._follow(where, classes, groups)
            found = found or self._divide_other(where, classes, groups)
        self.decided = found | self.decided
        return found

    def begun_with(self) -> Collection[str]:
        """The names of the images that the run began with; none for a new run."""
        return self._begun.keys()

    def warn_of_trained(self, where: str, names: Collection[str]) -> None:
        """Warns of the user's own validation or test images that the run trained on."""
        if trained := sorted(name for name in names if self._begun.get(name) == "train"):
            warn_once(
                f"{where}: {self._model or 'this run'} was trained on {len(trained):,} of these "
                f"images: {few(trained)}; put them back into train"
            )

    def settled(self) -> Division:
        """The decisions, and the other images that `known` holds out."""
        return Division(self.decided, self._known.held_out() - {*map(hash_of, self.decided)})

    def find_missing(self) -> list[str]:
        """The images that `known` trained on and that were not there; once the data are open."""
        return sorted(n for n, s in self._begun.items() if s == "train" and n not in self.decided)

    def _warn_of_other_names(self, where: str, names: Collection[str]) -> None:
        """Warns if `known` may have the same images from another folder on."""

        def tail(name: str) -> tuple[str, ...]:  # from the last folder on
            return tuple(name.split("/")[-2:])

        splits = self._known.splits
        if "val" not in splits.values() or any(name in splits for name in names):
            return
        tails = {tail(name) for name in self._known.splits}
        if same := sum(tail(name) in tails for name in names):
            warn_once(
                f"{where}: {same:,} images seem to be in {self._model} under other names; "
                "give the data as that run had them, or val may have images that it trained on"
            )

    def _follow(self, where: str, names: Collection[str], groups: Groups) -> dict[str, str]:
        """As `known` says; {} if it knows none of the images."""
        known, hashes, model = self._known, self._known.hashes, self._model or "this run"
        if not any(name in known.splits for name in names):  # an export does not know them all
            found = {name: "val" if hash_of(name) in hashes else "train" for name in names}
            return found if "val" in found.values() else {}
        if groups is not None and "val" not in known.splits.values():  # knows no val
            return {}
        found = {name: known.splits[name] for name in names if name in known.splits}
        if new := sorted({*names} - {*found}):
            warn_once(
                f"{where}: images that {model} did not begin with ({len(new):,}) are neither in "
                f"train nor in val: {few(new)}"
            )
        held = (name for name, split in known.splits.items() if split == "val")
        if gone := sorted(name for name in held if name not in found):
            warn_once(
                f"{where}: images that {model} holds out are missing ({len(gone):,}), so results "
                f"may not be comparable: {few(gone)}"
            )
        return found

    def _divide_other(
        self, where: str, classes: Mapping[str, str], groups: Groups
    ) -> dict[str, str]:
        """A new division of a folder from which `known` holds out nothing."""
        found = divide_anew(where, classes, groups, self._known)
        number = sum(split == "val" for split in found.values())
        if groups is None or not self._model or not any(self._known):
            pass
        elif self._known.unlabelled and found.keys() <= self._known.splits.keys():
            warn_once(
                f"{where}: {self._model} trained on all of these images, without labels; val is a "
                f"tenth of them ({number:,} of {len(found):,}), as in its own evaluations",
                logging.INFO,
            )
        else:
            warn_once(
                f"{where}: holds none of the images that {self._model} holds out; val is a tenth "
                f"({number:,} of {len(found):,}; the split all is all of them), on which the model "
                "may have been trained"
            )
        return found


def read_division(workdir: epath.Path, data: Data) -> Division:
    """The division of the run in `workdir`, trained on `data`; an empty one if it has none.

    Raises: InputError if its file is damaged, or missing though the run trains on own images.
    """
    path = workdir / FILE
    divides = data.split == "train" and data.name in DIVIDED
    if not divides and not path.exists():
        return UNKNOWN
    try:
        return Division.from_bytes(path.read_bytes())._replace(unlabelled=data.name == "unlabelled")
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise InputError(f"{path}: cannot be read ({e}); restore it") from None


def side_file(model: epath.Path) -> epath.Path:
    """The file of hashes of an exported `model`, a file, or a folder with model.safetensors."""
    file = model / "model.safetensors" if model.is_dir() else model
    return file.with_name(f"{file.name}{HASHES}")


def hashes_to_bytes(hashes: Collection[int]) -> bytes:
    """The content of an export's file of hashes, in NumPy's format."""
    file = io.BytesIO()
    np.save(file, np.array(sorted(hashes), np.uint64))
    return file.getvalue()


def hashes_from_bytes(content: bytes) -> frozenset[int]:
    """Raises ValueError, OSError or EOFError if `content` holds no hashes."""
    return frozenset(np.load(io.BytesIO(content), allow_pickle=False).tolist())
