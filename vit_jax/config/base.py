"""Makes a config with every key, and answers questions about several of its keys.

A config file defines `get_config(arg: str = "") -> ConfigDict`, where `arg` is the text after the
colon of `--config=FILE:arg`: comma-separated words (`split_words`). Importing this module touches
no device and does not import TensorFlow.
"""

import copy
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.config import plugins as plugins_lib
from vit_jax.config.durations import to_steps
from vit_jax.config.evals import EVALUATORS, Evaluator
from vit_jax.config.node import Node, flatten
from vit_jax.config.parts import DURATIONS, LARGEST_SIDE, Key, Registry, add_keys, as_pair
from vit_jax.config.registries import ALL_REGISTRIES, OPS, REGISTRIES, SOURCES
from vit_jax.config.sections import SECTIONS, Data
from vit_jax.config.sizes import with_starts

# Keys that change the speed and the memory of a step, and its result only by rounding.
LAYOUT_KEYS = ("mesh.data", "mesh.fsdp", "model.scan", "model.remat", "model.remat_layers")


def base_config(plugins: Sequence[str] = ()) -> ConfigDict:
    """Make a config with every key, typed; locked, except for the names under `evals`.

    `SECTIONS` and the parts in `REGISTRIES` declare the keys.

    `plugins`: the user's own modules (docs/how_to/extend); they are imported, and their keys
    added, as the keys of --config.plugins are.

    Raises:
      InputError: a plug-in is missing, fails, or declares invalid keys.
    """
    return default_config((*plugins_lib.named_by_command(), *plugins_lib.import_plugins(plugins)))


def default_config(plugins: Sequence[str] = ()) -> ConfigDict:
    """Make a `base_config`; `plugins`: names, as in `config.plugins`, of imported plug-ins."""
    c = copy.deepcopy(_own_config())
    add_plugins(c, plugins)
    return c


@functools.cache
def _own_config() -> ConfigDict:
    """A config with the keys of this package."""
    c = Node()
    for name, section in SECTIONS.items():
        if name:
            c[name] = Node()
        add_keys(c[name] if name else c, section.declared())
    for registry in REGISTRIES:
        add_keys(c[registry.section], registry.keys_of_parts("vit_jax"))
    c.evals = Node()
    _lock(c)
    return c


def _lock(config: ConfigDict) -> None:
    """Lock all keys, except for the names under `evals`."""
    config.lock()
    config.evals.unlock()
    for entry in config.evals.values():
        entry.lock()


def add_plugins(config: ConfigDict, names: Sequence[str]) -> None:
    """Add imported plug-ins, and the keys of their parts, to `config`, in place.

    Raises:
      InputError: a plug-in has not been imported; or one of its keys exists with another type.
    """
    for name in names:
        if name in config.plugins:
            continue
        module = plugins_lib.find_plugin(name).module
        config.unlock()
        for registry in REGISTRIES:
            keys = registry.keys_of_parts(module)
            collect_faults(_type_faults(config, registry.section, keys), f"the plug-in {name}")
            add_keys(config[registry.section], keys)
        config.plugins = (*config.plugins, name)
        _lock(config)


def find_unrecorded(config: ConfigDict) -> list[str]:
    """KEY=NAME of each part of `config` that was added by code outside its plug-ins."""
    modules = [plugins_lib.find_plugin(name).module for name in config.plugins]

    def is_outside(registry: Registry[Any], name: str) -> bool:
        if name not in registry.keys() & registry.added.keys() or registry.added[name] in modules:
            return False
        part = registry[name]
        of_part = part.partition(":")[0] if isinstance(part, str) else part.__module__
        return not f"{of_part}.".startswith(tuple(f"{module}." for module in modules))

    return [
        f"{registry.selector}={name}"
        for registry in ALL_REGISTRIES
        for name in dict.fromkeys(map(registry.entry, _names_in(config, registry)))
        if is_outside(registry, name)
    ]


