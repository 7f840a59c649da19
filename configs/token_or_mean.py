"""Class token against mean pooling, each with its own rates, as in appendix D.3 (arXiv:2010.11929).

python -m vit_jax.main study --config=configs/token_or_mean.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/token_or_mean.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The paper finds that both do equally well, but that
mean pooling needs another learning rate (8e-4 suits the token, 3e-4 the mean). The study chooses
the rate of each on 5,000 held-out images and tests the chosen one with three seeds.
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

WORDS = {"debug": "a few steps of a tiny model, one seed"}

POOLS = {"class token": "token", "mean of the patches": "gap"}
PEAK_LRS = (0.0003, 0.0008, 0.002)


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 50, "6 epochs", "1 epochs", save="6 epochs", log="100 steps")
    use_vit(c.model, "ViT-Ti/8", 96, 3, 384, 4)
    use_cifar10(c, split="train[:10000]")
    c.evals.dev = classification(split="train[45000:]", every="6 epochs", ops="decode")
    c.evals.test = classification(split="test", every="6 epochs", ops="decode")
    use_adamw(c, peak_lr=8e-4)  # the study replaces it

    c.study.name, c.study.metric, c.study.choose_by = "grid", "test/top1", "dev/top1"
    rates = PEAK_LRS
    if "debug" in chosen:
        rates = PEAK_LRS[:2]
        debug_on_digits(c)
        use_vit(c.model, "ViT-mu/4", 32, 1, 64, 2)
        c.evals.dev.split = "train"
        c.study.seeds = 1
    c.study.candidates = tuple(f"lr_{lr}: optimizer.peak_lr={lr}" for lr in rates)
    c.study.cells = tuple(f"{name} | top-1: model.pool={pool}" for name, pool in POOLS.items())
    return c
