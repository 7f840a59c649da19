"""The config that a run stores in config.json, and how later versions read it.

Keys that an older run lacks take the value in IN_OLDER_RUNS, else their default. Keys that it
stored under an older name are listed in RENAMED_KEYS. Files of a newer format are rejected.
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

# Format of config.json, stored as `format_version`; files of version 1 lack it. Increase it with
# every entry in RENAMED_KEYS, and when a key or a value changes its meaning. Adding a key needs no
# new version: older code rejects the unknown name.
FORMAT_VERSION = 2

# Name of a key in older versions -> its name today; `*` matches any entry of `evals`, as in
# "evals.*.freq": "evals.*.every". Old names are never reused.
RENAMED_KEYS: dict[str, str] = {}

# Keys that may change on resume: they affect where and how a run is executed, not its result.
FREE_ON_RESUME = ("auto", "mesh.", "checkpoint.", "stop.", "log.", "evals.", "job.", "study.",
                  "data.data_dir", "data.reader", "data.max_corrupt_fraction",
                  "model.remat", "model.remat_layers", "model.kernels")  # fmt: skip


# Keys of an `evals` entry that do not affect measured values.
_FREE_IN_EVALS = (".every", ".batch_size", ".data_dir")


# A crop of data.image_size that follows a resize with no arguments except these.
_RESIZE_AND_CROP = (
    r"resize(_small)?(\((size=)?(?P<size>\d+)?,?(antialias=(True|False))?\))?"
    r"\|(central|random)_crop(\(\))?(?=\||$)"
)


def _may_pad(stored: dict[str, Any]) -> bool:
    """Whether a crop in a parsed config.json may be larger than its image, judging by its ops.

    False if every crop follows a resize to at least `data.image_size`.
    """
    size = stored["data"]["image_size"]
    largest = max(size) if isinstance(size, list) else size or 0

    def cut(match):
        return "" if int(match["size"] or largest) >= largest else match[0]

    strings = [stored["data"]["ops"], *(entry["ops"] for entry in stored["evals"].values())]
    rest = [re.sub(_RESIZE_AND_CROP, cut, ops.replace(" ", "")) for ops in strings]
    return re.search("(central|random)_crop", " ".join(rest)) is not None


def reads_folder(config: Mapping[str, Any]) -> bool:
    """Whether a config, or a parsed config.json, reads an image folder."""
    return bool(folders_read(config))


def folders_read(config: Mapping[str, Any]) -> set[str | None]:
    """`data_dir` of each image folder that a config, or a parsed config.json, reads."""
    d = config["data"]
    entries = [(e.get("data_name"), e.get("data_dir")) for e in config["evals"].values()]
    read = [(d["name"], None), *((name, None) for name in _mixed_names(d)), *entries]
    return {where or d.get("data_dir") for name, where in read if (name or d["name"]) == "folder"}


def _mixed_names(data: Mapping[str, Any]) -> list[str]:
    """Names of the data sets in `data.mix`."""
    parts = [re.split("[=@]", part)[0].strip() for part in data.get("mix", "").split(",")]
    return [name for name in parts if name]


def _older_holdout(stored: dict[str, Any]) -> str:
    return f"seed {stored['seed']}" if reads_folder(stored) else "names"


def _older_broken_labels(stored: dict[str, Any]) -> str:
    data, entries = stored["data"], stored["evals"].values()
    # Labels select the records of data.classes and the training examples of few-shot evaluators.
    chosen = [entry for entry in entries if entry["type"] == "fewshot"]
    names = set()
    if data.get("classes") is not None:
        chosen = entries
        names = {data["name"], *_mixed_names(data)}
    names |= {entry.get("data_name") or data["name"] for entry in chosen}
    in_memory = data.get("reader") in (None, "memory")
    of_files = names - {"digits", "folder", "synthetic"}
    return "by_reader" if in_memory and of_files else "read"


# Keys that changed a run's data or updates when they were added. Each maps to a function of an
# older config.json that returns the value that preserves the run's behaviour. All other missing
# keys take their default.
IN_OLDER_RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "data.holdout": _older_holdout,
    "data.broken_labels": _older_broken_labels,
    "data.pad_crops": _may_pad,
    "model.kernels": lambda stored: "plain",
    "data.exif": lambda stored: not reads_folder(stored),
    "data.folder_rules": lambda stored: 1 if reads_folder(stored) else 2,
}


# Keys of `optimizer` that every run records at its start -> their value in runs that lack them.
_OF_OLDER_OPTIMIZERS = {"accum_steps": 1}


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
    for entry in entries.values():
        if "split" in entry:  # "test?" is "test", where that is there
            entry["split"] = entry["split"].removesuffix("?")
    a, b = flatten(old.evals, "evals."), flatten(ConfigDict(entries), "evals.")
    return {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.endswith(_FREE_IN_EVALS)
    }


def todays_key(key: str) -> str:
    """Today's name of `key`, which may be the name in an older version."""
    for old, new in RENAMED_KEYS.items():
        match = re.fullmatch(re.escape(old).replace(r"\*", r"([^.]+)"), key)
        if match:
            return new.replace("*", "".join(match.groups()))
    return key