def _names_in(config: ConfigDict, registry: Registry[Any]) -> list[str]:
    """The names of parts in the keys of `config` that select from `registry`."""
    values = flatten(config)
    if registry is OPS:
        ops = [values[k] or "" for k, key in declared_keys(config).items() if key.form == "ops"]
        return [op.partition("(")[0].strip() for op in re.split("[|;]", "|".join(ops))]
    ends = (registry.selector, "data_name") if registry is SOURCES else (registry.selector,)
    found = [v for k, v in values.items() if k in ends or k.endswith(tuple(f".{x}" for x in ends))]
    if registry is SOURCES:  # NAME=WEIGHT, NAME@SPLIT=WEIGHT, or a list of dicts
        found += re.split(r"""[\s=@,'"]+""", config.data.mix)
    return [name for v in found if v for name in (v if isinstance(v, tuple) else (v,))]


def _type_faults(config: ConfigDict, section: str, keys: Mapping[str, Key]) -> list[str]:
    node = config[section]
    return [
        f"{section}.{k}: exists as {node.get_type(k).__name__}, not {declared.kind.__name__}; "
        "rename it"
        for k, declared in keys.items()
        if k in node and node.get_type(k) is not declared.kind
    ]


def own_keys(config: ConfigDict, section: str) -> dict[str, Any]:
    """{key: value} for the keys of a section that its parts declare and that are not None."""
    common = SECTIONS[section].declared()
    return {k: v for k, v in config[section].items() if k not in common and v is not None}


def declared_keys(config: ConfigDict) -> dict[str, Key]:
    """{"section.key": declaration} for the keys of the sections, the chosen parts and `evals`."""
    keys = {f"{name}.{k}".lstrip("."): declared for name, section in SECTIONS.items()
            for k, declared in section.declared().items()}  # fmt: skip
    for registry in REGISTRIES:
        own = registry.chosen_keys(config[registry.section].name).items()
        keys |= {f"{registry.section}.{k}": declared for k, declared in own}
    for name, entry in config.evals.items():
        known = EVALUATORS.find(entry.type).declared() if entry.get("type") in EVALUATORS else {}
        keys |= {f"evals.{name}.{k}": declared for k, declared in known.items()}
    return keys


def values_in_force(config: ConfigDict) -> dict[str, Any]:
    """{"section.key": value or, of a part's key that is None, its default} for `declared_keys`."""
    values = flatten(config)
    return {k: declared.default if values[k] is None and declared.default is not ... else values[k]
            for k, declared in declared_keys(config).items()}  # fmt: skip


def in_steps(config: ConfigDict) -> dict[str, str]:
    """{key: text in steps} for every duration of a config, lists of them, and starts of sizes."""
    values, found = values_in_force(config), {}
    for key, declared in declared_keys(config).items():
        if declared.form in DURATIONS and values[key]:
            steps = declared.read(values[key], key, functools.partial(to_steps, config))
            numbers = steps if isinstance(steps, tuple) else (steps,)
            found[key] = ", ".join(f"{number} steps" for number in numbers)
        elif declared.form == "sizes" and isinstance(values[key], str):
            found[key] = with_starts(values[key], functools.partial(to_steps, config, key=key))
    return found


def shares_in_steps(config: ConfigDict) -> dict[str, str]:
    """`in_steps` for the durations that are shares of the run."""
    texts = values_in_force(config)
    return {key: text for key, text in in_steps(config).items() if "%" in texts[key]}


REQUIRED = ("global_batch_size", "duration", "model.name", "data.name", "data.image_size",
            "optimizer.peak_lr")  # fmt: skip

REQUIRED_TO_EVALUATE = ("global_batch_size", "data.name")  # for a model that exists already


def decided_later(config: ConfigDict) -> set[str]:
    """The keys in `REQUIRED` that may be None because the source or the data decide them."""
    keys = {"model.name", "data.image_size"} if config.init_fields == "source" else set()
    keys |= {"data.image_size"} if config.data.max_tokens is not None else set()
    return keys | ({"duration", "optimizer.peak_lr"} if config.schedule.rule is not None else set())


