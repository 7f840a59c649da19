"""Completes a config that evaluates a model by what the model's source states."""

from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.base.errors import Faults, collect_faults
from vit_jax.config import EVALUATORS, LOSSES, Settings, with_values
from vit_jax.config.evals import learning_kinds
from vit_jax.data.checks import check_eval_ops
from vit_jax.models.contract import about
from vit_jax.transfer.pretrained import Pretrained
from vit_jax.transfer.resample import check_convention


def complete_by_source(
    asked: Settings, pretrained: Pretrained, by_user: Collection[str]
) -> Settings:
    """The settings of `asked` with what the source of the model states.

    It states the value range, how files become pixels, the loss, and the image size, which
    `data.image_size` may set: all images then have that size. Without it, a model of pictures in
    their own shape is evaluated on such pictures. The keys `by_user` stay, and so do others that
    are not as by default.

    Raises:
      InputError: lists the keys that do not suit the source.
    """
    config, faults = asked.to_config(), Faults()
    spec, model, source = pretrained.spec, pretrained.model, pretrained.source
    faults.check(check_convention, config.init_resize, "init_resize")
    rule = spec.rule if config.data.image_size is None else None
    if config.data.image_size is None:
        config.data.image_size = spec.image_size
    faults.need(
        config.data.image_size is not None,
        f"data.image_size=None: {source} takes images of any size; choose one with "
        "--config.data.image_size",
    )
    stated = _find_stated(config, pretrained, by_user, faults)
    if rule is not None:
        stated |= {"data.max_tokens": rule.most, "data.patch_size": rule.patch_size}
    default, found = map(config_lib.flatten, (config_lib.default_config(), config))
    config = with_values(config, {
        key: value
        for key, value in stated.items()
        if key not in by_user and found[key] == default.get(key, found[key])
    })  # fmt: skip
    faults.need(
        "data.ops" not in by_user,
        "data.ops: evaluators do not read it; set --config.evals.NAME.ops of each",
    )
    of_model = {"channels": about(model).channels, "num_classes": model.num_classes}
    for key, number in of_model.items():
        given = config.data[key]
        faults.need(
            f"data.{key}" not in by_user or number == given,
            f"data.{key}={given}: {source} has {number}; leave it out",
        )
    config.data.update(of_model)
    for name, entry in config.evals.items():
        faults.need(
            model.num_classes is not None or EVALUATORS.find(entry.type).learns_classes,
            f"evals.{name}.type={entry.type!r}: {source} has no classes; use one of "
            f"{', '.join(learning_kinds())}",
        )
    collect_faults(faults)
    settings, wrong = Settings.read_open(config)  # a source has no keys of training
    faults += wrong
    if rule is not None:
        check_eval_ops(settings.evals, settings.data, faults)
    collect_faults(faults)
    return settings


def _find_stated(
    config: ConfigDict, pretrained: Pretrained, by_user: Collection[str], faults: Faults
) -> dict[str, Any]:
    """{key: value} that the source states; its plug-ins are added to `config`."""
    run, spec, source = pretrained.run, pretrained.spec, pretrained.source
    stated: dict[str, Any] = {
        f"data.{key}": getattr(spec, key) for key in ("pixel_range", "decoding", "mean", "std")
    }
    stated["data.exif"] = spec.exif is not False
    if run is not None:
        config_lib.add_plugins(config, run["config"]["plugins"])
        stated |= {f"loss.{k}": value for k, value in run["config"]["loss"].items()}
        stated["data.multi_label"] = run["config"]["data"]["multi_label"]
    several = [n for n, e in config.evals.items() if EVALUATORS.find(e.type).multi_label]
    if several and (pretrained.model.num_classes or 0) > 1:
        loss = stated.setdefault("loss.name", spec.loss or "sigmoid")
        stated["data.multi_label"] = True
        faults.need(
            not LOSSES.find(loss).excludes or "loss.name" in by_user,
            f"evals.{several[0]}.type='multilabel': {source} was trained with "
            f"loss.name={loss!r}, by which the classes of an image compete; evaluate it with "
            "classification, or with --config.loss.name=sigmoid",
        )
    elif several:
        faults.append(
            f"evals.{several[0]}.type='multilabel': {source} has no classes; "
            "train some on its features first: --config=finetune:multilabel,head_only"
        )
    return stated
