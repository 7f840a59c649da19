"""The config that a run stores in config.json: its text, and how a later version goes on with it.

An older run may lack a key: it takes the value in IN_OLDER_RUNS, else the default. It may have a
key by an older name, listed in RENAMED_KEYS. A file of a newer format is refused.
"""

import contextlib
import copy
import functools
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import plugins
from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS, entry_defaults, entry_keys, typed_entry
from vit_jax.errors import InputError, check_version, collect_faults, nearest

logger = logging.getLogger("vit_jax")

# The format of config.json, which holds it as `format_version`; files of version 1 do not. Raise it
# with every entry in RENAMED_KEYS, and when a key or a value changes its meaning. A key that is
# added needs no new version: older code refuses it by its name.
FORMAT_VERSION = 2

# What older versions called a key -> its name today; `*` stands for any entry of `evals`, as in
# "evals.*.freq": "evals.*.every". A name is never used again for something else.
RENAMED_KEYS: dict[str, str] = {}

# What may change when a run is resumed: where and how it runs, never what it computes.
FREE_ON_RESUME = ("mesh.", "checkpoint.", "log.", "evals.", "job.", "study.", "data.data_dir",
                  "data.reader", "data.max_corrupt_fraction", "model.remat")  # fmt: skip


# Keys of an entry of `evals` on which no measured value depends.
_FREE_IN_EVALS = (".every", ".batch_size", ".data_dir")


# A crop of data.image_size after a resize without other arguments than these.
_RESIZE_AND_CROP = (
    r"resize(_small)?(\((size=)?(?P<size>\d+)?,?(antialias=(True|False))?\))?"
    r"\|(central|random)_crop(\(\))?(?=\||$)"
)


def _may_pad(stored: dict[str, Any]) -> bool:
    """Whether a crop of a parsed config.json may be larger than its image, by the text of its ops.

    False where every crop follows a resize to at least `data.image_size`.
    """
    size = stored["data"]["image_size"]
    largest = max(size) if isinstance(size, list) else size or 0

    def cut(match):
        return "" if int(match["size"] or largest) >= largest else match[0]

    strings = [stored["data"]["ops"], *(entry["ops"] for entry in stored["evals"].values())]
    rest = [re.sub(_RESIZE_AND_CROP, cut, ops.replace(" ", "")) for ops in strings]
    return re.search("(central|random)_crop", " ".join(rest)) is not None


def reads_folder(config: Mapping[str, Any]) -> bool:
    """Whether a config, or the content of a config.json, reads an image folder."""
    return bool(folders_read(config))


def folders_read(config: Mapping[str, Any]) -> set[str | None]:
    """`data_dir` of each image folder that a config, or the content of a config.json, reads."""
    d = config["data"]
    entries = [(e.get("data_name"), e.get("data_dir")) for e in config["evals"].values()]
    read = [(d["name"], None), *((name, None) for name in _mixed_names(d)), *entries]
    return {where or d.get("data_dir") for name, where in read if (name or d["name"]) == "folder"}


def _mixed_names(data: Mapping[str, Any]) -> list[str]:
    """The data sets that `data.mix` names."""
    parts = [re.split("[=@]", part)[0].strip() for part in data.get("mix", "").split(",")]
    return [name for name in parts if name]


def _older_holdout(stored: dict[str, Any]) -> str:
    return f"seed {stored['seed']}" if reads_folder(stored) else "names"


def _older_broken_labels(stored: dict[str, Any]) -> str:
    data, entries = stored["data"], stored["evals"].values()
    # Labels choose the records of data.classes, and what few-shot evaluators learn from.
    chosen = [entry for entry in entries if entry["type"] == "fewshot"]
    names = set()
    if data.get("classes") is not None:
        chosen = entries
        names = {data["name"], *_mixed_names(data)}
    names |= {entry.get("data_name") or data["name"] for entry in chosen}
    in_memory = data.get("reader") in (None, "memory")
    of_files = names - {"digits", "folder", "synthetic"}
    return "by_reader" if in_memory and of_files else "read"


# Keys that changed a run's data or updates when they were added. For a key that an older
# config.json lacks: a function of that file that returns the value which keeps the run as it was.
# All other keys that a run lacks take their default.
IN_OLDER_RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "data.holdout": _older_holdout,
    "data.broken_labels": _older_broken_labels,
    "data.pad_crops": _may_pad,
}


