"""The config that a run stores in config.json: as asked for, as resolved, and who decided each key.

{"format_version": 4, "asked": {...}, "resolved": {...}, "decided_by": {"data.order": "data"}}
"""

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict

from vit_jax.base.addresses import hide
from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.config import plugins
from vit_jax.config.base import (
    add_plugins,
    declared_keys,
    default_config,
    flatten,
    with_values,
)
from vit_jax.config.durations import parse_duration
from vit_jax.config.evals import EVALUATORS, make_entry
from vit_jax.config.sections import SECTIONS
from vit_jax.config.upgrades import FORMAT, upgrade

# What a resumed run may change.
_FREE_SECTIONS = {"mesh", "checkpoint", "stop", "log", "evals", "job", "study"}
_FREE_KEYS = {"auto", "data.data_dir", "data.reader", "data.max_corrupt_fraction", "data.tokenizer",
              "data.exclude",  # its content is in the fingerprint of the data
              "model.remat", "model.remat_layers", "model.kernels"}  # fmt: skip


# Keys of an `evals` entry that do not affect measured values.
_FREE_IN_EVALS = (".every", ".batch_size", ".data_dir")


def keep_resolved(asked: ConfigDict, stored: "StoredConfig") -> dict[str, Any]:
    """{key: resolved value} for the keys of `asked` that are as the stored run has them.

    A key has changed only if it differs from what was asked for and from what was resolved then.
    """
    was_asked, was = flatten(stored.asked), flatten(stored.resolved)
    return {
        key: was[key]
        for key, value in flatten(asked).items()
        if key in was and value in (was_asked.get(key, value), was[key])
    }


def is_free_on_resume(key: str) -> bool:
    """Whether a resumed run may change `key`: it decides only where and how a run executes."""
    return key in _FREE_KEYS or key.partition(".")[0] in _FREE_SECTIONS


