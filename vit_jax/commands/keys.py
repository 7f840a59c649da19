"""Explain config keys: value, who decided it, meaning, and whether it may change on resume.

  python -m vit_jax.main keys peak_lr
  python -m vit_jax.main keys mae
  python -m vit_jax.main keys optimizer --config=folder --config.optimizer.name=lion
  python -m vit_jax.main keys warm-up --workdir=runs/quickstart

A WORD is a part (an objective, a model, an optimizer, a metric and so on), a section, a key, a flag
of timm, DeiT, MAE or big_vision, or a text that is searched in keys and meanings. Values are those
of --config or of the run in --workdir, else the defaults; without a WORD, it shows the keys that
are in force there.

decided by: user (a flag), recipe (the config file), default; source (of the weights), teachers,
data, rule, duration (of a share of it) or devices: when the run starts; branch: what made the run
from another; "with mae": has an effect with this part only.
resume: whether the key may change when a run goes on; past: as far as its past stays the same.
"""

import argparse
import inspect
import json
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.commands.flags import define_config_flags, define_format_flag
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from vit_jax.config import Key

_Declared: TypeAlias = "dict[tuple[str, Key], list[str]]"  # {(key, declaration): parts with it}
_WIDE = 10_000  # columns of a pipe, which cuts nothing


class Row(NamedTuple):
    """A key, as one row of the table."""

    key: str
    value: Any
    decided_by: str
    resume: str
    meaning: str


def define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="part, section, key or any text")
    define_config_flags(parser)
    parser.add_argument("--workdir", metavar="DIR", help="explain the keys of the run there")
    define_format_flag(parser)


def main(flags: argparse.Namespace) -> int:
    if flags.config is not None and flags.workdir is not None:
        raise InputError("give either --config=NAME or --workdir=DIR")
    keys, (says, parts) = _in_force(flags), _of_parts()
    rows = [row for word in flags.words for row in _find(word, keys, [*says], parts)]
    rows = [*dict.fromkeys(rows if flags.words else keys.values())]
    if flags.format == "json":
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return exit_codes.DONE
    from vit_jax.config.other_words import flags_named

    shown = sys.stdout.isatty()
    console = Console(width=None if shown else _WIDE)
    for name, text in says.items():
        if name.lower() in map(str.lower, flags.words):
            console.print(Text(text))
    for flag in (flag for word in flags.words for flag in flags_named(word) if flag.note):
        console.print(Text(f"{flag.key}: {flag.note}"))
    columns = (Column(name.replace("_", " "), overflow="fold") for name in Row._fields)
    table = Table(*columns, box=box.SIMPLE_HEAD if shown else None)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    if rows:
        console.print(table)
    return exit_codes.DONE


def _in_force(flags: argparse.Namespace) -> dict[str, Row]:
    """{key: row} of the keys in force in the config that the flags select."""
    from vit_jax.base import files
    from vit_jax.config import base_config, declared_keys, flatten, values_in_force
    from vit_jax.config.stored import read_stored
    from vit_jax.config.text import apply_overrides
    from vit_jax.run.setup.resolve import Opener, continue_run, find_open
    from vit_jax.run.setup.validation import load_named

    by_user, stored = [key for key, _ in flags.overrides], None
    if flags.workdir is not None:
        stored = read_stored(files.absolute(flags.workdir))
        config = stored.resolved
    else:
        config = load_named(flags.config) if flags.config else base_config()
    collect_faults(apply_overrides(config, flags.overrides))
    _, decided_by = continue_run(config, Opener(), None, by_user)
    others = find_open(config) if stored is None else stored.decided_by
    asked = {} if stored is None else flatten(stored.asked)
    others = {key: f"{asked[key]} of the duration" if by == "duration" else by
              for key, by in others.items() if decided_by.get(key) != "user"}  # fmt: skip
    decided_by, values = decided_by | others, values_in_force(config)
    return {key: _row(key, values[key], decided_by[key], declared)
            for key, declared in declared_keys(config).items()}  # fmt: skip


def _of_parts() -> tuple[dict[str, str], _Declared]:
    """({part: what it says of itself}, the keys of the parts)."""
    from vit_jax.config import EVALUATORS
    from vit_jax.config.registries import ALL_REGISTRIES

    texts: dict[str, str] = {}
    keys: _Declared = {}
    for registry in ALL_REGISTRIES:
        for name in registry:
            part = registry.find(name)
            section = registry.section or ("evals.NAME" if registry is EVALUATORS else name)
            selector = "evals.NAME" if registry is EVALUATORS else registry.selector
            says = (inspect.getdoc(part) or "").partition("\n\n")[0].replace("\n", " ")
            texts[name] = f"{selector}={name}: {says}"
            for key, declared in registry.keys_of(part).items():
                keys.setdefault((f"{section}.{key}", declared), []).append(name)
    return texts, keys


def _row(key: str, value: Any, by: str, declared: "Key") -> Row:
    from vit_jax.config import is_free_on_resume
    from vit_jax.config.registries import REGISTRIES
    from vit_jax.run.setup.changes import KEYS_OF_THE_END

    resume = "past" if key in KEYS_OF_THE_END else "yes" if is_free_on_resume(key) else "no"
    value = "required" if value is ... else value
    choices = [", ".join(registry) for registry in REGISTRIES if registry.selector == key]
    form = choices[0] if choices else declared.describe()
    return Row(key, value, by, resume, f"{declared.meaning} ({form})")


def _plain(text: str) -> str:
    """`text` as a search compares it: "warm-up" finds "warmup"."""
    return re.sub(r"[-_ ]", "", text.lower())


def _find(word: str, keys: dict[str, Row], names: list[str], parts: _Declared) -> list[Row]:
    """The rows that `word` selects: of a part, of a section, of a key, or with this text.

    `keys`: the rows in force. `names`: of all `parts`.

    Raises:
      InputError: there are none; names the nearest.
    """
    from vit_jax.config import FAMILIES
    from vit_jax.config.other_words import flags_named, say_without_key

    lower = word.lower()
    if "-" in word and (own := FAMILIES.chosen_keys(word)):  # a model
        return [_row(f"model.{k}", key.default, f"with {word}", key) for k, key in own.items()]
    others = [(_row(key, declared.default, f"with {', '.join(having[:3])}", declared), having)
              for (key, declared), having in parts.items()]  # fmt: skip
    own_rows = [keys.get(row.key, row) for row, having in others
                if lower in map(str.lower, having)]  # fmt: skip
    if own_rows or (lower in map(str.lower, names) and f"{lower}.name" not in keys):
        return own_rows  # none, if the part has no keys; `loss` is a metric and a section
    rows = [*keys.values(), *(row for row, _ in others if row.key not in keys)]
    known_as = [flag.own_key for flag in flags_named(word)]
    for fits in (
        lambda row: row.key.startswith(f"{lower}.") and not row.decided_by.startswith("with "),
        lambda row: row.key == lower or row.key.endswith(f".{lower}"),
        lambda row: row.key in known_as,
        lambda row: _plain(word) in _plain(f"{row.key} {row.meaning}"),
    ):
        if found := [row for row in rows if fits(row)]:
            return found
    if said := say_without_key(word):
        raise InputError(f"{word}: no key; {said}")
    names += [name for row in rows for name in (*row.key.split("."), row.key)]
    names = [*dict.fromkeys(names)]
    raise InputError(f"{word}: no part, section, key or meaning has it; {nearest(word, names)}")
