"""A config as text: the files that make one, and overrides by name on the command line."""

import ast
import importlib.util
import logging
import pathlib
import shlex
import types
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

import vit_jax
from vit_jax.config import plugins
from vit_jax.config.base import TUPLES_OF_STRINGS, default_config, flatten
from vit_jax.config.evals import OPTIONAL_KEYS
from vit_jax.config.stored import todays_key
from vit_jax.errors import InputError, nearest, say_fault_of_file

logger = logging.getLogger("vit_jax")


def shipped_configs() -> dict[str, pathlib.Path]:
    """{name: file} of the configs that come with the package, by name.

    They lie in configs/, beside the package in the repository, and within it in a wheel.
    """
    package = pathlib.Path(vit_jax.__file__).parent
    within = package / "configs"
    folder = within if within.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(name: str) -> pathlib.Path:
    """The file called `name`: a path, or one of `shipped_configs`; a file of that path comes first.

    Raises:
      InputError: there is neither.
    """
    path, shipped = pathlib.Path(name), shipped_configs()
    if path.is_file():
        return path
    if name in shipped:
        return shipped[name]
    hint = nearest(path.stem, list(shipped))
    raise InputError(f"no file {name!r}, and no config of that name; {hint}")


def import_config(path: pathlib.Path) -> types.ModuleType:
    """The module of a config file; raises what the file raises, InputError if it is no Python."""
    spec = importlib.util.spec_from_file_location("vit_jax_config", path.absolute())
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_config(spec: str) -> ConfigDict:
    """Runs `get_config` of the file that `spec` ("NAME" or "NAME:words") names.

    NAME is what `find_config` takes.

    Raises:
      InputError: no such file, no `get_config`, or a fault in it, with the line.
    """
    name, _, arg = spec.partition(":")
    path = pathlib.Path(name)
    try:
        path = find_config(name)
        with plugins.beside(path.absolute().parent):
            config = import_config(path).get_config(arg)
    except InputError as e:
        raise InputError(f"--config={spec}: {e}") from None
    except Exception as e:  # whatever a user's file raises is the file's fault
        said = say_fault_of_file(e, str(path.absolute()), str(path))
        raise InputError(f"--config={spec}: {said}") from e
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise InputError(f"--config={spec}: get_config gives {got}; it must return a ConfigDict")
    return config


def _parse_value(text: str, kind: type, optional: bool, of_strings: bool = False) -> Any:
    """`text` as a value of `kind`; raises ValueError saying what was needed.

    A tuple is one `of_strings`, else of numbers.
    None is spelled so, as `none` is a value of its own for some keys (`model.pos_embed`).
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
        raise ValueError(f"needs numbers with commas between them; a single one is {text},")
    if kind is tuple and not isinstance(value, tuple):
        raise ValueError("needs numbers with commas between them, e.g. 0.5,0.5,0.5")
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"needs a number or several, e.g. 32 or 32,48{or_none}")
    return value


def _hint(key: str, text: str, known: Sequence[str]) -> str:
    """What to write instead of `--config.key=text`, whose key is none of `known`."""
    renamed = todays_key(key)
    if renamed in known:
        return f"it is called {renamed} now: {shlex.quote(f'--config.{renamed}={text}')}"
    below = [k for k in known if k.startswith(key + ".")]
    return f"it holds {', '.join(below)}" if below else nearest(key, known)


def apply_overrides(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Sets `key` to `text` for each override, in place; returns the faults instead of raising.

    `plugins` is passed over: whoever reads the command line imports them first, with
    `plugins.using`, and `base_config()` then has them and their keys.
    """
    faults = []
    optional = {k for k, v in flatten(default_config(config.plugins)).items() if v is None}
    for key, text in overrides:
        if key == "plugins":
            continue
        known = flatten(config)
        if key not in known:
            faults.append(f"--config.{key}: no such key; {_hint(key, text, list(known))}")
            continue
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        kind = node.get_type(leaf)
        try:
            # An entry of `evals` is typed by its helper.
            in_evals = key.startswith("evals.") and leaf in OPTIONAL_KEYS
            may_be_none = key in optional or in_evals
            with node.ignore_type():
                node[leaf] = _parse_value(text, kind, may_be_none, key in TUPLES_OF_STRINGS)
        except ValueError as e:
            faults.append(f"--config.{key}={text!r}: {e}")
    return faults
