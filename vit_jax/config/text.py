"""Config files, and overrides on the command line."""

import ast
import difflib
import importlib.util
import logging
import pathlib
import types
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

import vit_jax
from vit_jax.base.errors import InputError, nearest, say_fault_of_file
from vit_jax.config import plugins
from vit_jax.config.base import declared_keys, default_config, flatten
from vit_jax.config.registries import REGISTRIES

logger = logging.getLogger("vit_jax")


def shipped_configs() -> dict[str, pathlib.Path]:
    """{name: file} for the configs that come with the package, sorted by name.

    The folder configs/ is beside the package in the repository, and inside it in a wheel.
    """
    package = pathlib.Path(vit_jax.__file__).parent
    within = package / "configs"
    folder = within if within.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(name: str) -> pathlib.Path:
    """The config file called `name`: an existing path or, if there is none, a shipped config.

    Raises:
      InputError: if there is neither.
    """
    path, shipped = pathlib.Path(name), shipped_configs()
    if path.is_file():
        return path
    if name in shipped:
        return shipped[name]
    hint = nearest(path.stem, list(shipped))
    raise InputError(f"no file {name!r}, and no shipped config of that name; {hint}")


def import_config(path: pathlib.Path) -> types.ModuleType:
    """Import a config file; raises whatever the file raises, InputError if it is not Python."""
    spec = importlib.util.spec_from_file_location("vit_jax_config", path.absolute())
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_config(spec: str) -> ConfigDict:
    """Call `get_config` of the config file in `spec`: "NAME" or "NAME:words".

    NAME is a path or the name of a shipped config (`find_config`).

    Raises:
      InputError: no such file, no `get_config`, or the file fails; names the line.
    """
    name, _, arg = spec.partition(":")
    path = pathlib.Path(name)
    try:
        path = find_config(name)
        with plugins.beside(path.absolute().parent):
            config = import_config(path).get_config(arg)
    except InputError as e:
        raise InputError(f"--config={spec}: {e}") from None
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        said = say_fault_of_file(e, str(path.absolute()), str(path))
        raise InputError(f"--config={spec}: {said}") from e
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise InputError(f"--config={spec}: get_config returned {got}; it must return a ConfigDict")
    return config


def _parse_value(text: str, kind: type, optional: bool, of_strings: bool = False) -> Any:
    """Parse `text` as a value of type `kind`; raises ValueError that states the expected form.

    Tuples hold strings if `of_strings`, else numbers. Only "None" means None, since "none" is a
    value of some keys (`model.pos_embed`).
    """
    if optional and text == "None":
        return None
    if kind is str:
        return text
    or_none = " or None" if optional else ""
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"needs true or false{or_none}")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"needs an int{or_none}") from None
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"needs a number{or_none}") from None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        value = None
    value = tuple(value) if isinstance(value, list) else value
    if of_strings:
        if not (isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)):
            raise ValueError("needs a list of strings in quotes, e.g. ['one', 'another']")
        return value
    if kind is tuple and type(value) in (int, float):
        raise ValueError(f"needs a list of numbers; write a single one as {text},")
    if kind is tuple and not isinstance(value, tuple):
        raise ValueError("needs numbers separated by commas, e.g. 0.5,0.5,0.5")
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"needs one or more numbers, e.g. 32 or 32,48{or_none}")
    return value


def _hint(key: str, known: Sequence[str]) -> str:
    """The hint for an unknown `key`: the keys of a section, `known` keys whose last component
    matches, else the nearest.

    `peak_lr` and `lr` suggest `optimizer.peak_lr`, whatever section they were written in;
    `batch_size` suggests the top-level key `global_batch_size`, not the key of an evaluator.
    """
    if below := [name for name in known if name.startswith(key + ".")]:
        return f"its keys are {', '.join(below)}"
    leaf = key.rpartition(".")[2]
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    of_no_section = [name for name in by_leaf if f"_{key}_" in f"_{name}_" and name in known]
    found = (
        of_no_section
        or by_leaf.get(leaf)
        or [name for other in by_leaf if f"_{leaf}_" in f"_{other}_" for name in by_leaf[other]]
        or [
            name
            for other in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
            for name in by_leaf[other]
        ]
    )
    if not found:
        return nearest(key, known)
    if "." in key:
        found = difflib.get_close_matches(key, found, n=1, cutoff=0.0)
    return f"did you mean {' or '.join(found)}?"


def apply_overrides(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Set each `key` to its parsed `text`, in place; return the faults.

    Skips `plugins`: the caller imports them first, with `plugins.using`, so that `base_config()`
    includes them and their keys.
    """
    faults = []
    of_parts = {f"{registry.section}.{k}": known for registry in REGISTRIES
                for k, known in registry.keys_of_parts().items()}  # fmt: skip
    declared = of_parts | declared_keys(config)
    default = flatten(default_config(config.get("plugins") or ())) | {
        key: known.default for key, known in declared.items() if key.startswith("evals.")
    }
    for key, text in overrides:
        if key == "plugins":
            continue
        known = flatten(config)
        if key not in known:
            faults.append(f"--config.{key}: no such key; {_hint(key, list(known))}")
            continue
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        kind = node.get_type(leaf)
        try:
            of_strings = key in declared and declared[key].item is str
            with node.ignore_type():
                node[leaf] = _parse_value(text, kind, default.get(key, ...) is None, of_strings)
        except ValueError as e:
            faults.append(f"--config.{key}={text!r}: {e}")
    return faults
