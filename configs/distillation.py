"""A small ViT on CIFAR-10 with and without a teacher: labels of a ResNet, features of a larger ViT.

DATA=--config.data.data_dir=DIR CONFIG=configs/distillation.py
python -m vit_jax.main --config=$CONFIG:bit $DATA --workdir=$W/bit
python -m vit_jax.main --config=$CONFIG:large $DATA --workdir=$W/large
python -m vit_jax.main study --config=configs/distillation.py:bit=$W/bit,large=$W/large $DATA \\
  --workdir=$W/study
A minute, on handwritten digits, untrained teachers: --config=configs/distillation.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The students, ViTs of 469,000 parameters, train with
three seeds on the same images for the same steps: on labels only; as a DeiT, half on the hard
labels of a BiT (arXiv:2012.12877); and half on the pooled features of a ViT of 1.8 million
parameters. Without bit=... or large=... the study leaves out what it needs. The teachers train on
the same 50,000 images.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import debug_on_digits, set_length, use_adamw, use_cifar10, use_vit

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
    is_bit, is_study = "bit" in chosen, not chosen & {"bit", "large"}
    c = base_config()
    use_cifar10(c)
    use_adamw(c)
    length = ("1200 steps", "120 steps") if is_study else ("2500 steps", "12 %")
    set_length(c, 64, *length, save="1000 steps", log="100 steps")
    c.evals.test = classification(split="test", every="3000 steps", ops="decode", batch_size=500)
    if is_bit:
        c.model.name, c.model.stages, c.model.stem_width = "BiT-R50x1", (1, 1, 1), 32
    elif is_study:
        use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3)
    else:
        use_vit(c.model, "ViT-Ti/8", 192, 4, 768, 6)

    if "debug" in chosen:
        teachers = UNTRAINED
        debug_on_digits(c, None if is_bit else "ViT-mu/4", "flip", eval_batch_size=360)
        c.model.stages, c.study.seeds = (1,) if is_bit else None, 1
    if is_study:
        c.study.name, c.study.metric = "grid", "test/top1"
        c.study.cells = tuple(cells(c.model.name, teachers))
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