def changed_keys(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """{key: (old value, new value)} of what differs and may not change on resume.

    Plug-ins may be added, and of their keys those that keep their default.
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
    """What `changed_keys` found, in words, each with the flag that keeps the old value."""
    return [
        f"{key} was {was!r} and is {now!r} now; "
        f"{shlex.quote(f'--config.{key}={_written(key, was)}')} keeps it"
        for key, (was, now) in changed.items()
    ]


def _written(key: str, value: Any) -> Any:
    """A value as the command line takes it."""
    return ",".join(value) if key == "plugins" else value


def changed_evals(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """As `changed_keys`, of what decides the values that evaluators measure."""
    a, b = (flatten(config.evals, "evals.") for config in (old, new))
    return {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.endswith(_FREE_IN_EVALS)
    }


def todays_key(key: str) -> str:
    """What `key`, perhaps by the name that an older version gave it, is called today."""
    for old, new in RENAMED_KEYS.items():
        match = re.fullmatch(re.escape(old).replace(r"\*", r"([^.]+)"), key)
        if match:
            return new.replace("*", "".join(match.groups()))
    return key


def to_json(config: ConfigDict) -> str:
    """The config as the text of `config.json`; `from_json` gives an equal config."""
    return json.dumps({"format_version": FORMAT_VERSION} | config.to_dict(), indent=2) + "\n"


def from_json(text: str, where: str = "config.json") -> ConfigDict:
    """The config that `to_json` wrote; `where` names it in errors.

    Keys that the text lacks, because an older version wrote it, take the value in IN_OLDER_RUNS or
    else their default.

    Raises:
      InputError: the text has a newer format; or naming every key that this version does not have,
        or a plug-in that has not been imported.
    """
    return _from_stored(_parse(text, where), where)


def _from_stored(stored: dict[str, Any], where: str) -> ConfigDict:
    """The config of a parsed config.json."""
    faults = []
    with _naming(where):
        config = default_config(_plugin_names(stored))
        older = _older_values(stored)
        for name, entry in stored.pop("evals").items():
            faults += _fill_entry(config.evals, name, entry)
    faults += _fill(config, stored, "")
    collect_faults(faults, f"{where} of another version of vit_jax; use the one that wrote it")
    config.update_from_flattened_dict(older)
    return config


def _parse(text: str, where: str) -> dict[str, Any]:
    """The content of a config.json, by today's names of keys, with the defaults of its `evals`."""
    with _naming(where):
        stored = json.loads(text)
        version = stored.pop("format_version", 1)
        if type(version) is not int or version < 1:
            raise ValueError(f"format_version={version!r}: needs a positive int")
    check_version(where, version, FORMAT_VERSION)
    with _naming(where):
        for key in flatten(ConfigDict(stored)):
            new = todays_key(key)
            if new != key:
                *sections, leaf = key.split(".")
                value = functools.reduce(dict.__getitem__, sections, stored).pop(leaf)
                *sections, leaf = new.split(".")
                section = functools.reduce(lambda d, k: d.setdefault(k, {}), sections, stored)
                section[leaf] = value
        for entry in stored["evals"].values():
            if entry["type"] in EVALUATORS:
                entry.update(entry_defaults(entry["type"]) | entry)
    return stored


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turns what content of another form raises into an InputError that names `where`."""
    try:
        yield
    except InputError as e:
        raise InputError(*e.faults, where=where) from None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise InputError(f"{where}: not as a run writes it ({type(e).__name__}: {e})") from None


def _fill_entry(evals: ConfigDict, name: str, entry: dict[str, Any]) -> list[str]:
    """Adds the stored `entry` to `evals`; returns the faults."""
    kind = entry["type"]
    if kind not in EVALUATORS:
        return [f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}"]
    wanted, found = entry_keys(kind), set(entry)
    if wanted == found:
        evals[name] = typed_entry(kind, entry)
    missing = [f"evals.{name}.{key}: missing" for key in sorted(wanted - found)]
    return missing + [f"evals.{name}.{key}: no such key" for key in sorted(found - wanted)]


def _fill(node: ConfigDict, values: dict[str, Any], prefix: str) -> list[str]:
    """Sets the stored `values` in the section `prefix` of a config; returns the faults."""
    faults = []
    for key, value in values.items():
        if value == {}:
            continue  # a section whose keys have all moved
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


def _older_values(stored: dict[str, Any]) -> dict[str, Any]:
    """{key: value} of the keys in IN_OLDER_RUNS that a parsed config.json lacks."""
    found = _stored_values(stored)
    return {key: older(stored) for key, older in IN_OLDER_RUNS.items() if key not in found}


def _stored_values(stored: dict[str, Any]) -> dict[str, Any]:
    """{key: value} of the keys in IN_OLDER_RUNS that a parsed config.json has."""
    sections = {key: key.rpartition(".")[::2] for key in IN_OLDER_RUNS}
    nodes = {
        key: (stored.get(section, {}) if section else stored, leaf)
        for key, (section, leaf) in sections.items()
    }
    return {key: node[leaf] for key, (node, leaf) in nodes.items() if leaf in node}


def kept_values(workdir: epath.Path) -> dict[str, Any]:
    """{key: value} that the run in `workdir` has of each key in IN_OLDER_RUNS; {} of no run.

    Raises:
      InputError: config.json has a newer format, or is not as a run writes it.
    """
    path = workdir / "config.json"
    if not path.exists():
        return {}
    stored = _parse(path.read_text(), str(path))
    with _naming(str(path)):
        return _older_values(stored) | _stored_values(stored)


def continue_older(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
    """`config` for resuming the run in `workdir`, which an older version may have begun.

    Keys in IN_OLDER_RUNS keep the run's own value, or the older behaviour where its config.json
    lacks them, with one warning, unless `config` sets them to something other than their default.

    Raises:
      InputError: config.json has a newer format, or is not as a run writes it.
    """
    older = kept_values(workdir)
    values, defaults = flatten(config), flatten(default_config(config.get("plugins") or ()))
    kept = {k: v for k, v in older.items() if values[k] == defaults[k] and values[k] != v}
    if not kept:
        return config
    config = copy.deepcopy(config)  # with the types of keys that are None
    config.update_from_flattened_dict(kept)
    logger.warning(
        "%s: this run goes on as it began, with %s (new runs: %s)",
        workdir,
        ", ".join(f"{key}={value!r}" for key, value in kept.items()),
        ", ".join(repr(defaults[key]) for key in kept),
    )
    return config


def read_config(workdir: epath.Path) -> ConfigDict:
    """The config of the run in `workdir`, whose plug-ins are imported.

    Raises what `from_json` and `plugins.import_stored` raise.
    """
    path = workdir / "config.json"
    stored = _parse(path.read_text(), str(path))
    with _naming(str(path)):
        names = _plugin_names(stored)
    plugins.import_stored(names, workdir)  # not before it is known that this version reads the run
    return _from_stored(stored, str(path))


def _plugin_names(stored: dict[str, Any]) -> tuple[str, ...]:
    """The plug-ins that a parsed config.json names; older versions had none."""
    return tuple(stored.get("plugins", ()))
