"""The config that a run stores in config.json; files of another format are rejected."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import plugins
from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS, entry_keys, typed_entry
from vit_jax.errors import InputError, check_version, collect_faults, nearest

FORMAT_VERSION = 2  # of config.json, stored as `format_version`

# Keys that may change on resume: they affect where and how a run is executed, not its result.
FREE_ON_RESUME = ("auto", "mesh.", "checkpoint.", "stop.", "log.", "evals.", "job.", "study.",
                  "data.data_dir", "data.reader", "data.max_corrupt_fraction",
                  "model.remat", "model.remat_layers", "model.kernels")  # fmt: skip


# Keys of an `evals` entry that do not affect measured values.
_FREE_IN_EVALS = (".every", ".batch_size", ".data_dir")


def changed_keys(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """{key: (old value, new value)} for changed keys that must not change on resume.

    Plug-ins may be added, together with those of their keys that keep the default.
    """
    a, b = flatten(default_config(new.plugins)) | flatten(old), flatten(new)
    changed = {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.startswith(FREE_ON_RESUME)
    }
    if {*old.plugins} <= {*new.plugins}:
        changed.pop("plugins", None)
    return changed


def say_changes(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """Describe the result of `changed_keys`, with the flag that restores each old value."""
    return [
        f"{key}: was {was!r}, now {now!r}; keep the old value with "
        f"{shlex.quote(f'--config.{key}={_written(key, was)}')}"
        for key, (was, now) in changed.items()
    ]


def _written(key: str, value: Any) -> Any:
    """A value in the form that the command line takes."""
    return ",".join(value) if key == "plugins" else value


def changed_evals(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Like `changed_keys`, for the keys of `evals` that affect measured values."""
    entries = {
        name: entry.to_dict()
        for name, entry in new.evals.items()
        if name in old.evals or not str(entry.get("split")).endswith("?")
    }
    a, b = flatten(old.evals, "evals."), flatten(ConfigDict(entries), "evals.")
    return {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.endswith(_FREE_IN_EVALS)
    }


def to_json(config: ConfigDict) -> str:
    """The config as the text of config.json; `from_json` restores an equal config."""
    return json.dumps({"format_version": FORMAT_VERSION} | config.to_dict(), indent=2) + "\n"


def from_json(text: str, where: str = "config.json") -> ConfigDict:
    """Parse a config written by `to_json`; `where` names it in errors.

    Raises:
      InputError: the text has another format or keys that this version does not know (names them
        all), or one of its plug-ins has not been imported.
    """
    return _from_stored(_parse(text, where), where)


def _from_stored(stored: dict[str, Any], where: str) -> ConfigDict:
    """The config of a parsed config.json."""
    faults = []
    with _naming(where):
        config = default_config(_plugin_names(stored))
        for name, entry in stored.pop("evals").items():
            faults += _fill_entry(config.evals, name, entry)
    faults += _fill(config, stored, "")
    collect_faults(faults, f"{where} is from another version of vit_jax; use that version")
    return config


def _parse(text: str, where: str) -> dict[str, Any]:
    """Content of a config.json."""
    with _naming(where):
        stored = json.loads(text)
        version = stored.pop("format_version")
    check_version(where, version, FORMAT_VERSION)
    return stored


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn errors raised by malformed content into an InputError that names `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(*e.faults, where=where) from None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise InputError(
            f"{where}: damaged ({type(e).__name__}: {e}). Restore an intact copy; or remove it "
            "and run the run's own command, listed in starts.jsonl beside it, to write it again"
        ) from None


def _fill_entry(evals: ConfigDict, name: str, entry: dict[str, Any]) -> list[str]:
    """Add the stored `entry` to `evals`; return the faults."""
    kind = entry["type"]
    if kind not in EVALUATORS:
        return [f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}"]
    wanted, found = entry_keys(kind), set(entry)
    if wanted == found:
        evals[name] = typed_entry(kind, entry)
    missing = [f"evals.{name}.{key}: missing" for key in sorted(wanted - found)]
    return missing + [f"evals.{name}.{key}: no such key" for key in sorted(found - wanted)]


def _fill(node: ConfigDict, values: dict[str, Any], prefix: str) -> list[str]:
    """Set the stored `values` in the section `prefix` of a config; return the faults."""
    faults = []
    for key, value in values.items():
        if key not in node:
            faults.append(f"{prefix}{key}: no such key; {nearest(key, list(node))}")
        elif isinstance(node[key], ConfigDict) and isinstance(value, dict):
            faults += _fill(node[key], value, f"{prefix}{key}.")
        else:
            try:
                node[key] = tuple(value) if isinstance(value, list) else value
            except TypeError as e:
                faults.append(f"{prefix}{key}: {e}")
    return faults


def read_config(workdir: epath.Path) -> ConfigDict:
    """Read the config of the run in `workdir` and import its plug-ins.

    Raises:
      InputError: as `from_json` and `plugins.import_stored`.
    """
    path = workdir / "config.json"
    stored = _parse(path.read_text(), str(path))
    with _naming(str(path)):
        names = _plugin_names(stored)
    plugins.import_stored(names, workdir)  # only after the file's format is known to be readable
    return _from_stored(stored, str(path))


def _plugin_names(stored: dict[str, Any]) -> tuple[str, ...]:
    """Plug-ins listed in a parsed config.json."""
    return tuple(stored["plugins"])