def to_json(config: ConfigDict) -> str:
    """The config as the text of config.json; `from_json` restores an equal config."""
    return json.dumps({"format_version": FORMAT_VERSION} | config.to_dict(), indent=2) + "\n"


def from_json(text: str, where: str = "config.json") -> ConfigDict:
    """Parse a config written by `to_json`; `where` names it in errors.

    Keys that older versions did not write take the value in IN_OLDER_RUNS, or else their default.

    Raises:
      InputError: the text has a newer format or keys that this version does not know (names them
        all), or one of its plug-ins has not been imported.
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
    collect_faults(faults, f"{where} is from another version of vit_jax; use that version")
    config.update_from_flattened_dict(older)
    return config


def _parse(text: str, where: str) -> dict[str, Any]:
    """Content of a config.json, with keys renamed as today and defaults of `evals` filled in."""
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
        if "optimizer" in stored:
            stored["optimizer"] = _OF_OLDER_OPTIMIZERS | stored["optimizer"]
        for entry in stored["evals"].values():
            if entry["type"] in EVALUATORS:
                entry.update(entry_defaults(entry["type"]) | entry)
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
        if value == {}:
            continue  # a section whose keys have all moved elsewhere
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
    """{key: value} for the keys in IN_OLDER_RUNS that a parsed config.json lacks."""
    found = _stored_values(stored)
    return {key: older(stored) for key, older in IN_OLDER_RUNS.items() if key not in found}


def _stored_values(stored: dict[str, Any]) -> dict[str, Any]:
    """{key: value} for the keys in IN_OLDER_RUNS that a parsed config.json has."""
    sections = {key: key.rpartition(".")[::2] for key in IN_OLDER_RUNS}
    nodes = {
        key: (stored.get(section, {}) if section else stored, leaf)
        for key, (section, leaf) in sections.items()
    }
    return {key: node[leaf] for key, (node, leaf) in nodes.items() if leaf in node}


def kept_values(workdir: epath.Path) -> dict[str, Any]:
    """{key: value} that the run in `workdir` uses for each key in IN_OLDER_RUNS; {} if no run.

    Raises:
      InputError: config.json has a newer format or is damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        return {}
    stored = _parse(path.read_text(), str(path))
    with _naming(str(path)):
        return _older_values(stored) | _stored_values(stored)


def continue_older(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
    """`config`, adapted to resume a run in `workdir` that an older version may have started.

    Keys in IN_OLDER_RUNS keep the run's value (if its config.json lacks them: the value that
    preserves its behaviour), unless `config` sets them to a non-default value. Logs one warning.

    Raises:
      InputError: config.json has a newer format or is damaged.
    """
    older = kept_values(workdir)
    values, defaults = flatten(config), flatten(default_config(config.get("plugins") or ()))
    kept = {k: v for k, v in older.items() if values[k] == defaults[k] and values[k] != v}
    if not kept:
        return config
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    config.update_from_flattened_dict(kept)
    logger.warning(
        "%s: this run continues with its original settings: %s (default for new runs: %s)",
        workdir,
        ", ".join(f"{key}={value!r}" for key, value in kept.items()),
        ", ".join(repr(defaults[key]) for key in kept),
    )
    return config


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
    """Plug-ins listed in a parsed config.json; older versions had none."""
    return tuple(stored.get("plugins", ()))
