"""The forms of every file in configs/, and their configs without the files that they would read."""

import pathlib

from vit_jax.config import Settings
from vit_jax.config.text import load_config
from vit_jax.run.setup.opener import Tables
from vit_jax.run.setup.resolve import resolve

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

# The words of the full forms (-: none) and the debug forms of each file; else "- debug".
FORMS = {
    "pretrain": "ViT-B/16,imagenet2012 ViT-L/16,imagenet21k,debug "
    "ViT-B/16,jft=mine,fewshot,debug BiT-R152x2,jft=mine,debug R50+ViT-L/32,jft=mine,debug",
    "cifar10": "- small 5k 5k,medium1 fast fast,held_out debug small,debug 5k,strong2,debug "
    "fast,held_out,debug",
    "folder": "- ViT-S/16 BiT-R50x1 ViT-S/16,native ViT-S/16,packed debug ViT-S/16,debug "
    "BiT-R50x1,debug packed,debug",
    "noisy_student": "- L2,my_images debug",
    "distillation": "bit large bit=runs/bit,large=runs/large debug bit,debug",
    "siglip": "ViT-B/16 ViT-B/16,naflex ViT-L/16,debug debug ViT-B/16,naflex,debug",
    "words": "folder debug",
    "lit": "- folder debug",
    "captions": "ViT-B/16 ViT-L/16,pairs folder,pairs cifar10 debug ViT-L/16,pairs,debug",
    "clip": "- ViT-L/14 debug",
    "deit3": "ViT-S/16 ViT-L/16,vit5 ViT-B/16,finetune ViT-B/16,vit5,debug "
    "ViT-S/16,finetune,debug",
    "giant": "ViT-g/14,jft=mine ViT-22B/14,imagenet21k ViT-G/14,jft=mine,debug",
    "dinov3": "- gram debug gram,debug",
    "vit_s16_in1k": "- published_contrast debug",
    "deit": "DeiT-B/16 ViT-S/16 DeiT-S/16,debug DeiT-Ti/16,384,soft,debug",
    "efficientnet": "EfficientNet-B0 EfficientNet-L2 EfficientNet-B7,debug",
    "finetune": "ViT-B/16,cifar10 ViT-H/14,imagenet2012,headline ViT-B/16,cifar10,debug "
    "ViT-B/16,cifar10,head_only,debug BiT-R50x1,cifar10 BiT-R50x1,cifar10,debug "
    "R26+ViT-S/32,imagenet2012,headline R50+ViT-B/16,cifar10,debug ViT-B/16,folder "
    "ViT-B/16,folder,last4 DeiT-B/16,folder,head_only ViT-B/16,cifar10,lora16 "
    "ViT-B/16,folder,lora,debug ViT-B/16,folder,last4,debug folder,lora cifar10 folder,debug "
    "list ViT-B/16,list,last4 folder,multilabel multilabel,debug",
    "finetune_study": "ViT-L/32,oxford_flowers102 ViT-B/16,cifar10,debug "
    "BiT-R101x3,oxford_iiit_pet",
    "finetune_parts": "- choose debug",
    "vtab": "ViT-H/14 ViT-B/16,debug BiT-R50x3 BiT-R50x1,debug",
    "lejepa": "- folder cifar10 digits debug folder,debug",
    "data_size": "tuned fixed tuned,debug fixed,debug",
    "five_classes": "- pretrain debug pretrain,debug",
    "dino": "- folder cifar10 debug folder,debug",
    "ibot": "- folder debug folder,debug",
    "dinov2": "- own_head,sinkhorn debug",
    "selfsup": "folder ViT-S/16 ViT-B/14,folder folder,debug ViT-S/16,debug ViT-S/16,folder,debug",
    "mae": "ViT-B/16 ViT-L/16,finetune ViT-H/14,1600ep ViT-B/16,linear folder cifar10 "
    "cifar10,finetune debug finetune,debug linear,debug folder,debug",
    "masked_patches": "ViT-B/16,jft=mine ViT-B/16,imagenet2012,small_patch "
    "ViT-B/16,imagenet2012,finetune cifar10,pixels debug pixels,debug",
    "augreg": "ViT-B/16,imagenet2012,none ViT-B/16,imagenet21k,medium1,debug "
    "R26+ViT-S/32,imagenet21k,light1,debug",
    "evaluate": "cifar10 real,classification,imagenet2012 shifts,objectnet debug",
}  # fmt: skip
FORMS = {
    path.stem: ["" if form == "-" else form for form in FORMS.get(path.stem, "- debug").split()]
    for path in sorted(CONFIGS.glob("*.py"))
}
OF_EVALUATION = FORMS.pop("evaluate")  # which does not describe a run
EVERY_FORM = [(name, words) for name, forms in FORMS.items() for words in forms]


def load(name, words=""):
    return load_config(f"{CONFIGS / name}.py" + (f":{words}" if words else ""))


def without_files(name, words):
    """A config with numbers in place of what it would read of data, weights and teachers."""
    c = load(name, words)
    c.init_from, c.init_fields = None, "config"
    c.data.num_classes, c.data.num_examples = c.data.num_classes or 10, 10**7
    c.data.image_size = c.data.image_size or 224
    c.model.name = c.model.name or "ViT-B/16"  # else the source's
    if c.objective.name == "distillation":
        c.objective.teacher = "untrained:BiT-R50x1"
    return resolve(Settings.of(c), Tables()).config
