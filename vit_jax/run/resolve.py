"""Decides the keys that a config leaves open; no other code sets a key.

    asked ──> continue_run ──> weights ──> teachers ──> data ──> rules ──> layout ──> microbatches

A config file cannot know them: `init_fields="source"` takes the model's fields, the image size and
the value range from `init_from`; the data give the numbers of classes and examples;
`optimizer.last_layers` becomes a pattern of frozen parameters; `schedule.rule` sets the length and
the learning rate from the number of examples; `auto` chooses the layout for the devices.

config.json keeps what was asked for, what it came to, and who decided each key: "user" (a flag),
"recipe" (the config file), "default", "source" (of the weights), "teachers", "data", "rule" or
"devices".
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import tree
from vit_jax.config.stored import StoredConfig, keep_resolved
from vit_jax.errors import Faults, InputError, collect_faults
from vit_jax.experiment.durations import parse_duration
from vit_jax.experiment.finetune_length import RULES, bit_warmup
from vit_jax.models import create_model, find_family, name_of, sizes_of
from vit_jax.models.fields import field_defaults, field_names
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.shapes import abstract_params

logger = logging.getLogger("vit_jax")

# Fields of `config.model` that are no property of a source.
_NOT_TAKEN = {"dtype", "scan", "remat", "remat_layers", "dropout", "attention_dropout",
              "stochastic_depth", "head_bias", "lora_rank"}  # fmt: skip
_OF_HEAD = {"hidden_head", "distillation_head"}  # taken only with the head itself
# What is decided anew at every start, and must then be as the data decided at the first; the number
# of microbatches is the recorded one, as far as the devices allow.
_DECIDED_ANEW = ("data.num_classes", "data.num_examples", "data.order", "data.streams",
                 "loss.class_weights", "optimizer.accum_steps")  # fmt: skip

Changes = dict[str, Any]  # {dotted key: value}, as for `with_values`


class Opener(Protocol):
    """Opens what decides open keys, each thing once.

    A run that trains opens files and devices (`opener.Files`), a plan tables (`opener.Tables`).
    """

    def find_faults(self, config: ConfigDict) -> list[str]:
        """What forbids `config` before anything is opened."""

    def weights(self, config: ConfigDict) -> Pretrained | None:
        """The source of the initial weights; None: there is none, or it decides nothing."""

    def teachers(self, config: ConfigDict) -> Changes:
        """What the teachers of the objective decide."""

    def data(self, config: ConfigDict) -> Changes:
        """What the data decide."""

    def has_layout_of(self, stored: StoredConfig) -> bool:
        """Whether `auto` has chosen the layout of `stored`, and for these devices."""

    def layout(self, config: ConfigDict) -> Changes:
        """What the devices decide of LAYOUT_KEYS."""

    def microbatches(self, config: ConfigDict) -> Changes:
        """What the devices decide of `optimizer.accum_steps`, if it is open or recorded."""


class Resolved(NamedTuple):
    """A config without open keys; see `StoredConfig`."""

    asked: ConfigDict
    config: ConfigDict
    decided_by: Mapping[str, str]


def resolve(
    asked: ConfigDict,
    open: Opener,
    stored: StoredConfig | None = None,
    by_user: Collection[str] = (),
) -> Resolved:
    """Decide the open keys of `asked`; writes nothing.

    Args:
      asked: has passed `validation.validate`.
      open: opens what decides.
      stored: of the run that goes on; None: a new run. What it decided stays, but for new entries
        of `evals`, and for mesh, remat and microbatches on other devices.
      by_user: the keys that the user has set on the command line.

    Raises:
      InputError: names the keys; faults of the source, the teachers and the data together.
    """
    config, decided_by = continue_run(asked, open, stored, by_user)
    faults = Faults(open.find_faults(config))
    for by, stage in _STAGES:
        changes = _differing(config, faults.check(stage, config, open) or {})
        config = config_lib.with_values(config, changes) if changes else config
        decided_by |= dict.fromkeys(changes, by)
        if by not in ("source", "teachers") or config.data.image_size is None:
            collect_faults(faults)  # as the next stage needs what this one decides
    known = config_lib.flatten(config)
    return Resolved(asked, config, {key: decided_by[key] for key in known})


def continue_run(
    asked: ConfigDict, open: Opener, stored: StoredConfig | None, by_user: Collection[str]
) -> tuple[ConfigDict, dict[str, str]]:
    """`asked` with what the run of `stored` decided, and who decided each key."""
    new = config_lib.flatten(asked)
    defaults = config_lib.flatten(config_lib.default_config(asked.plugins))
    decided_by = {
        key: "user" if key in by_user else "default" if defaults.get(key) == value else "recipe"
        for key, value in new.items()
    }
    if stored is None:
        return asked, decided_by
    anew = {*_DECIDED_ANEW}
    keeps_layout = open.has_layout_of(stored) if asked.auto else not stored.asked.auto
    if not keeps_layout:
        anew |= {*config_lib.LAYOUT_KEYS} - {"model.scan"}  # the form of its checkpoints
    same = keep_resolved(asked, stored)
    decided_by |= {key: stored.decided_by[key] for key in same if key in stored.decided_by}
    kept = {key: value for key, value in same.items() if key not in anew}
    return config_lib.with_values(asked, kept), decided_by


def take_fields(config: ConfigDict, pretrained: Pretrained) -> Changes:
    """The fields that `init_fields="source"` takes from `pretrained`.

    Fields of the model and the image size are taken where they are None, `data.mean` and `data.std`
    where they have their defaults. The sizes are those of `model.name`, and must be the source's; a
    run of the same `model.name` gives its own sizes.

    Raises:
      InputError: the source is another model, or takes images of any size and `config` has none.
    """
    if config.init_fields != "source":
        return {}
    same_name, changes = _check_name(config, pretrained), Changes()
    family, model = find_family(config.model.name), pretrained.model
    defaults = field_defaults(family.module) | family.parse(config.model.name)
    own_sizes = {} if same_name else sizes_of(config.model.name)
    left = _NOT_TAKEN | own_sizes.keys() | (_OF_HEAD if config.init_head == "new" else set())
    for field in (set(field_names(family.module)) & set(config.model)) - left:
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
    for key in ("mean", "std"):
        if tuple(d[key]) == default[key] and len(getattr(spec, key)) == d.channels:
            changes[f"data.{key}"] = tuple(getattr(spec, key))
    return changes


def _check_name(config: ConfigDict, pretrained: Pretrained) -> bool:
    """Whether the source is a run of `model.name`.

    Raises:
      InputError: the source has another family or other sizes than `config.model`.
    """
    name, model = config.model.name, pretrained.model
    run_name = pretrained.run["config"]["model"]["name"] if pretrained.run else None
    if name == run_name:
        return True
    source = f"init_from={pretrained.source!r}"
    theirs = run_name or name_of(model)
    remedy = f"; give {theirs}, as in --config=finetune:{theirs},folder" if theirs else ""
    if type(model) is not find_family(name).module:
        raise InputError(f"model.name={name!r}: {source} is a {type(model).__name__}{remedy}")
    sizes = {
        field: own if config.model.get(field) is None else config.model[field]
        for field, own in sizes_of(name).items()
    }
    if "patch_size" in sizes:
        sizes["patch_size"] = config_lib.image_hw(sizes["patch_size"])
    other = {f: getattr(model, f) for f, s in sizes.items() if getattr(model, f) != s}
    if other:
        flags = " ".join(f"--config.model.{field}={_as_flag(s)}" for field, s in other.items())
        said = ", ".join(f"{field} {size}, not {sizes[field]}" for field, size in other.items())
        raise InputError(
            f"model.name={name!r}: {source} has other sizes ({said}){remedy or f'; set {flags}'}"
        )
    return False


def _as_flag(size: Any) -> str:
    return ",".join(map(str, size)) if isinstance(size, tuple) else str(size)


def freeze_layers(config: ConfigDict) -> Changes:
    """`optimizer.freeze`, where `optimizer.last_layers` sets it.

    Raises:
      InputError: the model has fewer layers, or `config` freezes something else too.
    """
    last = config.optimizer.last_layers
    if last is None:
        return {}
    fields = config_lib.model_fields(config)
    model = create_model(config.model.name, 1, config.data.image_size, **fields)
    params, freeze = tree.unflatten_names(abstract_params(model)), config.optimizer.freeze
    try:
        pattern = tree.pattern_below(params, last)
    except ValueError as e:
        raise InputError(f"optimizer.last_layers={last}: {e}") from None
    if freeze is None:
        return {"optimizer.freeze": pattern}
    frozen, chosen = (tree.mask(params, each) for each in (freeze, pattern))
    if not jax.tree.all(jax.tree.map(np.array_equal, frozen, chosen)):
        raise InputError(
            f"optimizer.freeze={freeze!r}: optimizer.last_layers={last} sets it; "
            "leave out one of the two"
        )
    return {}


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


def _weights(config: ConfigDict, open: Opener) -> Changes:
    pretrained = open.weights(config)
    return {} if pretrained is None else take_fields(config, pretrained)


def _differing(config: ConfigDict, changes: Changes) -> Changes:
    """Those of `changes` that change `config`."""
    flat = config_lib.flatten(config)
    return {k: value for k, value in changes.items() if k not in flat or flat[k] != value}


# (who decides, what is decided), in this order.
_STAGES: Sequence[tuple[str, Callable[[ConfigDict, Opener], Changes]]] = (
    ("source", _weights),
    ("teachers", lambda config, open: open.teachers(config)),
    ("data", lambda config, open: open.data(config)),
    ("rule", lambda config, open: freeze_layers(config)),
    ("rule", lambda config, open: follow_rule(config)),
    ("devices", lambda config, open: open.layout(config)),
    ("devices", lambda config, open: open.microbatches(config)),
)