class Subset(NamedTuple):
    """A part of a split; see the keys `data.subset*`."""

    size: str
    balanced: bool = False
    seed: int = 0


class SplitKey(NamedTuple):
    """Identifies a split that a run opens.

    classes: labels to keep, as in `data.classes`; None: all.
    subset: the part to keep, as in `data.subset`; None: all.
    exclude: file of records to leave out, as in `data.exclude`; None: none.
    """

    data_name: str
    split: str
    data_dir: str | None
    classes: tuple[int, ...] | None = None
    subset: Subset | None = None
    exclude: str | None = None


def train_split(data: Data) -> SplitKey:
    """Key of the training data: a split, or the mixture that starts with it."""
    split = data.split + (f" + {data.mix}" if data.mix else "")
    return own_split(data)._replace(split=split)


def own_split(data: Data) -> SplitKey:
    """Key of the split of `data.name` that is trained on, without `data.mix`."""
    d = data
    part = None if d.subset is None else Subset(d.subset, d.subset_balanced, d.subset_seed)
    return SplitKey(d.name, d.split, d.data_dir, d.classes, part, d.exclude)


def eval_splits(data: Data, entry: Evaluator) -> dict[str, SplitKey]:
    """{key: split} for the keys of an evaluator that hold splits; without the "?" of an optional
    split.

    `data.classes` applies to the training data set, and to evaluators that use the model's classes;
    the key `classes` of an entry replaces it.
    """
    name = data.name if entry.data_name is None else entry.data_name
    data_dir = data.data_dir if entry.data_dir is None else entry.data_dir
    own = (name, data_dir) == (data.name, data.data_dir) or SOURCES.find(name).is_made
    classes = getattr(entry, "classes", None)
    if classes is None and (own or not entry.learns_classes):
        classes = data.classes
    splits = {key: getattr(entry, key) for key in sorted(entry.declared()) if key.endswith("split")}
    return {key: SplitKey(name, split.removesuffix("?"), data_dir, classes)
            for key, split in splits.items()}  # fmt: skip


def split_words(arg: str, known: dict[str, str]) -> tuple[list[str], set[str]]:
    """Split a config's argument into free words, in order, and the set of `known` words.

    Args:
      arg: comma-separated words, e.g. "ViT-L/16,imagenet21k,30ep,debug".
      known: {word: meaning} of the words that may appear in any position.
    """
    words = [word.strip() for word in arg.split(",") if word.strip()]
    return [w for w in words if w not in known], {w for w in words if w in known}


def refuse_words(words: Sequence[str], known: dict[str, str], config_file: str) -> None:
    """Raise InputError for `words` that the config file `config_file` does not know."""
    meaning = "; ".join(f"{word}: {what}" for word, what in known.items())
    hints = ((word, nearest(word, [*known])) for word in words)
    collect_faults(
        [f"unknown word {word!r}; {hint if hint.startswith('did') else f'known words: {meaning}'}"
         for word, hint in hints],
        f"configs/{pathlib.Path(config_file).name}",
    )  # fmt: skip


def with_values(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy of `config` with `values`, {dotted key: value}.

    None for the name of an evaluator, as in {"evals.test": None}, takes its entry away.
    """
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = config
        for section in sections:
            node = node[section]
        if sections == ["evals"]:
            del node[leaf]
        else:
            node[leaf] = value
    return config


def image_hw(size: int | Sequence[int] | None, key: str = "image_size") -> tuple[int, int]:
    """(height, width) of a size given as int or pair; `key` is named in errors.

    Raises:
      InputError: if it is neither.
    """
    pair = as_pair(size)
    if pair is None:
        raise InputError(
            f"{key}={size!r}: needs a positive int or a pair of them, up to {LARGEST_SIDE}"
        )
    return pair


def step_range(text: str, key: str) -> range:
    """Steps in a range such as "10:15": 11 to 15.

    Raises:
      InputError: if `text` does not have this form.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise InputError(f"{key}={text!r}: needs two steps, the smaller first, e.g. 10:15")
    return range(int(match[1]), int(match[2]))
