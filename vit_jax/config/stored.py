"""The config that a run stores in config.json: its text, and how a later version goes on with it.

A key that changed a run's data or updates when it was added has an entry in IN_OLDER_RUNS; all
other keys that a stored config lacks take their default.
"""

import copy
import json
import logging
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.config import plugins
from vit_jax.config.base import default_config, flatten
from vit_jax.config.evals import EVALUATORS, entry_defaults, entry_keys, typed_entry
from vit_jax.errors import InputError, collect_faults, nearest

logger = logging.getLogger("vit_jax")

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

    It is not after a resize to `data.image_size`, or to a size that is at least as large.
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
    entries = config["evals"].values()
    names = {config["data"]["name"], *(entry.get("data_name") for entry in entries)}
    return "folder" in names or bool(re.search(r"\bfolder\b", config["data"].get("mix", "")))


def _older_holdout(stored: dict[str, Any]) -> str:
    return f"seed {stored['seed']}" if reads_folder(stored) else "names"


def _older_broken_labels(stored: dict[str, Any]) -> str:
    data = stored["data"]
    fewshot_kinds = [entry["type"] == "fewshot" for entry in stored["evals"].values()]
    reads_labels = data.get("classes") is not None or any(fewshot_kinds)
    in_memory = data.get("reader") in (None, "memory")
    of_files = data["name"] not in ("digits", "folder", "synthetic")
    return "by_reader" if reads_labels and in_memory and of_files else "read"


# Keys that changed a run's data or updates when they were added: what an older run, whose
# config.json lacks the key, keeps doing; a function of that file's content. All other keys that a
# run lacks take their default.
IN_OLDER_RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "data.holdout": _older_holdout,
    "data.broken_labels": _older_broken_labels,
    "data.pad_crops": _may_pad,
}


def changed_keys(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """{key: (old value, new value)} of what differs and may not change on resume."""
    a, b = flatten(old), flatten(new)
    return {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key) and not key.startswith(FREE_ON_RESUME)
    }


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


def to_json(config: ConfigDict) -> str:
    """The config as the text of `config.json`; `from_json` gives an equal config."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str, where: str = "config.json") -> ConfigDict:
    """The config that `to_json` wrote; `where` names it in errors.

    Keys that the text lacks, because an older version wrote it, take the value in IN_OLDER_RUNS or
    else their default.

    Raises:
      InputError: naming every key that this version does not have, or a plug-in that has not been
        imported.
    """
    faults = []
    try:
        stored = json.loads(text)
        config = default_config(_plugin_names(stored))
        older = _older_values(stored)
        evals = stored.pop("evals")
        for name, entry in evals.items():
            kind = entry["type"]
            if kind not in EVALUATORS:
                faults.append(f"evals.{name}.type={kind!r}: {nearest(str(kind), list(EVALUATORS))}")
                continue
            defaults = entry_defaults(kind)
            wanted, found = entry_keys(kind), set(defaults | entry)
            faults += [f"evals.{name}.{key}: missing" for key in sorted(wanted - found)]
            faults += [f"evals.{name}.{key}: no such key" for key in sorted(found - wanted)]
            if wanted == found:
                config.evals[name] = typed_entry(kind, defaults | entry)
    except InputError as e:
        raise InputError(*e.faults, where=where) from None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise InputError(f"{where}: not as a run writes it ({type(e).__name__}: {e})") from None

    def fill(node: ConfigDict, values: dict, prefix: str) -> None:
        for key, value in values.items():
            if key not in node:
                faults.append(f"{prefix}{key}: no such key; {nearest(key, list(node))}")
            elif isinstance(node[key], ConfigDict) and isinstance(value, dict):
                fill(node[key], value, f"{prefix}{key}.")
            else:
                try:
                    node[key] = tuple(value) if isinstance(value, list) else value
                except TypeError as e:
                    faults.append(f"{prefix}{key}: {e}")

    fill(config, stored, "")
    collect_faults(faults, f"{where} of another version of vit_jax; use the one that wrote it")
    config.update_from_flattened_dict(older)
    return config


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


def continue_older(config: ConfigDict, workdir: epath.Path) -> ConfigDict:
    """`config` for resuming the run in `workdir`, which an older version may have begun.

    Keys in IN_OLDER_RUNS keep the run's own value, or the older behaviour where its config.json
    lacks them, with one warning, unless `config` sets them to something other than their default.
    """
    path = workdir / "config.json"
    if not path.exists():
        return config
    try:
        stored = json.loads(path.read_text())
        older = _older_values(stored) | _stored_values(stored)
    except (ValueError, TypeError, KeyError, AttributeError):
        return config  # reading the file as a config will name the fault
    values, defaults = flatten(config), flatten(default_config(config.plugins))
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
    text = path.read_text()
    try:
        names = _plugin_names(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        names = ()  # reading the text as a config will name the fault
    plugins.import_stored(names, workdir)
    return from_json(text, str(path))


def _plugin_names(stored: dict[str, Any]) -> tuple[str, ...]:
    """The plug-ins that a parsed config.json names; older versions had none."""
    return tuple(stored.get("plugins", ()))
