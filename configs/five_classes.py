"""The benefit of pretraining: five classes of CIFAR-10, then 250 images of the other five.

DATA=--config.data.data_dir=DIR STUDY="study --config=configs/five_classes.py $DATA"
python -m vit_jax.main --config=configs/five_classes.py:pretrain $DATA --workdir=$W/pre
python -m vit_jax.main $STUDY --config.init_from=$W/pre --workdir=$W/tuned
python -m vit_jax.main $STUDY --config.init_from=scratch --workdir=$W/scratch
A minute, on handwritten digits: --config=configs/five_classes.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Pretraining uses the 25,000 images of the first
five classes at 32 px; the study uses 250 images of the last five (48 to 51 each) at 48 px. Both
arms, from the pretrained weights and from scratch, train for the same number of steps and select
among the same learning rates, on images that are neither trained on nor in the test split.
Results: docs/explanation/results.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import (
    begin,
    debug_on_digits,
    set_length,
    use_adamw,
    use_cifar10,
    use_vit,
)

WORDS = {
    "pretrain": "pretrain on the first five classes at 32 px; without: study of the last five",
    "debug": "a few steps of a tiny model",
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3, pool="gap", pos_embed="learned_1d")
    use_cifar10(c)
    use_adamw(c)

    if "pretrain" in chosen:
        c.data.classes = (0, 1, 2, 3, 4)
        set_length(c, 128, "20 epochs", "5 %", save="500 steps", log="50 steps")
        c.evals.test = classification(split="test", every="5 epochs", ops="decode")
    else:
        c.data.classes, c.data.image_size = (5, 6, 7, 8, 9), 48
        c.data.split = "train[2500:2961]"  # 250 of these classes
        c.data.ops = "decode|resize|pad_crop(4)|flip"
        set_length(c, 50, "50 epochs", "10 %", save="500 steps", log="50 steps")
        c.init_from = ""  # required
        c.evals.held_out = classification(
            split="test", every="50 epochs", ops="decode|resize", batch_size=500
        )
        c.study.name = "finetune_sweep"
        c.study.peak_lrs = (0.0001, 0.0003, 0.001, 0.003)
        c.study.train_split, c.study.dev_split = c.data.split, "train[10000:20000]"
        c.optimizer.peak_lr = c.study.peak_lrs[0]  # the study replaces it

    if "debug" in chosen:
        c.init_from = "scratch"
        size = c.data.image_size
        debug_on_digits(c, "ViT-mu/8", "resize|flip", eval_every="10 steps", eval_ops="resize")
        c.data.image_size, c.checkpoint.every, c.log.every = size, "500 steps", "5 steps"
        c.study.train_split = c.study.dev_split = "train"
    return c
