"""What the source of the weights, the model and the number of examples decide of a config."""

from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import tree
from vit_jax.errors import InputError
from vit_jax.experiment.durations import parse_duration
from vit_jax.experiment.finetune_length import RULES, bit_warmup
from vit_jax.models import create_model, fields_of, find_family, is_of_family, name_of, sizes_of
from vit_jax.models.fields import field_defaults
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.shapes import abstract_params

# Fields of `config.model` that are no property of a source.
_NOT_TAKEN = {"dtype", "scan", "remat", "remat_layers", "dropout", "attention_dropout",
              "stochastic_depth", "head_bias", "lora_rank"}  # fmt: skip
_OF_HEAD = {"hidden_head", "distillation_head"}  # taken only with the head itself

Changes = dict[str, Any]  # {dotted key: value}, as for `with_values`


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
    for field in (set(fields_of(config.model.name)) & set(config.model)) - left:
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
    if not is_of_family(model, name):
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
