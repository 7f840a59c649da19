"""Parts that a config can choose by name: {name: "module:class"}, imported on first use.

A new part is one class and one line here (an evaluator: in `evals`; a format of weights: in
`transfer`); a plug-in adds its class to the same dicts.
"""

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import InputError
from vit_jax.config import sections
from vit_jax.config.evals import EVALUATORS
from vit_jax.config.parts import Key, Part, Registry, keys_of_fields

OBJECTIVES: Registry[Any] = Registry(
    "objective.name",
    sections.Objective,
    {
        "supervised": "vit_jax.objectives.supervised:Supervised",
        "distillation": "vit_jax.objectives.distillation:Distillation",
        "masked_patches": "vit_jax.objectives.masked_patches:MaskedPatches",
        "mae": "vit_jax.objectives.mae:Mae",
        "lejepa": "vit_jax.objectives.lejepa:LeJepa",
        "contrastive": "vit_jax.objectives.contrastive:Contrastive",
        "captions": "vit_jax.objectives.captions:Captions",
        "self_distillation": "vit_jax.objectives.self_distillation:SelfDistillation",
    },
)

LOSSES: Registry[Any] = Registry(
    "loss.name",
    sections.Loss,
    {
        "softmax": "vit_jax.objectives.losses:Softmax",
        "sigmoid": "vit_jax.objectives.losses:Sigmoid",
    },
)

METRICS: Registry[Any] = Registry(
    "metrics",
    Part,
    {
        "top1": "vit_jax.objectives.metrics:Top1",
        "top5": "vit_jax.objectives.metrics:Top5",
        "loss": "vit_jax.objectives.metrics:MeanLoss",
        "ece": "vit_jax.objectives.metrics:CalibrationError",
        "macro_top1": "vit_jax.objectives.metrics:MacroTop1",
        "macro_f1": "vit_jax.objectives.metrics:MacroF1",
        "micro_f1": "vit_jax.objectives.metrics:MicroF1",
    },
)

OPTIMIZERS: Registry[Any] = Registry(
    "optimizer.name",
    sections.Optimizer,
    {
        "adamw": "vit_jax.experiment.optimizers.optimizers:AdamW",
        "sgd": "vit_jax.experiment.optimizers.optimizers:Sgd",
        "lion": "vit_jax.experiment.optimizers.optimizers:Lion",
        "rmsprop": "vit_jax.experiment.optimizers.optimizers:RmsProp",
        "adafactor": "vit_jax.experiment.optimizers.optimizers:Adafactor",
        "lars": "vit_jax.experiment.optimizers.optimizers:Lars",
        "lamb": "vit_jax.experiment.optimizers.lamb:Lamb",
        "schedule_free": "vit_jax.experiment.optimizers.schedule_free:ScheduleFree",
        "muon": "vit_jax.experiment.optimizers.muon:Muon",
    },
)

SCHEDULES: Registry[Any] = Registry(
    "schedule.name",
    sections.Schedule,
    {
        "constant": "vit_jax.experiment.schedules:Constant",
        "linear": "vit_jax.experiment.schedules:Linear",
        "cosine": "vit_jax.experiment.schedules:Cosine",
        "rsqrt": "vit_jax.experiment.schedules:Rsqrt",
        "power": "vit_jax.experiment.schedules:Power",
        "wsd": "vit_jax.experiment.schedules:Wsd",
        "exponential": "vit_jax.experiment.schedules:Exponential",
        "multistep": "vit_jax.experiment.schedules:Multistep",
    },
)


class DataSets(Registry[Any]):
    """Names that are not listed mean TFDS data sets, VTAB's tasks (`vtab/dtd`), or data sets of the
    Hugging Face Hub (`hf:OWNER/NAME`). A run notes what arrays it was given
    (`arrays@...`).

    A config may have keys of several data sets, for mixtures and evaluators; each takes its own.
    """

    def entry(self, name: str) -> str:
        if name in self:
            return name
        kinds = {"hf:": "hf", "vtab/": "vtab", "arrays@": "arrays"}
        return next((kind for start, kind in kinds.items() if str(name).startswith(start)), "tfds")

    def make(
        self, values: Mapping[str, Any], prefix: str | None = None, in_steps: Any = None
    ) -> Any:
        own = self.find(values["name"]).declared()
        values = {k: v for k, v in values.items() if k == "name" or k in own}
        return super().make(values, prefix, in_steps)


SOURCES = DataSets(
    "data.name",
    sections.Data,
    {
        "arrays": "vit_jax.data.sources.arrays:Arrays",
        "arrow": "vit_jax.data.sources.tables:Arrow",
        "digits": "vit_jax.data.sources.made:Digits",
        "folder": "vit_jax.data.sources.folder:Folder",
        "hf": "vit_jax.data.sources.hub:Hub",
        "list": "vit_jax.data.sources.list:List",
        "parquet": "vit_jax.data.sources.tables:Parquet",
        "pseudo": "vit_jax.data.sources.pseudo:Pseudo",
        "synthetic": "vit_jax.data.sources.made:Synthetic",
        "tar": "vit_jax.data.sources.tar:Tar",
        "tfds": "vit_jax.data.sources.tfds:Tfds",
        "unlabelled": "vit_jax.data.sources.folder:Unlabelled",
        "vtab": "vit_jax.data.sources.vtab:Vtab",
    },
)

