"""What a config can choose by name: {name: "module:class"}, imported on first use.

A new part is one class in one file, and one line here; a plug-in adds its class to the same dicts.
"""

from typing import Any

from vit_jax.config import sections
from vit_jax.config.parts import Registry

OBJECTIVES: Registry[Any] = Registry(
    "objective.name",
    sections.Objective,
    {
        "supervised": "vit_jax.objectives.supervised:Supervised",
        "distillation": "vit_jax.objectives.distillation:Distillation",
        "masked_patches": "vit_jax.objectives.masked_patches:MaskedPatches",
        "mae": "vit_jax.objectives.mae:Mae",
        "lejepa": "vit_jax.objectives.lejepa:LeJepa",
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
        "exponential": "vit_jax.experiment.schedules:Exponential",
        "multistep": "vit_jax.experiment.schedules:Multistep",
    },
)

REGISTRIES = (OBJECTIVES, LOSSES, OPTIMIZERS, SCHEDULES)
