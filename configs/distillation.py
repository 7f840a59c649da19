"""A small ViT on CIFAR-10 with and without a teacher: labels of a ResNet, features of a larger ViT.

DATA=--config.data.data_dir=DIR CONFIG=configs/distillation.py
python -m vit_jax.main --config=$CONFIG:bit $DATA --workdir=$W/bit
python -m vit_jax.main --config=$CONFIG:large $DATA --workdir=$W/large
python -m vit_jax.main study --config=configs/distillation.py:bit=$W/bit,large=$W/large $DATA \\
  --workdir=$W/study
A minute, on handwritten digits, untrained teachers: --config=configs/distillation.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The students, ViTs of 469,000 parameters, train with
three seeds on the same pictures for the same steps: on labels only; as a DeiT, half on the hard
labels of a BiT (arXiv:2012.12877); and half on the pooled features of a ViT of 1.8 million
parameters. Without bit=... or large=... the study leaves out what it needs. The teachers train on
the same 50,000 pictures.
"""

from vit_jax.config import base_config, classification, split_words
from vit_jax.errors import InputError

WORDS = {
    "bit": "train the ResNet; bit=WORKDIR: it is a teacher of the study",
    "large": "train the larger ViT; large=WORKDIR: it is a teacher of the study",
    "debug": "a few steps of tiny models, one seed",
}
UNTRAINED = {"bit": "untrained:ViT-mu/4", "large": "untrained:ViT-mu/4"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    teachers = dict(word.partition("=")[::2] for word in words)
    if {*teachers} - {"bit", "large"} or not all(teachers.values()) or {"bit", "large"} <= chosen:
        raise InputError(
            f"got {arg!r}, needs bit or large, or for the study bit=WORKDIR or large=WORKDIR or "
            "both; optional word: debug"
        )
    c = base_config()
    c.model.name = "ViT-Ti/8"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
    c.data.name, c.data.image_size = "cifar10", 32
    c.data.ops = "decode|pad_crop(2)|flip"
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "1200 steps", "120 steps"
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "1000 steps", "100 steps"
    c.evals.test = classification(split="test", every="3000 steps", ops="decode", batch_size=500)
    if "bit" in chosen:
        c.model.name, c.model.stages, c.model.stem_width = "BiT-R50x1", (1, 1, 1), 32
        c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    elif "large" in chosen:
        c.model.width, c.model.mlp_dim, c.model.num_heads = 192, 768, 6
    else:
        c.study.name, c.study.metric = "grid", "test/top1"
    if chosen & {"bit", "large"}:
        c.duration, c.schedule.warmup = "2500 steps", "300 steps"

    if "debug" in chosen:
        teachers = UNTRAINED
        c.data.name, c.data.image_size, c.data.ops = "digits", 8, "flip"
        c.model.name = "ViT-mu/4" if "bit" not in chosen else c.model.name
        c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
        c.model.stages = (1,) if "bit" in chosen else None
        c.evals.test = classification(split="test", every="20 steps", batch_size=360)
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.checkpoint.every, c.log.every = "20 steps", "10 steps"
        c.study.seeds = 1
    c.study.cells = tuple(cells(c.model.name, teachers)) if c.study.name else ()
    return c


def cells(model, teachers):
    """The cells of the study: without a teacher, and with each."""
    yield f"{model} | labels: objective.name=supervised"
    if "bit" in teachers:
        deit = model.replace("ViT", "DeiT")
        yield (
            f"{deit} | labels of a BiT: model.name={deit}; objective.name=distillation; "
            f"objective.teacher={teachers['bit']}; objective.mode=hard"
        )
    if "large" in teachers:
        yield (
            f"{model} | features of a larger ViT: objective.name=distillation; "
            f"objective.teacher={teachers['large']}; objective.mode=features"
        )
