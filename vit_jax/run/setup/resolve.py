"""Decides the keys that a config leaves open; no other code sets a key.

    asked ──> continue_run ──> weights ──> teachers ──> data ──> rules ──> layout ──> microbatches

A config file cannot know them:

    source    take_fields              model fields, size, channels and value range of `init_from`
    model     cut_pictures             patch and image size, by `data.max_tokens` or patches drawn
    teachers  opener.Files.teachers    the number of classes of unlabelled images
    data      sources.open_training    numbers of classes and examples, order, class weights
    rule      freeze_layers            a pattern of frozen parameters, by `optimizer.last_layers`
    rule      follow_rule              length, learning rate and warm-up, by `schedule.rule`
    duration  opener.Files.shares      the steps of shares of the run
    devices   opener.Files.layout      mesh, scan and remat, under `auto`
    devices   opener.Files.microbatches
    measured  opener.Files.kernels     the form of the blocks, on accelerators

config.json keeps what was asked for, what it came to, and who decided each key: "user" (a flag),
"recipe" (the config file), "default", "source" (of the weights), "model", "teachers", "data",
"rule", "duration" (of the run), "devices", "measured" (on them) or "branch" (what made the run from
another).
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.base import tree
from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import Settings
from vit_jax.config.durations import parse_duration
from vit_jax.config.plugins import find_plugin
from vit_jax.config.stored import StoredConfig, keep_resolved
from vit_jax.experiment.finetune_length import RULES, bit_warmup
from vit_jax.models import (
    fields_of,
    find_family,
    is_of_family,
    model_of,
    name_of,
    nearest_name,
    sizes_of,
)
from vit_jax.models.fields import check_fields, field_defaults
from vit_jax.run.setup.validation import find_faults
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.shapes import abstract_params

logger = logging.getLogger("vit_jax")

# What is decided anew at every start, and must then be as the data decided at the first; the number
# of microbatches is the recorded one, as far as the devices allow.
DECIDED_ANEW = ("data.num_classes", "data.num_examples", "data.order", "data.streams",
                "loss.class_weights", "optimizer.accum_steps")  # fmt: skip

# Fields of `config.model` that are no property of a source.
_NOT_TAKEN = {"dtype", "scan", "remat", "remat_layers", "dropout", "attention_dropout",
              "stochastic_depth", "head_bias", "lora_rank", "rotary_shift", "rotary_jitter",
              "rotary_rescale", "keep_tokens"}  # fmt: skip
_OF_PIXELS = ("channels", "mean", "std", "exif", "pixel_range")  # keys of `data`
_OF_HEAD = {"hidden_head", "distillation_head"}  # taken only with the head itself

Changes = dict[str, Any]  # {dotted key: value}, as for `with_values`


class Opener:
    """Opens what decides open keys, each thing once; this one opens nothing.

    A run that trains opens files and devices (`opener.Files`), a plan tables (`opener.Tables`).
    `resolve` calls the methods in this order. Each returns keys with their values:

    weights: what the source of the initial weights decides.
    teachers: what the teachers of the objective decide.
    data: what the data decide.
    shares: durations that are shares of the run, in steps; they stay if the run gets another end.
    microbatches: `optimizer.accum_steps`, by the devices, if it is open or recorded.
    layout: LAYOUT_KEYS, by the devices; it splits a batch in as many ways as before.
    kernels: `model.kernels`, by a measurement.
    """

    def find_faults(self, config: ConfigDict) -> list[str]:
        """The faults of `config` before anything is opened."""
        return []

    def _decide_nothing(self, config: ConfigDict) -> Changes:
        return {}

    weights = teachers = data = shares = microbatches = layout = kernels = _decide_nothing

    def has_devices_of(self, stored: StoredConfig) -> bool:
        """Whether the run of `stored` was last on such devices."""
        return True


class Resolved(NamedTuple):
    """A config without open keys; see `StoredConfig`."""

    asked: ConfigDict
    config: ConfigDict
    decided_by: Mapping[str, str]

    @property
    def settings(self) -> Settings:
        """The sections of the config."""
        return Settings.read(self.config)


def resolve(
    asked: Settings,
    opener: Opener,
    stored: StoredConfig | None = None,
    by_user: Collection[str] = (),
) -> Resolved:
    """Decide the open keys of `asked`; writes nothing.

    Args:
      asked: of a config that has passed `validation.validate`.
      opener: opens what decides.
      stored: of the run that goes on; None: a new run. What it decided stays, but for new entries
        of `evals`, and for mesh, remat and microbatches on other devices.
      by_user: the keys that the user has set on the command line; no source or rule changes them.

    Raises:
      InputError: names the keys; faults of the source, the teachers and the data together.
    """
    stages: tuple[tuple[str, Callable[[ConfigDict], Changes]], ...] = (
        ("source", opener.weights),
        ("model", cut_pictures),
        ("teachers", opener.teachers),
        ("data", opener.data),
        ("rule", freeze_layers),
        ("rule", follow_rule),
        ("duration", opener.shares),
        ("devices", opener.microbatches),
        ("devices", opener.layout),
        ("measured", opener.kernels),
    )
    began_with = asked.to_config()
    config, decided_by = continue_run(began_with, opener, stored, by_user)
    if stored is not None:
        collect_faults(Settings.read_open(config)[1], "with what the run's config.json holds")
    faults = Faults(opener.find_faults(config))
    for by, decide in stages:
        flat = config_lib.flatten(config)
        changes = {
            key: value
            for key, value in (faults.check(decide, config) or {}).items()
            if (key not in flat or flat[key] != value or by == "source")
            and (key not in by_user or by not in ("source", "rule"))
        }
        config = config_lib.with_values(config, changes) if changes else config
        decided_by |= dict.fromkeys(changes, by)
        if by == "source" and "model.name" in changes:
            said = ", ".join(f"{key}={value}" for key, value in changes.items())
            logger.info("taken from init_from=%s: %s", config.init_from, said)
        if by == "source" and changes:
            faults += find_faults(config)  # the checks did not know what the source decides
        if by not in ("source", "model", "teachers") or config.data.image_size is None:
            collect_faults(faults)  # the next stage needs what this one decides
    flat = config_lib.flatten(config)
    return Resolved(began_with, config, {key: decided_by[key] for key in flat})


def find_open(config: ConfigDict) -> dict[str, str]:
    """{key: who will decide it} for the keys that `config` leaves to the stages of `resolve`."""
    taken = (f"model.{field}" for field, value in config.model.items()
             if value is None and field not in _never_taken(config))  # fmt: skip
    waiting = {
        "data": ("data.num_classes", "data.num_examples", "data.order", "data.streams"),
        "devices": ("optimizer.accum_steps", *config_lib.LAYOUT_KEYS * config.auto),
        "source": ("data.image_size", *(f"data.{key}" for key in _OF_PIXELS), *taken)
        * (config.init_fields == "source"),
        "rule": ("duration", "optimizer.peak_lr", "schedule.warmup")
        * (config.schedule.rule is not None)
        + ("optimizer.freeze",) * (config.optimizer.last_layers is not None),
    }
    flat = config_lib.flatten(config)
    defaults = config_lib.flatten(config_lib.default_config(config.plugins))
    return {key: by for by, keys in waiting.items() for key in keys if flat[key] == defaults[key]}


def continue_run(
    asked: ConfigDict, opener: Opener, stored: StoredConfig | None, by_user: Collection[str]
) -> tuple[ConfigDict, dict[str, str]]:
    """`asked` with what the run of `stored` decided, and who decided each key."""
    new = config_lib.flatten(asked)
    defaults = config_lib.flatten(config_lib.default_config(asked.plugins))
    decided_by = {
        key: "default" if defaults.get(key) == value else "recipe" for key, value in new.items()
    }
    for given in by_user:  # evals.few gives evals.few.split, and data.ops.flip a part of data.ops
        related = (
            key for key in new if f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}.")
        )
        decided_by |= dict.fromkeys(related, "user")
    if stored is None:
        return asked, decided_by
    anew, has_devices = {*DECIDED_ANEW}, opener.has_devices_of(stored)
    if not has_devices:
        anew |= {"model.kernels"}
    keeps_layout = stored.asked.auto and has_devices if asked.auto else not stored.asked.auto
    if not keeps_layout:
        anew |= {*config_lib.LAYOUT_KEYS} - {"model.scan"}  # the form of its checkpoints
    same = keep_resolved(asked, stored)
    decided_by |= {
        key: stored.decided_by[key]
        for key in same
        if key in stored.decided_by and (has_devices or key != "model.kernels")
    }
    kept = {key: value for key, value in same.items() if key not in anew}
    return config_lib.with_values(asked, kept), decided_by


def take_fields(config: ConfigDict, pretrained: Pretrained) -> Changes:
    """The fields that `init_fields="source"` takes from `pretrained`.

    Fields of the model and the image size are taken where they are None, `data.channels`,
    `data.mean`, `data.std`, `data.exif` and `data.pixel_range` where they have their defaults. If
    `model.name` is None, the source gives it with all sizes. `model.name` otherwise
    gives the sizes, which must be the source's; a run of the same `model.name` gives its own sizes.

    Raises:
      InputError: the source is another model, or takes images of any size and `config` has none.
    """
    if config.init_fields != "source":
        return {}
    model, changes = pretrained.model, Changes()
    if (name := config.model.name) is None:
        changes["model.name"] = name = _name_source(config, pretrained)
        own_sizes = set[str]()
    else:
        own_sizes = set() if _check_name(config, pretrained) else {*sizes_of(name)}
    family = find_family(name)
    defaults = field_defaults(family) | check_fields(family, family.parse(name), name)
    left = _never_taken(config) | own_sizes
    for field in sorted((set(fields_of(name)) & set(config.model)) - left):
        theirs = getattr(model, field)
        if config.model[field] is None and theirs != defaults.get(field):
            changes[f"model.{field}"] = theirs
    d, spec = config.data, pretrained.spec
    if d.image_size is None:
        if spec.image_size is None:
            raise InputError(
                f"data.image_size=None: {pretrained.source} takes images of any size; choose one "
                "with --config.data.image_size"
            )
        height, width = spec.image_size
        changes["data.image_size"] = height if height == width else (height, width)
    default = config_lib.base_config().data
    if d.channels == default.channels != spec.channels:
        changes["data.channels"] = spec.channels
    channels = changes.get("data.channels", d.channels)
    for key in ("mean", "std"):
        theirs = tuple(getattr(spec, key))
        fits = channels in (1, len(theirs)) or len({*theirs}) == 1
        if tuple(d[key]) == default[key] and fits:
            changes[f"data.{key}"] = theirs
    for key, theirs in (("exif", spec.exif is not False), ("pixel_range", spec.pixel_range)):
        if d[key] == default[key] != theirs:
            changes[f"data.{key}"] = theirs
    return changes


def _never_taken(config: ConfigDict) -> set[str]:
    """The fields of a model that no source gives."""
    return _NOT_TAKEN | (_OF_HEAD if config.init_head == "new" else set())


def _run_name(pretrained: Pretrained) -> str | None:
    """`model.name` of the run that the source is; None: it is no run."""
    return pretrained.run["config"]["model"]["name"] if pretrained.run else None


def _name_source(config: ConfigDict, pretrained: Pretrained) -> str:
    """The value of `model.name` for a source: its run's name, else the model of the nearest sizes.

    Raises:
      InputError: the model is of a plug-in that `config` lacks.
    """
    family, run = type(pretrained.model), pretrained.run or {"config": {"plugins": ()}}
    for plugin in {*run["config"]["plugins"]} - {*config.plugins}:
        if find_plugin(plugin).module == family.__module__:
            raise InputError(
                f"init_from={pretrained.source!r}: its {family.__name__} is of a plug-in; give "
                f"--config.plugins={plugin}"
            )
    name = _run_name(pretrained) or nearest_name(pretrained.model)
    assert name is not None  # only a run may have a model of a plug-in
    return name


def _check_name(config: ConfigDict, pretrained: Pretrained) -> bool:
    """Whether the source is a run of `model.name`.

    Raises:
      InputError: the source has another family or other sizes than `config.model`.
    """
    name, model, run_name = config.model.name, pretrained.model, _run_name(pretrained)
    if name == run_name:
        return True
    source = f"init_from={pretrained.source!r}"
    theirs = run_name or name_of(model)
    remedy = f"; give {theirs}, as in --config=finetune:{theirs},folder" if theirs else ""
    if not is_of_family(model, name):
        raise InputError(f"model.name={name!r}: {source} is a {type(model).__name__}{remedy}")
    sizes = {
        field: own if config.model.get(field) is None else config.model[field]
        for field, own in sizes_of(name).items()
    }
    if "patch_size" in sizes:
        sizes["patch_size"] = config_lib.image_hw(sizes["patch_size"])
    other = {f: getattr(model, f) for f, size in sizes.items() if getattr(model, f) != size}
    if other:
        texts = {field: ",".join(map(str, size)) if isinstance(size, tuple) else size
                 for field, size in other.items()}  # fmt: skip
        flags = [f"--config.model.{field}={text}" for field, text in texts.items()]
        remedy = remedy or f"; set {' '.join(flags)}"
        raise InputError(f"model.name={name!r}: {source} has other sizes{remedy}")
    return False


def cut_pictures(config: ConfigDict) -> Changes:
    """The patch size by which pictures in their own shape are cut, and a square of such patches.

    The square, with about `data.max_tokens` patches, is the image size where that is None. Where
    patch sizes are drawn, the config states the one of the parameters.
    """
    settings, changes = Settings.of(config), Changes()
    draws, cuts = settings.model.patch_sizes is not None, settings.data.max_tokens is not None
    if settings.model.name is None or not (draws or cuts):
        return {}
    model = model_of(settings.model, settings.data)
    if draws:
        changes["model.patch_size"] = model.token_stride
    if cuts:
        changes["data.patch_size"] = model.token_stride
        if config.data.image_size is None:
            height, width = model.image_size
            changes["data.image_size"] = height if height == width else (height, width)
    return changes


def freeze_layers(config: ConfigDict) -> Changes:
    """`optimizer.freeze`, where `optimizer.last_layers` sets it.

    Raises:
      InputError: the model has fewer layers, or `config` freezes something else too.
    """
    last = config.optimizer.last_layers
    if last is None:
        return {}
    settings = Settings.of(config)
    model = model_of(settings.model, settings.data)
    params, freeze = tree.unflatten_names(abstract_params(model)), config.optimizer.freeze
    try:
        pattern = tree.pattern_below(params, last)
    except ValueError as e:
        raise InputError(f"optimizer.last_layers={last}: {e}") from None
    if freeze not in (None, pattern):
        raise InputError(
            f"optimizer.freeze={freeze!r}: optimizer.last_layers={last} sets it; "
            "leave out one of the two"
        )
    return {"optimizer.freeze": pattern}


def follow_rule(config: ConfigDict) -> Changes:
    """The length and the learning rate that `schedule.rule` sets.

    They are `duration` and `optimizer.peak_lr` where they are None, and `schedule.warmup` where it
    has its default; `data.num_examples` must be set.
    """
    if config.schedule.rule is None:
        return {}
    sizes = {"num_examples": config.data.num_examples}
    sizes |= {"global_batch_size": config.global_batch_size}
    length, changes = RULES[config.schedule.rule](*sizes.values()), Changes()
    duration = config.duration
    if duration is None:
        changes["duration"] = duration = f"{length.steps} steps"
    if config.optimizer.peak_lr is None:
        changes["optimizer.peak_lr"] = length.peak_lr
    if config.schedule.warmup == config_lib.base_config().schedule.warmup:
        steps = parse_duration(duration, key="duration", **sizes)
        changes["schedule.warmup"] = f"{bit_warmup(steps)} steps"
    return changes
