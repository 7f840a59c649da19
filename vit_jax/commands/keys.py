"""Explain config keys: value, who decided it, meaning, and whether it may change on resume.

  python -m vit_jax.main keys peak_lr
  python -m vit_jax.main keys mae
  python -m vit_jax.main keys optimizer --config=folder --config.optimizer.name=lion
  python -m vit_jax.main keys warm-up --workdir=runs/quickstart

A WORD is a part (an objective, a model, an optimizer, an op and so on), a section, a key, or a text
that is searched in keys and meanings. Values are those of --config or of the run in --workdir, else
the defaults; without a WORD, it shows the keys that are in force there.

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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.commands.flags import define_config_flags, define_format_flag
from vit_jax.job import exit_codes

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from vit_jax.config import Key

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
    config, decided_by = _read(flags)
    keys, parts = _in_force(config, decided_by), _of_parts()
    rows = list(dict.fromkeys(row for word in flags.words for row in _find(word, keys, parts)))
    rows = rows if flags.words else [*keys]
    if flags.format == "json":
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return exit_codes.DONE
    shown = sys.stdout.isatty()
    console = Console(width=None if shown else _WIDE)
    for name, says in parts.says.items():
        if name.lower() in map(str.lower, flags.words):
            console.print(Text(says))
    columns = (Column(name.replace("_", " "), overflow="fold") for name in Row._fields)
    table = Table(*columns, box=box.SIMPLE_HEAD if shown else None)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    if rows:
        console.print(table)
    return exit_codes.DONE


def _read(flags: argparse.Namespace) -> "tuple[ConfigDict, dict[str, str]]":
    """The config that the flags select, and who decides each key."""
    from vit_jax.base import files
    from vit_jax.config import base_config
    from vit_jax.config.stored import read_stored
    from vit_jax.config.text import apply_overrides
    from vit_jax.run.resolve import Opener, continue_run, find_open
    from vit_jax.run.validation import load_named

    by_user, stored = [key for key, _ in flags.overrides], None
    if flags.workdir is not None:
        stored = read_stored(files.absolute(flags.workdir))
        config = stored.resolved
    else:
        config = load_named(flags.config) if flags.config else base_config()
    collect_faults(apply_overrides(config, flags.overrides))
    _, decided_by = continue_run(config, Opener(), None, by_user)
    others = find_open(config) if stored is None else stored.decided_by
    others = {key: by for key, by in others.items() if decided_by.get(key) != "user"}
    return config, decided_by | others


class _Parts(NamedTuple):
    """All parts: what each says of itself, and {(key, declaration): the parts that have it}."""

    says: dict[str, str]
    keys: "dict[tuple[str, Key], list[str]]"


def _of_parts() -> _Parts:
    from vit_jax.config import EVALUATORS, OPS
    from vit_jax.config.registries import REGISTRIES

    found = _Parts({}, {})
    for registry in (*REGISTRIES, EVALUATORS, OPS):
        for name in registry:
            part = registry.find(name)
            section = registry.section or ("evals.NAME" if registry is EVALUATORS else name)
            selector = "evals.NAME" if registry is EVALUATORS else registry.selector
            says = (inspect.getdoc(part) or "").partition("\n\n")[0].replace("\n", " ")
            found.says[name] = f"{selector}={name}: {says}"
            for key, declared in registry.keys_of(part).items():
                found.keys.setdefault((f"{section}.{key}", declared), []).append(name)
    return found


def _in_force(config: "ConfigDict", decided_by: dict[str, str]) -> list[Row]:
    from vit_jax.config import declared_keys, values_in_force

    values = values_in_force(config)
    return [
        _row(key, values[key], decided_by[key], declared)
        for key, declared in declared_keys(config).items()
    ]


def _row(key: str, value: Any, by: str, declared: "Key") -> Row:
    from vit_jax.config import FREE_ON_RESUME
    from vit_jax.config.registries import REGISTRIES
    from vit_jax.run.changes import KEYS_OF_THE_END

    resume = "past" if key in KEYS_OF_THE_END else "yes" if key.startswith(FREE_ON_RESUME) else "no"
    value = "required" if value is ... else value
    choices = [", ".join(registry) for registry in REGISTRIES if registry.selector == key]
    form = choices[0] if choices else declared.describe()
    return Row(key, value, by, resume, f"{declared.meaning} ({form})")


def _plain(text: str) -> str:
    """`text` as a search compares it: "warm-up" finds "warmup"."""
    return re.sub(r"[-_ ]", "", text.lower())


def _find(word: str, keys: Iterable[Row], parts: _Parts) -> list[Row]:
    """The rows that `word` selects: of a part, of a section, of a key, or with this text.

    Raises:
      InputError: there are none; names the nearest.
    """
    from vit_jax.config import FAMILIES

    lower = word.lower()
    known, in_force = {name.lower() for name in parts.says}, {row.key: row for row in keys}
    if "-" in word and (own := FAMILIES.chosen_keys(word)):  # a model
        return [_row(f"model.{k}", key.default, f"with {word}", key) for k, key in own.items()]
    others = {
        (key, declared): _row(key, declared.default, f"with {', '.join(names[:3])}", declared)
        for (key, declared), names in parts.keys.items()
    }
    if lower in known:
        chosen = [key for key, names in parts.keys.items() if lower in map(str.lower, names)]
        return [in_force.get(key, others[key, declared]) for key, declared in chosen]
    rows = [*in_force.values(), *(row for row in others.values() if row.key not in in_force)]
    for fits in (
        lambda row: row.key.startswith(f"{lower}.") and not row.decided_by.startswith("with "),
        lambda row: row.key == lower or row.key.endswith(f".{lower}"),
        lambda row: _plain(word) in _plain(f"{row.key} {row.meaning}"),
    ):
        if found := [row for row in rows if fits(row)]:
            return found
    names = [*parts.says, *(row.key.rpartition(".")[2] for row in rows)]
    raise InputError(f"{word}: no part, section, key or meaning has it; {nearest(word, names)}")
