"""Twins: short runs on a CPU, one or more for each recipe family, whose numbers are stored.

A new twin is one entry of TWINS and one command, `python -m vit_jax.main check --record NAME`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import text as config_text
from vit_jax.errors import InputError, nearest
from vit_jax.run.validation import validate


class Twin(NamedTuple):
    """A short run with the settings of a recipe.

    recipe: what it stands for, in a few words.
    config: NAME[:words] of a shipped config.
    overrides: {key: text}, as after `--config.`; the model is small, and the data are the digits
      unless the recipe needs colours.
    """

    recipe: str
    config: str
    overrides: Mapping[str, str]

    @property
    def data(self) -> str:
        """The data set that it trains on: digits, which the package holds, or one of TFDS."""
        return self.overrides.get("data.name", "digits")


# Stored numbers are those of float32 on a CPU; bfloat16 rounds differently on other CPUs.
_ALL = {"model.dtype": "float32", "mesh.platform": "cpu"}
_SHORT = {"duration": "200 steps", "schedule.warmup": "5 steps"}
_DIGITS = {
    "data.name": "digits", "data.image_size": "8",
    "data.num_classes": "None", "data.num_examples": "None",
}  # fmt: skip
_TINY_VIT = {
    "model.patch_size": "4",
    "model.width": "64",
    "model.depth": "2",
    "model.mlp_dim": "128",
}
_VAL = {"evals.val.split": "test", "evals.val.every": "100 steps", "evals.val.batch_size": "360"}
_TEST = {"evals.test.every": "100 steps", "evals.test.batch_size": "360"}
_CIFAR10 = {
    "duration": "100 steps", "schedule.warmup": "5 steps", "data.name": "cifar10",
    "evals.test.split": "test[:1000]", "evals.test.every": "50 steps",
    "evals.test.batch_size": "250",
}  # fmt: skip


def _every(*evaluators: str) -> dict[str, str]:
    return {f"evals.{name}.every": "100 steps" for name in evaluators}


TWINS: dict[str, Twin] = {
    "quickstart": Twin("supervised ViT", "quickstart", _SHORT | _TEST),
    "pretrain": Twin(
        "pretraining of table 3: AdamW with strong decay, dropout, clipping",
        "pretrain:ViT-B/16,imagenet2012,debug",
        _SHORT | _DIGITS | _TINY_VIT | _VAL,
    ),
    "augreg": Twin(
        "AugReg: RandAugment, MixUp, dropout, stochastic depth, sigmoid loss",
        "augreg:ViT-Ti/16,imagenet21k,medium1,reg,debug",
        _SHORT | _DIGITS | _TINY_VIT | _VAL | {"optimizer.peak_lr": "0.005"},
    ),
    "better_plain": Twin(
        "better plain ViT: mean pooling, fixed positions, hidden head layer",
        "vit_s16_in1k:debug",
        _SHORT | _DIGITS | _TINY_VIT | _VAL | {"optimizer.peak_lr": "0.003"},
    ),
    "finetune": Twin(
        "fine-tuning of table 4: SGD with momentum, clipping",
        "finetune:ViT-B/16,cifar10,debug",
        _SHORT | _DIGITS | _TINY_VIT | _TEST
        | {"data.ops": "inception_crop(area_min=0.5)", "evals.test.ops": "",
           "schedule.warmup": "0 steps", "optimizer.peak_lr": "0.03"},
    ),
    "deit": Twin(
        "DeiT: hard labels of a teacher, repeated views, MixUp or CutMix, erasing",
        "deit:DeiT-S/16,debug",
        _SHORT | _DIGITS | _TINY_VIT | _VAL
        | {"objective.teacher": "untrained:ViT-mu/4", "optimizer.peak_lr": "0.003"},
    ),
    "distillation": Twin(
        "distillation of features",
        "distillation:debug",
        _SHORT | _TEST | {"objective.name": "distillation", "objective.mode": "features",
                          "objective.teacher": "untrained:ViT-mu/4", "study.name": "None",
                          "study.cells": "[]"},
    ),
    "masked_patches": Twin(
        "masked patches: mean colours of corrupted patches",
        "masked_patches:debug",
        _SHORT | _DIGITS | _TINY_VIT
        | {"model.patch_size": "2", "optimizer.peak_lr": "0.003"} | _every("pictures"),
    ),
    "mae": Twin(
        "MAE: the encoder sees a quarter of the patches",
        "mae:debug",
        _SHORT | _DIGITS | _TINY_VIT
        | {"model.patch_size": "2", "optimizer.peak_lr": "0.003"} | _every("pictures"),
    ),
    "dino": Twin(
        "DINO: views, teacher, centring",
        "dino:debug",
        _SHORT | _DIGITS | _TINY_VIT | {"optimizer.peak_lr": "0.001"} | _every("near", "rank"),
    ),
    "dinov2": Twin(
        "DINOv2: masked tokens (iBOT), Sinkhorn, KoLeo",
        "dinov2:sinkhorn,debug",
        _SHORT | _DIGITS | _TINY_VIT
        | {"model.patch_size": "2", "optimizer.peak_lr": "0.001"} | _every("near", "rank"),
    ),
    "lejepa": Twin(
        "LeJEPA: views, SIGReg",
        "lejepa:debug",
        _SHORT | _DIGITS | _TINY_VIT
        | {"data.image_size": "16", "optimizer.peak_lr": "0.001"} | _every("near", "probe", "rank"),
    ),
    "t2t": Twin(
        "T2T-ViT with the performer token module",
        "quickstart",
        _SHORT | _TEST
        | {"model.name": "T2T-ViT-7", "model.width": "64", "model.depth": "2",
           "model.mlp_dim": "128", "model.num_heads": "4", "model.pool": "None",
           "data.image_size": "32", "data.ops": "resize", "evals.test.ops": "resize",
           "duration": "100 steps"},
    ),
    "hybrid": Twin(
        "hybrid of a ResNet and a ViT",
        "augreg:R+ViT-Ti/16,imagenet2012,none,debug",
        _SHORT | _DIGITS | _VAL
        | {"data.image_size": "32", "data.ops": "resize", "evals.val.ops": "resize",
           "duration": "100 steps"},
    ),
    "efficientnet": Twin(
        "EfficientNet: batch statistics, RMSProp, L2, averaged weights",
        "efficientnet:EfficientNet-B0,debug",
        _SHORT | _DIGITS | _VAL
        | {"data.image_size": "32", "data.ops": "resize", "evals.val.ops": "resize",
           "duration": "100 steps", "optimizer.peak_lr": "0.003"},
    ),
    "cifar10": Twin(
        "supervised ViT on CIFAR-10",
        "cifar10:small",
        _CIFAR10 | {"model.depth": "3", "global_batch_size": "64"},
    ),
    "bit": Twin(
        "BiT ResNet on CIFAR-10",
        "bit_and_vit",
        _CIFAR10
        | {"model.name": "BiT-R50x1", "model.stages": "1,1,1", "model.stem_width": "32",
           "global_batch_size": "32", "study.name": "None", "study.cells": "[]"},
    ),
}  # fmt: skip


def find_twin(name: str) -> Twin:
    """The twin called `name`; raises InputError with the nearest name if there is none."""
    if name not in TWINS:
        raise InputError(f"{name!r}: no such twin; {nearest(name, list(TWINS))}")
    return TWINS[name]


def twin_config(
    twin: Twin, seed: int, overrides: Sequence[tuple[str, str]] = (), data_dir: str | None = None
) -> ConfigDict:
    """The valid config of `twin` with a seed, and further `overrides` as after `--config.`.

    `data_dir`: folder of prepared data sets, for twins that do not train on the digits.

    Raises:
      InputError: lists the faults of the overrides.
    """
    config = config_text.load_config(twin.config)
    settings = _ALL | twin.overrides | {"seed": str(seed)}
    if data_dir is not None and twin.data != "digits":
        settings["data.data_dir"] = data_dir
    faults = config_text.apply_overrides(config, [*settings.items(), *overrides])
    validate(config, faults, f"--config={twin.config}")
    return config
