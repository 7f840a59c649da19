"""A small ViT on scikit-learn's handwritten digits (8 x 8 pixels): about 98 % test top-1.

python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
A few seconds: --config=configs/quickstart.py:debug
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "40 steps of a tiny model"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration = 64, "2000 steps"

    c.model.name, c.model.pool, c.model.dtype = "ViT-Ti/4", "gap", "float32"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3

    c.data.name, c.data.image_size = "digits", 8
    c.data.ops = "pad_crop(1)"

    c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1.5e-3, 0.05
    c.schedule.name, c.schedule.warmup = "cosine", "100 steps"

    c.log.every = "100 steps"
    c.checkpoint.every = "200 steps"
    c.evals.test = classification(split="test", every="500 steps", batch_size=360)

    if "debug" in chosen:
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 32, 1, 64, 2
        c.duration, c.schedule.warmup = "40 steps", "4 steps"
        c.log.every, c.checkpoint.every, c.evals.test.every = "5 steps", "10 steps", "20 steps"
    return c
