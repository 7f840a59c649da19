"""A small version of table 8 of arXiv:2010.11929: kinds and places of position embeddings.

python -m vit_jax.main study --config=configs/position_ablation.py --workdir=$W \\
  --config.data.data_dir=DIR
A few minutes, on handwritten digits: --config=configs/position_ablation.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The study trains every kind at every place with three
seeds each, on the first 10,000 images of CIFAR-10 without augmentation. The paper compares no
positions, 1-D and 2-D positions at the stem, at every layer and shared by all layers, and relative
positions; we add fixed sine-cosine. Results: docs/explanation/results.md.
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
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 64, "12 epochs", "1 epochs", save="6 epochs", log="100 steps")
    use_vit(c.model, "ViT-Ti/8", 64, 4, 256, 4)
    use_cifar10(c, "decode", split="train[:10000]")
    c.evals.test = classification(split="test", every="12 epochs", ops="decode", batch_size=500)
    use_adamw(c)

    c.study.name, c.study.metric = "grid", "test/top1"
    c.study.cells = tuple(
        f"{row} | {column}: model.pos_embed={kind}"
        + ("" if kind == "none" else f"; model.pos_embed_at={place}")
        for row, kind in KINDS.items()
        for column, place in PLACES.items()
        if (row, column) not in WITHOUT
    )
    if "debug" in chosen:
        debug_on_digits(c)
        c.model.depth, c.study.seeds = 2, 1
    return c
