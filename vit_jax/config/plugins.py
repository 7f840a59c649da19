"""Plug-ins: the user's own modules, listed in the config's `plugins`.

A plug-in is one Python file or one installed module. When imported, it adds parts to the registries
(docs/how_to/extend). The fields of these parts become
keys of the configs that list it. A run stores a copy of the file and its digest in WORKDIR/plugins.
A command that reads this workdir later uses code with the same digest that the user names; it runs
the stored copy only if the user trusts it.
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from vit_jax.base.errors import InputError, say_fault_of_file
from vit_jax.base.files import write_whole

logger = logging.getLogger("vit_jax")

_FOLDER, _DIGESTS = "plugins", "digests.json"
_NAME = re.compile(r"[\w-]+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*")  # name of a file or a module


class Plugin(NamedTuple):
    """An imported plug-in.

    name: as in `config.plugins`: for a file its name without folder, my_parts.py; for a module
      my_parts.
    module: the name of its module.
    file: path of its code.
    content: its code.
    """

    name: str
    module: str
    file: str
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of its code as a hex string."""
        return _digest(self.content)


# Plug-ins imported by this process, by name.
_PLUGINS: dict[str, Plugin] = {}

_importing: contextvars.ContextVar[str | None] = contextvars.ContextVar("importing", default=None)
_named: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("named", default=())
_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("trusted", default=False)
_beside: contextvars.ContextVar[pathlib.Path | None] = contextvars.ContextVar(
    "beside", default=None
)


@contextlib.contextmanager
def using(names: Sequence[str] = (), *, trusted: bool = False) -> Iterator[None]:
    """Import the plug-ins `names`; within the context, every `base_config()` includes them.

    `trusted`: whether copies stored in workdirs may run, as with --trust_plugins.

    Raises:
      InputError: as `import_plugins`.
    """
    named = import_plugins(names)
    tokens = _trusted.set(trusted), _named.set(named)
    try:
        yield
    finally:
        _trusted.reset(tokens[0])
        _named.reset(tokens[1])


@contextlib.contextmanager
def beside(folder: pathlib.Path) -> Iterator[None]:
    """Within the context, also look for plug-in files in `folder`, where the config file is."""
    token = _beside.set(folder)
    try:
        yield
    finally:
        _beside.reset(token)


def named_by_command() -> tuple[str, ...]:
    """Plug-ins of the innermost `using`."""
    return _named.get()


def importing() -> str | None:
    """Name of the module of the plug-in that is being imported; None: there is none."""
    return _importing.get()


