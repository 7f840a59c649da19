"""Fills in the config keys that the source of the weights, the model or the data decide.

A config file cannot know them: `init_fields="source"` takes the model's fields, the image size and
the value range from `init_from`; `optimizer.last_layers` becomes a pattern of frozen parameters;
`schedule.rule` sets the length and the learning rate from the number of examples. config.json holds
the result, and a resumed run takes it from there.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import transfer, tree
from vit_jax.errors import InputError
from vit_jax.experiment.data_size import RULES, bit_warmup
from vit_jax.experiment.durations import parse_duration
from vit_jax.models import create_model, find_family, name_of, sizes_of
from vit_jax.models.fields import field_defaults, field_names
from vit_jax.transfer.shapes import abstract_params
from vit_jax.transfer.spec import Pretrained

logger = logging.getLogger("vit_jax")

# Fields of `config.model` that are no property of a source.
_NOT_TAKEN = {"dtype", "scan", "remat", "remat_layers", "dropout", "attention_dropout",
              "stochastic_depth", "head_bias", "lora_rank"}  # fmt: skip
_OF_HEAD = {"hidden_head", "distillation_head"}  # taken only with the head itself
_VALUE_RANGE = ("data.mean", "data.std")
_BY_RULE = ("duration", "optimizer.peak_lr", "schedule.warmup")


def take_fields(config: ConfigDict, pretrained: Pretrained) -> ConfigDict:
    """`config` with the fields that `init_fields="source"` takes from `pretrained`.

    Fields of the model and the image size are taken where they are None, `data.mean` and `data.std`
    where they have their defaults. The sizes are those of `model.name`, and must be the source's; a
    run of the same `model.name` gives its own sizes.

    Raises:
      InputError: the source is another model, or takes images of any size and `config` has none.
    """
    if config.init_fields != "source":
        return config
    same_name = _check_name(config, pretrained)
    config = copy.deepcopy(config)  # keeps the types of keys that are None
    family, model = find_family(config.model.name), pretrained.model
    defaults = field_defaults(family.module) | family.parse(config.model.name)
    own_sizes = {} if same_name else sizes_of(config.model.name)
    left = _NOT_TAKEN | own_sizes.keys() | (_OF_HEAD if config.init_head == "new" else set())
    for field in (set(field_names(family.module)) & set(config.model)) - left:
        theirs = getattr(model, field)
        if config.model[field] is None and theirs != defaults.get(field):
            config.model[field] = theirs
    d, spec = config.data, pretrained.spec
    if d.image_size is None:
        if spec.image_size is None:
            raise InputError(
                f"data.image_size=None: {pretrained.source} takes images of any size; choose one "
                "with --config.data.image_size"
            )
        height, width = spec.image_size
        d.image_size = height if height == width else (height, width)
    default = config_lib.base_config().data
    for key in ("mean", "std"):
        if tuple(d[key]) == default[key] and len(getattr(spec, key)) == d.channels:
            d[key] = tuple(getattr(spec, key))
    return config


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


def freeze_layers(config: ConfigDict) -> ConfigDict:
    """`config` with `optimizer.freeze` set by `optimizer.last_layers`.

    Raises:
      InputError: the model has fewer layers, or `config` freezes something else too.
    """
    last = config.optimizer.last_layers
    if last is None:
        return config
    fields = config_lib.model_fields(config)
    model = create_model(config.model.name, 1, config.data.image_size, **fields)
    params, freeze = tree.unflatten_names(abstract_params(model)), config.optimizer.freeze
    try:
        pattern = tree.pattern_below(params, last)
    except ValueError as e:
        raise InputError(f"optimizer.last_layers={last}: {e}") from None
    if freeze is not None:
        frozen, chosen = (tree.mask(params, each) for each in (freeze, pattern))
        if jax.tree.all(jax.tree.map(np.array_equal, frozen, chosen)):
            return config
        raise InputError(
            f"optimizer.freeze={freeze!r}: optimizer.last_layers={last} sets it; "
            "leave out one of the two"
        )
    config = copy.deepcopy(config)
    config.optimizer.freeze = pattern
    return config


def follow_rule(config: ConfigDict) -> ConfigDict:
    """`config` with the length and the learning rate set by `schedule.rule`.

    Sets `duration` and `optimizer.peak_lr` where they are None, and `schedule.warmup` where it has
    its default; `data.num_examples` must be set.
    """
    if config.schedule.rule is None:
        return config
    config = copy.deepcopy(config)
    sizes = {"num_examples": config.data.num_examples}
    sizes |= {"global_batch_size": config.global_batch_size}
    length = RULES[config.schedule.rule](*sizes.values())
    if config.duration is None:
        config.duration = f"{length.steps} steps"
    if config.optimizer.peak_lr is None:
        config.optimizer.peak_lr = length.peak_lr
    if config.schedule.warmup == config_lib.base_config().schedule.warmup:
        steps = parse_duration(config.duration, key="duration", **sizes)
        config.schedule.warmup = f"{bit_warmup(steps)} steps"
    return config


def take_decided(config: ConfigDict, stored: ConfigDict) -> ConfigDict:
    """`config` with what was decided for the run of `stored`, its config.json, where it is open.

    Only keys that `config` does not set itself are taken. So a run goes on as it began even if its
    source has changed or is gone.
    """
    keys = ["optimizer.accum_steps"]
    if (config.init_fields, config.init_from) == ("source", stored.init_from):
        fields = set(stored.model) - _NOT_TAKEN - {"name"}
        keys += [*(f"model.{field}" for field in fields), "data.image_size", *_VALUE_RANGE]
    if config.optimizer.last_layers is not None:
        keys += ["optimizer.freeze"]
    if config.schedule.rule is not None:
        keys += _BY_RULE
    return take_stored(config, stored, keys)


def take_stored(config: ConfigDict, stored: ConfigDict, keys: Sequence[str]) -> ConfigDict:
    """`config` with those of `keys` that have their defaults taken from `stored`."""
    ours, theirs = config_lib.flatten(config), config_lib.flatten(stored)
    defaults = config_lib.flatten(config_lib.default_config(config.plugins))
    taken = {
        key: theirs[key]
        for key in keys
        if key in ours and ours[key] == defaults[key] and theirs[key] != ours[key]
    }
    if not taken:
        return config
    config = copy.deepcopy(config)
    config.update_from_flattened_dict(taken)
    return config


def read_fields(config: ConfigDict) -> ConfigDict:
    """`take_fields` for a command that does not train; reads `init_from` only if it is needed.

    Raises:
      InputError: as `take_fields`, or if the source cannot be read.
    """
    if config.init_fields != "source":
        return config
    source = config_lib.weights_source(config)
    assert source is not None  # checked by config.checks
    return take_fields(config, transfer.read_pretrained(source))


def decide(config: ConfigDict) -> ConfigDict:
    """`config` with all that its model and the number of its examples decide.

    Raises:
      InputError: as `freeze_layers`.
    """
    return follow_rule(freeze_layers(config))
