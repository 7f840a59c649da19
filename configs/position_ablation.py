"""A small version of table 8 of arXiv:2010.11929: kinds and places of position embeddings.

python -m vit_jax.main study --config=configs/position_ablation.py --workdir=$W \\
  --config.data.data_dir=DIR
A few minutes, on handwritten digits: --config=configs/position_ablation.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The study trains every kind at every place with three
seeds each, on the first 10,000 pictures of CIFAR-10 without augmentation. The paper compares no
positions, 1-D and 2-D positions at the stem, at every layer and shared by all layers, and relative
positions; we add fixed sine-cosine. Results: docs/explanation/results.md.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "a few steps of a tiny model, one seed"}

KINDS = {
    "no positions": "none",
    "1-D": "learned_1d",
    "2-D": "learned_2d",
    "relative": "relative",
    "sine-cosine": "sincos_2d",
}
PLACES = {"stem": "stem", "every layer": "layers", "every layer, shared": "layers_shared"}
# Cells without meaning: no positions have no place, relative positions act inside attention, and a
# fixed table is always shared.
WITHOUT = {
    ("no positions", "every layer"),
    ("no positions", "every layer, shared"),
    ("relative", "stem"),
    ("sine-cosine", "every layer, shared"),
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "12 epochs", "1 epochs"
    c.model.name = "ViT-Ti/8"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 64, 4, 256, 4

    c.data.name, c.data.image_size = "cifar10", 32
    c.data.split, c.data.ops = "train[:10000]", "decode"
    c.evals.test = classification(split="test", every="12 epochs", ops="decode", batch_size=500)

    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "6 epochs", "100 steps"

    c.study.name, c.study.metric = "grid", "test/top1"
    c.study.cells = tuple(
        f"{row} | {column}: model.pos_embed={kind}"
        + ("" if kind == "none" else f"; model.pos_embed_at={place}")
        for row, kind in KINDS.items()
        for column, place in PLACES.items()
        if (row, column) not in WITHOUT
    )

    if "debug" in chosen:
        c.model.name = "ViT-mu/4"
        c.model.width = c.model.mlp_dim = c.model.num_heads = None
        c.model.depth = 2
        c.data.name, c.data.split, c.data.image_size, c.data.ops = "digits", "train", 8, ""
        c.evals.test = classification(split="test", every="20 steps")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.checkpoint.every, c.log.every = "20 steps", "10 steps"
        c.study.seeds = 1
    return c