def has_devices() -> bool:
    """Whether JAX has started its devices in this process. Does not import JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # there is no public name
    return bridge is not None and bridge.backends_are_initialized()


def module_of_file(name: str) -> str:
    """Name of the module that the file `name` becomes, as a plug-in or as a config file."""
    return f"vit_jax_plugins.{name.removesuffix('.py')}"


def find_plugin(name: str) -> Plugin:
    """The imported plug-in with this name in `config.plugins`.

    Raises:
      InputError: if it has not been imported.
    """
    if name not in _PLUGINS:
        raise InputError(
            f"plugins: {name!r} has not been imported; list it in base_config(plugins=[...]), or "
            f"give --config.plugins={name}"
        )
    return _PLUGINS[name]


def path_of(name: str) -> str:
    """The name of an imported plug-in on a command line in any folder: its file, or its module."""
    return find_plugin(name).file if name.endswith(".py") else name


def digests(names: Sequence[str]) -> dict[str, str]:
    """{"plug-in NAME": digest} for imported plug-ins."""
    return {f"plug-in {name}": find_plugin(name).digest for name in names}


def import_plugins(names: Sequence[str]) -> tuple[str, ...]:
    """Import plug-ins; return their names for `config.plugins`.

    Code with a known digest does not run again.

    Args:
      names: files ending in .py, in the working directory or the config file's folder; or installed
        modules, such as my_parts or lab.parts.

    Raises:
      InputError: a plug-in is not found, is not a single module, or fails; names the line.
    """
    if isinstance(names, str):
        raise InputError(f"plugins={names!r}: needs a list of names, e.g. [{names!r}]")
    return tuple(dict.fromkeys(_import(name).name for name in names))


def _import(text: str) -> Plugin:
    if text.endswith(".py"):
        file = _find_file(text)
        name, module_name = file.name, module_of_file(file.name)
    else:
        file = _find_module(text)
        name = module_name = text
    if not _NAME.fullmatch(name):
        raise InputError(f"plugins={text!r}: needs a file name of letters, digits, _ and -")
    return _execute(name, module_name, str(file), file.read_bytes())


def _find_file(text: str) -> pathlib.Path:
    folders = [pathlib.Path.cwd(), *filter(None, [_beside.get()])]
    for folder in folders:
        file = folder / pathlib.Path(text).expanduser()
        if file.is_file():
            return file.resolve()
    places = " or ".join(dict.fromkeys(map(str, folders)))
    raise InputError(f"plugins={text!r}: no such file in {places}")


def _find_module(text: str) -> pathlib.Path:
    if not _NAME.fullmatch(text):
        raise InputError(f"plugins={text!r}: needs a .py file, or the name of a module")
    try:
        spec = importlib.util.find_spec(text)
    except ModuleNotFoundError:  # the parent module is missing
        spec = None
    except Exception as e:  # the parent module may raise anything
        raise InputError(f"plugins={text!r}: {type(e).__name__}: {e}") from e
    if spec is None:
        raise InputError(
            f"plugins={text!r}: no such module is installed; for a file, add the ending: {text}.py"
        )
    origin = spec.origin or ""
    if spec.submodule_search_locations is not None or not origin.endswith(".py"):
        raise InputError(
            f"plugins={text!r}: not a single Python file; name the module that adds the parts, "
            f"e.g. {text}.parts"
        )
    return pathlib.Path(origin)


def _execute(name: str, module_name: str, file: str, content: bytes) -> Plugin:
    """Run exactly the code that was digested, unless the same code has run before.

    A module that the user has already imported from `file` is used as it is.
    """
    known = _find_known(_digest(content))
    if known is not None:
        return known
    for other in _PLUGINS.values():
        if other.file == file:
            raise InputError(
                f"plugins={name}: {file} has changed since this process read it; start Python "
                "(or the notebook's kernel) anew"
            )
        if _copy_name(other.name) == _copy_name(name):
            raise InputError(
                f"plugins={name}: {file} and {other.file} have the same name but different code, "
                "and a command runs one of them; take one run at a time, or rename a new file"
            )
    module = sys.modules.get(module_name)
    if getattr(module, "__file__", None) != file:
        module = _run(name, module_name, file, content)
    _PLUGINS[name] = Plugin(name, module_name, file, content)
    return _PLUGINS[name]


def _run(name: str, module_name: str, file: str, content: bytes) -> types.ModuleType:
    module = types.ModuleType(module_name)
    module.__file__ = file
    module.__package__ = module_name.rpartition(".")[0]
    sys.modules[module_name] = module  # dataclasses resolve annotations there
    had_devices, token = has_devices(), _importing.set(module_name)
    try:
        exec(compile(content, file, "exec"), vars(module))
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        del sys.modules[module_name]
        raise InputError(f"plugins={name}: {say_fault_of_file(e, file)}") from e
    finally:
        _importing.reset(token)
    if has_devices() and not had_devices:
        del sys.modules[module_name]
        raise InputError(
            f"plugins={name}: {file}: uses JAX devices while it is imported, before the processes "
            "of a job have connected; create its arrays inside functions, or with NumPy"
        )
    return module


def _find_known(digest: str | None) -> Plugin | None:
    """The imported plug-in with this digest; None: there is none."""
    return next((known for known in _PLUGINS.values() if known.digest == digest), None)


def store_plugins(names: Sequence[str], workdir: epath.Path) -> None:
    """Write the code and the digests of imported plug-ins to WORKDIR/plugins."""
    if not names:
        return
    folder = workdir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: find_plugin(name) for name in names}
    for name, plugin in found.items():
        write_whole(folder / _copy_name(name), plugin.content)
    text = json.dumps({name: plugin.digest for name, plugin in found.items()}, indent=2) + "\n"
    write_whole(folder / _DIGESTS, text)


def import_stored(names: Sequence[str], workdir: epath.Path) -> None:
    """Import the plug-ins of the run in `workdir` without running code that nobody named.

    Each plug-in is one that the user has named, with the digest that the run stored; or else the
    run's own copy, if the user trusts it.

    Raises:
      InputError: no named code has the digest and the copy is not trusted; or the copy is damaged.
    """
    folder = workdir / _FOLDER
    stored, missing = _read_digests(folder / _DIGESTS) if names else {}, []
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(f"{workdir}/config.json: plugins={name!r}: not the name of a plug-in")
        known = _PLUGINS.get(name) or _find_known(stored.get(name))
        if known is None:
            missing.append(name)
        elif stored.get(name, known.digest) != known.digest and _has_saved(workdir):
            raise InputError(
                f"--workdir={workdir}: the plug-in {name} has changed since this run began; "
                f"restore it (the run's copy: {folder / _copy_name(name)}), use a new --workdir, "
                f"or delete {folder} to continue with the changed plug-in"
            )
        else:
            _PLUGINS[name] = known._replace(name=name)
    if missing and not _trusted.get():
        raise InputError(
            f"{workdir}: this run uses the plug-ins {', '.join(missing)}, which nobody named; give "
            f"--config.plugins=FILE,..., or review {folder}, then run it with --trust_plugins"
        )
    for name in missing:
        _execute_copy(name, stored.get(name), folder / _copy_name(name))


def _has_saved(workdir: epath.Path) -> bool:
    """Whether the run has a checkpoint, i.e. its plug-ins have had an effect."""
    checkpoints = workdir / "checkpoints"
    return checkpoints.exists() and any(step.name.isdecimal() for step in checkpoints.iterdir())


def _execute_copy(name: str, digest: str | None, copy: epath.Path) -> None:
    try:
        content = copy.read_bytes()
    except OSError as e:
        raise InputError(f"{copy}: cannot be read ({e}); give --config.plugins=FILE") from None
    if _digest(content) != digest:
        raise InputError(f"{copy}: damaged, its digest differs; give --config.plugins=FILE")
    _execute(name, module_of_file(name), os.fspath(copy), content)


def _read_digests(path: epath.Path) -> dict[str, str]:
    try:
        stored = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: not valid JSON ({e})") from None
    if not (isinstance(stored, dict) and all(isinstance(v, str) for v in stored.values())):
        raise InputError(f"{path}: damaged; needs a dict of digests by name")
    return stored


def _copy_name(name: str) -> str:
    """Name of the plug-in's file in WORKDIR/plugins."""
    return name if name.endswith(".py") else f"{name}.py"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def warn_of_removal(old: str, new: str) -> None:
    """Warn once that a plug-in uses `old`, which version 0.4 removes."""
    logger.warning("a plug-in uses %s, which version 0.4 removes; use %s", old, new)