def changed_keys(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """{key: (old value, new value)} for changed keys that must not change on resume.

    Plug-ins may be added, together with their keys that keep the default.
    """
    a, b = flatten(default_config(new.plugins)) | flatten(old), flatten(new)
    changed = {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not is_free_on_resume(key)
    }
    if all(str(ids).endswith(".npz") for ids in changed.get("data.subset", "?")):
        changed.pop("data.subset")  # a file of record ids that moved, as of `data.exclude`
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


class StoredConfig(NamedTuple):
    """The content of config.json.

    asked: what the config file and the command gave.
    resolved: what the run does, with all that its data, its source and its devices decide.
    decided_by: {key: who decided it}; see `run.setup.resolve`.
    """

    asked: ConfigDict
    resolved: ConfigDict
    decided_by: Mapping[str, str]

    def to_json(self) -> str:
        """The text of config.json."""
        configs = {"asked": self.asked.to_dict(), "resolved": self.resolved.to_dict()}
        content = {"format_version": FORMAT} | configs | {"decided_by": dict(self.decided_by)}
        return json.dumps(content, indent=2) + "\n"


def parse_stored(text: str, workdir: epath.Path) -> StoredConfig:
    """The content `text` of config.json in `workdir`; imports the plug-ins of the run.

    Raises:
      InputError: the text is damaged, has another format or keys that this version does not know
        (names them all); or as `plugins.import_stored`.
    """
    where = str(workdir / "config.json")
    asked, resolved, decided_by = _parse(text, where)
    with _naming(where):
        names = tuple(dict.fromkeys([*resolved["plugins"], *asked["plugins"]]))
    plugins.import_stored(names, workdir)  # only after the file's format is known to be readable
    config = _from_dict(resolved, where)
    config = with_values(config, _meant_before(config, resolved))
    decided_by = dict.fromkeys(flatten(config), "default") | decided_by  # also of later keys
    return StoredConfig(_from_dict(asked, where), config, decided_by)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    with _naming(where):
        content = upgrade(json.loads(hide(text)))  # of earlier versions
        asked, resolved = content["asked"], content["resolved"]
        for name in filter(None, SECTIONS):
            for values in (asked, resolved):
                if not isinstance(values.get(name, {}), dict):
                    raise TypeError(f"{name}: {values[name]!r} is no section")
        decided_by = dict(content["decided_by"])
        for name, by in decided_by.items():
            if not isinstance(by, str):
                raise TypeError(f"decided_by: {name}={by!r} is no text")
        return asked, resolved, decided_by


def to_json(config: ConfigDict) -> str:
    """A config as text; `from_json` restores an equal config."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str, where: str = "config") -> ConfigDict:
    """Parse a config written by `to_json`; `where` names it in errors.

    Raises:
      InputError: it is damaged, it has keys that this version does not know (names them all), or
        one of its plug-ins has not been imported.
    """
    with _naming(where):
        values = json.loads(text)
    return _from_dict(values, where)


def _from_dict(values: dict[str, Any], where: str) -> ConfigDict:
    faults = []
    with _naming(where):
        config = default_config(tuple(values["plugins"]))
        for name, entry in values["evals"].items():
            faults += _fill_entry(config.evals, name, entry)
    faults += _fill(config, {key: value for key, value in values.items() if key != "evals"}, "")
    collect_faults(faults, f"{where} is from another version of vit_jax; use that version")
    return config


def _meant_before(config: ConfigDict, values: dict[str, Any]) -> dict[str, Any]:
    """{key: its `before`} of the keys of `config` that the resolved `values` of a run lack.

    What was asked for keeps its defaults: it is compared with what is asked for now.
    """
    stored = flatten(ConfigDict(values))
    return {
        key: declared.before
        for key, declared in declared_keys(config).items()
        if declared.before is not ... and key not in stored
    }


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn errors raised by malformed content into an InputError that names `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(*e.faults, where=where) from None
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as e:
        raise InputError(
            f"{where}: damaged ({type(e).__name__}: {e}). Restore an intact copy; or remove it "
            "and run the run's own command, listed in starts.jsonl beside it, to write it again"
        ) from None


def _fill_entry(evals: ConfigDict, name: str, entry: dict[str, Any]) -> list[str]:
    """Add the stored `entry` to `evals`; return the faults."""
    kind = entry["type"]
    if kind not in EVALUATORS:
        return [f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}"]
    known = EVALUATORS.find(kind).declared()
    faults = [f"evals.{name}.{key}: no such key" for key in sorted(entry.keys() - {"type", *known})]
    faults += [f"evals.{name}.{key}: missing" for key, declared in known.items()
               if declared.default is ... and key not in entry]  # fmt: skip
    if not faults:
        evals[name] = make_entry(kind, **{k: v for k, v in entry.items() if k != "type"})
    return faults


def _fill(node: ConfigDict, values: dict[str, Any], prefix: str) -> list[str]:
    """Set the stored `values` in the section `prefix` of a config; return the faults.

    Keys that `values` lack are younger than the stored config; they keep their defaults.
    """
    faults = []
    for key, value in values.items():
        if key not in node:
            faults.append(f"{prefix}{key}: no such key; {nearest(key, list(node))}")
        elif isinstance(node[key], ConfigDict):
            faults += _fill(node[key], value, f"{prefix}{key}.")
        elif isinstance(value, dict):
            faults.append(f"{prefix}{key}={value}: needs a value, not a section")
        else:
            try:
                node[key] = tuple(value) if isinstance(value, list) else value
            except TypeError as e:
                faults.append(f"{prefix}{e}")
    return faults


def read_stored(workdir: epath.Path) -> StoredConfig:
    """Read config.json of the run in `workdir`.

    Raises:
      InputError: no run has begun there; or as `parse_stored`.
    """
    return parse_stored(_read_text(workdir), workdir)


def _read_text(workdir: epath.Path) -> str:
    if not (workdir / "config.json").exists():
        raise InputError(f"--workdir={workdir}: has no config.json; give the workdir of a run")
    return (workdir / "config.json").read_bytes().decode(errors="replace")


def read_values(workdir: epath.Path) -> tuple[dict[str, Any], dict[str, str]]:
    """({key: resolved value}, {key: who decided it}) of a run; imports none of its plug-ins.

    Raises:
      InputError: no run has begun there, or config.json is damaged or of another format.
    """
    where = str(workdir / "config.json")
    _, resolved, decided_by = _parse(_read_text(workdir), where)
    with _naming(where):
        values = flatten(ConfigDict(resolved))
        batch, examples = values["global_batch_size"], values["data.num_examples"]
        sizes = {"num_examples": examples, "global_batch_size": batch}
        parse_duration(values["duration"], **sizes, key="duration")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}, decided_by


def read_asked(workdir: epath.Path) -> ConfigDict:
    """The config asked for at the last start in `workdir`, with the plug-ins of a command.

    Raises:
      InputError: as `read_stored`.
    """
    asked = read_stored(workdir).asked
    add_plugins(asked, plugins.named_by_command())
    return asked


def read_config(workdir: epath.Path) -> ConfigDict:
    """The resolved config of the run in `workdir`; raises InputError as `read_stored`."""
    return read_stored(workdir).resolved
