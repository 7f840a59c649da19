"""The benefit of pretraining: five classes of CIFAR-10, then 250 pictures of the other five.

DATA=--config.data.data_dir=DIR STUDY="study --config=configs/five_classes.py $DATA"
python -m vit_jax.main --config=configs/five_classes.py:pretrain $DATA --workdir=$W/pre
python -m vit_jax.main $STUDY --config.init_from=$W/pre --workdir=$W/tuned
python -m vit_jax.main $STUDY --config.init_from=scratch --workdir=$W/scratch
A minute, on handwritten digits: --config=configs/five_classes.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Pretraining uses the 25,000 pictures of the first
five classes at 32 px; the study uses 250 pictures of the last five (48 to 51 each) at 48 px. Both
arms, from the pretrained weights and from scratch, train for the same number of steps and select
among the same learning rates, on pictures that are neither trained on nor in the test split.
Results: docs/explanation/results.md.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {
    "pretrain": "pretrain on the first five classes at 32 px; without: study of the last five",
    "debug": "a few steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.model.name, c.model.pool, c.model.pos_embed = "ViT-Ti/8", "gap", "learned_1d"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
    c.data.name = "cifar10"
    c.optimizer.weight_decay, c.optimizer.grad_clip_norm = 0.05, 1.0
    c.schedule.name = "cosine"
    c.log.every, c.checkpoint.every = "50 steps", "500 steps"

    if "pretrain" in chosen:
        c.data.classes, c.data.image_size = (0, 1, 2, 3, 4), 32
        c.data.ops = "decode|pad_crop(2)|flip"
        c.global_batch_size, c.duration, c.schedule.warmup = 128, "20 epochs", "1 epochs"
        c.optimizer.peak_lr = 1e-3
        c.evals.test = classification(split="test", every="5 epochs", ops="decode")
    else:
        c.data.classes, c.data.image_size = (5, 6, 7, 8, 9), 48
        c.data.split = "train[2500:2961]"  # 250 of these classes
        c.data.ops = "decode|resize|pad_crop(4)|flip"
        c.global_batch_size, c.duration, c.schedule.warmup = 50, "50 epochs", "5 epochs"
        c.init_from = ""  # required
        c.evals.held_out = classification(
            split="test", every="50 epochs", ops="decode|resize", batch_size=500
        )
        c.study.name = "finetune_sweep"
        c.study.peak_lrs = (0.0001, 0.0003, 0.001, 0.003)
        c.study.train_split = c.data.split
        c.study.dev_split = "train[10000:20000]"
        c.optimizer.peak_lr = c.study.peak_lrs[0]  # the study replaces it

    if "debug" in chosen:
        c.model.name = "ViT-mu/8"
        c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
        c.init_from = "scratch"
        c.data.name, c.data.split = "digits", "train"
        c.duration, c.schedule.warmup, c.log.every = "20 steps", "2 steps", "5 steps"
        for entry in c.evals.values():
            entry.every, entry.ops, entry.batch_size = "10 steps", "resize", None
        c.global_batch_size = 32
        c.study.train_split, c.study.dev_split = "train", "train"
        c.data.ops = "resize|flip"
    return c
