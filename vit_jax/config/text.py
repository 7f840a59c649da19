"""Config files, and overrides on the command line."""

import ast
import functools
import importlib.util
import logging
import operator
import pathlib
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

import vit_jax
from vit_jax.base.errors import InputError, nearest, say_fault_of_file
from vit_jax.config import plugins
from vit_jax.config.base import declared_keys, default_config
from vit_jax.config.evals import EVALUATORS, entry_like
from vit_jax.config.node import NoSuchKeyError, WrongTypeError, flatten, nearest_key
from vit_jax.config.parts import Key
from vit_jax.config.registries import ALL_REGISTRIES, OPS, REGISTRIES

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
    # The module gets the name of a plug-in: a file that is both does not run twice.
    name = plugins.module_of_file(path.name)
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
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
            module = import_config(path)
            if not hasattr(module, "get_config"):
                raise InputError(f"{path}: has no function get_config(arg)")
            config = module.get_config(arg)
    except (NoSuchKeyError, WrongTypeError) as e:
        said = say_fault_of_file(e, str(path.absolute()), str(path))
        raise InputError(f"--config={spec}: {said}") from None
    except InputError as e:
        raise InputError(f"--config={spec}: {e}") from None
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        said = say_fault_of_file(e, str(path.absolute()), str(path))
        raise InputError(f"--config={spec}: {said}") from e
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise InputError(f"--config={spec}: get_config returned {got}; it must return a ConfigDict")
    parts = [part for registry in ALL_REGISTRIES for part in registry.values()]
    if path.name not in config.plugins and any(part in parts for part in _classes_of(module)):
        raise InputError(
            f"--config={spec}: {path} adds parts, which its run has to keep; name the file itself "
            "in it: base_config(plugins=[__file__])"
        )
    return config


def _classes_of(module: types.ModuleType) -> list[type]:
    """The classes that `module` defines."""
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return [value for value in found if value.__module__ == module.__name__]


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
        if value is None and re.fullmatch(r"\w+(,\w+)*", text):  # names need no quotes
            return tuple(text.split(","))
        if not (isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)):
            raise ValueError("needs a list of strings in quotes, e.g. ['one', 'another']")
        return value
    if kind is tuple and type(value) in (int, float):
        return (value,)
    if kind is tuple and not isinstance(value, tuple):
        raise ValueError("needs numbers separated by commas, e.g. 0.5,0.25 or 64,32")
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"needs one or more numbers, e.g. 32 or 32,48{or_none}")
    return value


def _set_entry(config: ConfigDict, name: str, text: str, others: Sequence[ConfigDict]) -> None:
    """Take away the entry `name` of `evals`, or make one of the evaluator `text` like `others`."""
    evals = config.evals
    if text == "None" and name in evals:
        del evals[name]
    elif text == "None":
        raise ValueError(f"there is no such entry; {nearest(name, list(evals))}")
    elif text in EVALUATORS:
        evals[name] = entry_like(text, config, [*evals.values(), *others])
    else:
        raise ValueError(f"needs None or an evaluator; {nearest(text, list(EVALUATORS))}")


def change_op(ops: str, name: str, text: str) -> str:
    """The ops `ops` of a key, with the op `name` changed in each view.

    Args:
      ops: such as "decode|resize(72)|flip"; of several views, joined by ";".
      text: "None" takes the op away. Else its arguments, such as "2, 10" or "size=64": the op gets
        them, or is added after the last op that runs where it does; `decode` comes first.

    Raises:
      ValueError: there is no such op, or a view has it several times.
    """
    part = OPS.find(name)
    bare = text == "" or (text.lower() == "true" and not part.declared())
    text = text.strip()[1:-1] if re.fullmatch(r"\s*\([^()]*\)\s*", text) else text
    call = name if bare else f"{name}({text})"
    views = [[op.strip() for op in view.split("|") if op.strip()] for view in ops.split(";")]
    names = [[op.partition("(")[0] for op in view] for view in views]
    if any(view.count(name) > 1 for view in names):
        raise ValueError(f"{ops!r} has several; set the whole text instead")
    is_new = not any(name in view for view in names)
    if is_new and text == "None":
        raise ValueError(f"{ops!r} has no {name}")
    for view, known in zip(views, names, strict=True):
        if name in known:
            place = known.index(name)
            view[place : place + 1] = [] if text == "None" else [call]
        elif is_new:
            on_device = [OPS.find(other).on_device for other in known]
            place = len(view) if part.on_device else (*on_device, True).index(True)
            view.insert(0 if part.decodes else place, call)
    return "; ".join(map("|".join, views))


def apply_overrides(
    config: ConfigDict, overrides: Sequence[tuple[str, str]], flag: str = "--config."
) -> list[str]:
    """Set each `key` to its parsed `text`, in place; return the faults.

    `evals.NAME` is None or an evaluator, and `data.ops.NAME` None or the arguments of an op; see
    `_set_entry` and `change_op`.

    Skips `plugins`: the caller imports them first, with `plugins.using`, so that `base_config()`
    includes them and their keys.

    `flag` begins a fault, before the key.
    """
    faults = []
    of_parts = {f"{registry.section}.{k}": known for registry in REGISTRIES
                for k, known in registry.keys_of_parts().items()}  # fmt: skip
    defaults = flatten(default_config(config.get("plugins") or ()))
    others = [*config.evals.values()]  # one that is taken away still says what a new one needs
    # Evaluators come before their keys.
    for key, text in sorted(overrides, key=lambda pair: not re.fullmatch(r"evals\.[^.]+", pair[0])):
        if key == "plugins":
            continue
        declared, known = of_parts | declared_keys(config), flatten(config)
        parent, _, leaf = key.rpartition(".")
        try:
            if parent == "evals":
                _set_entry(config, leaf, text, others)
            elif parent in declared and declared[parent].form == "ops":
                _set(config, parent, change_op(known[parent], leaf, text))
            elif key not in known:
                faults.append(f"{flag}{key}: no such key; {nearest_key(key, list(known))}")
            else:
                default = defaults.get(key, declared[key].default if key in declared else ...)
                _set(config, key, text, default is None, declared.get(key))
        except ValueError as e:
            faults.append(f"{flag}{key}={text!r}: {e}")
    return faults


def _set(
    config: ConfigDict, key: str, text: str, optional: bool = False, declared: Key | None = None
) -> None:
    """Set `key` to the parsed `text`; raises ValueError that states the expected form."""
    *parents, leaf = key.split(".")
    node = functools.reduce(operator.getitem, parents, config)
    choices = declared.choices if declared else ()
    if optional and text == "None" and "none" in choices:
        logger.warning("--config.%s=None: takes the default; the choice none is in small letters",
                       key)  # fmt: skip
    if optional and text == "none" and "none" not in choices:
        raise ValueError("write None, with a capital N")
    of_strings = declared is not None and declared.item is str
    kind = node.get_type(leaf)
    form = declared.form if declared is not None else ""
    if (form == "sizes" and " at " in text) or (form == "draws" and not text.isdecimal()):
        kind, text = str, text.strip("'\"")  # a sweep needs quotes, for the commas
    with node.ignore_type():
        node[leaf] = _parse_value(text, kind, optional, of_strings)