OPS: Registry[Any] = Registry(
    "op",
    Part,
    {
        "decode": "vit_jax.data.host_ops:Decode",
        "scaled_decode": "vit_jax.data.host_ops:ScaledDecode",
        "inception_crop": "vit_jax.data.host_ops:InceptionCrop",
        "scaled_inception_crop": "vit_jax.data.host_ops:ScaledInceptionCrop",
        "resize": "vit_jax.data.host_ops:Resize",
        "resize_small": "vit_jax.data.host_ops:ResizeSmall",
        "torchvision_resize": "vit_jax.data.host_ops:TorchvisionResize",
        "central_crop": "vit_jax.data.host_ops:CentralCrop",
        "torchvision_crop": "vit_jax.data.host_ops:TorchvisionCrop",
        "random_crop": "vit_jax.data.host_ops:RandomCrop",
        "pad_crop": "vit_jax.data.host_ops:PadCrop",
        "randaugment": "vit_jax.data.host_ops:RandAugment",
        "autoaugment": "vit_jax.data.host_ops:AutoAugment",
        "flip": "vit_jax.data.device_ops:Flip",
        "vertical_flip": "vit_jax.data.device_ops:VerticalFlip",
        "rotate90": "vit_jax.data.device_ops:Rotate90",
        "erase": "vit_jax.data.device_ops:Erase",
        "mixup": "vit_jax.data.device_ops:MixUp",
        "cutmix": "vit_jax.data.device_ops:CutMix",
        "mixup_or_cutmix": "vit_jax.data.device_ops:MixUpOrCutMix",
        "color_jitter": "vit_jax.data.colour_ops:ColorJitter",
        "greyscale": "vit_jax.data.colour_ops:Greyscale",
        "blur": "vit_jax.data.colour_ops:Blur",
        "solarize": "vit_jax.data.colour_ops:Solarize",
        "three_augment": "vit_jax.data.colour_ops:ThreeAugment",
    },
)


class Positions(Registry[Any]):
    """Their classes have no keys; see `models.position.PositionEmbedding`."""

    def keys_of(self, part: type[Any]) -> dict[str, Key]:
        return {}


POSITIONS = Positions(
    "model.pos_embed",
    Part,
    {
        "learned_1d": "vit_jax.models.position:Learned1D",
        "learned_2d": "vit_jax.models.position:Learned2D",
        "relative": "vit_jax.models.position:RelativePositions",
        "sincos_2d": "vit_jax.models.position:Sincos2D",
        "none": "vit_jax.models.position:NoPositions",
        "sincos_1d": "vit_jax.models.position:Sincos1D",
    },
)


class Families(Registry[Any]):
    """A part is a Linen module, whose fields are its keys; see `models.contract.Model`.

    A family is called by the start of its models' names, up to the first dash. For hybrids, the
    number of the ResNet's layers is left out.
    """

    def entry(self, name: str) -> str:
        """The family, for its own name or for the name of one of its models."""
        return name if name in self else re.sub(r"^R\d+\+", "R+", str(name).partition("-")[0])

    def chosen_keys(self, name: str | None) -> dict[str, Key]:
        """With the sizes of the model called `name` as defaults."""
        keys = super().chosen_keys(name)
        try:
            sizes = self.find(str(name)).parse(name) if keys else {}
        except InputError:  # an unknown variant
            return keys
        return keys | {k: keys[k]._replace(default=size) for k, size in sizes.items() if k in keys}

    def keys_of(self, part: type[Any]) -> dict[str, Key]:
        from_data = ("num_classes", "image_size", "channels", "max_tokens", "pack")
        keys = keys_of_fields(part)  # type: ignore[arg-type] # mypy wants a hash of types
        if hasattr(part, "pos_embeds"):  # plug-ins' positions too
            keys = keys | {"pos_embed": keys["pos_embed"]._replace(choices=part.pos_embeds())}
        return {k: declared for k, declared in keys.items() if k not in from_data}


FAMILIES = Families(
    "model.name",
    sections.Model,
    {
        "ViT": "vit_jax.models.vit:ViT",
        "DeiT": "vit_jax.models.deit:DeiT",
        "ViTC": "vit_jax.models.conv_stem:ViTC",
        "T2T": "vit_jax.models.t2t:T2TViT",
        "Axial": "vit_jax.models.axial:AxialViT",
        "R+ViT": "vit_jax.models.hybrid:HybridViT",
        "BiT": "vit_jax.models.bit:BiT",
        "EfficientNet": "vit_jax.models.efficientnet:EfficientNet",
    },
)

STUDIES: Registry[Any] = Registry(
    "study.name",
    sections.Study,
    {
        "finetune_sweep": "vit_jax.studies.finetune_sweep:FinetuneSweep",
        "grid": "vit_jax.studies.grid:Grid",
        "noisy_student": "vit_jax.studies.noisy_student:NoisyStudent",
        "pretraining": "vit_jax.studies.pretraining:Pretraining",
        "scaling": "vit_jax.studies.scaling:Scaling",
        "sweep": "vit_jax.studies.sweep:Sweep",
        "vtab": "vit_jax.studies.vtab:Vtab",
    },
)

REGISTRIES = (
    FAMILIES,
    SOURCES,
    OBJECTIVES,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    STUDIES,
)  # of sections

ALL_REGISTRIES = (*REGISTRIES, EVALUATORS, METRICS, OPS, POSITIONS)
