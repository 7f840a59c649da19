"""Class token against mean pooling, each with its own rates, as in appendix D.3 (arXiv:2010.11929).

python -m vit_jax.main study --config=configs/token_or_mean.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/token_or_mean.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The paper finds that both do equally well, but that
mean pooling needs another learning rate (8e-4 suits the token, 3e-4 the mean). The study chooses
the rate of each on 5,000 held-out pictures and tests the chosen one with three seeds.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "a few steps of a tiny model, one seed"}

POOLS = {"class token": "token", "mean of the patches": "gap"}
PEAK_LRS = (0.0003, 0.0008, 0.002)


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration, c.schedule.warmup = 50, "6 epochs", "1 epochs"
    c.model.name = "ViT-Ti/8"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 3, 384, 4
    c.data.name, c.data.image_size = "cifar10", 32
    c.data.split, c.data.ops = "train[:10000]", "decode|pad_crop(2)|flip"
    c.evals.dev = classification(split="train[45000:]", every="6 epochs", ops="decode")
    c.evals.test = classification(split="test", every="6 epochs", ops="decode")
    c.optimizer.peak_lr, c.optimizer.weight_decay = 8e-4, 0.05  # the study replaces the rate
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "6 epochs", "100 steps"

    c.study.name, c.study.metric, c.study.choose_by = "grid", "test/top1", "dev/top1"
    rates = PEAK_LRS
    if "debug" in chosen:
        rates = PEAK_LRS[:2]
        c.model.name, c.model.width, c.model.mlp_dim, c.model.num_heads = "ViT-mu/4", 32, 64, 2
        c.model.depth = 1
        c.data.name, c.data.image_size, c.data.split, c.data.ops = "digits", 8, "train", ""
        c.evals.dev = classification(split="train", every="20 steps")
        c.evals.test = classification(split="test", every="20 steps")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.checkpoint.every, c.log.every, c.study.seeds = "20 steps", "10 steps", 1
    c.study.candidates = tuple(f"lr_{lr}: optimizer.peak_lr={lr}" for lr in rates)
    c.study.cells = tuple(f"{name} | top-1: model.pool={pool}" for name, pool in POOLS.items())
    return c
