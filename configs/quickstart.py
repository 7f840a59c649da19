"""A small ViT on scikit-learn's handwritten digits (8 x 8 pixels): about 98 % test top-1.

python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
A few seconds: --config=configs/quickstart.py:debug
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, set_length, use_vit

WORDS = {"debug": "40 steps of a tiny model"}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 64, "2000 steps", "5 %", save="200 steps", log="5 %")
    use_vit(c.model, "ViT-Ti/4", 96, 4, 384, 3, pool="gap", dtype="float32")
    c.data.name, c.data.image_size, c.data.ops = "digits", 8, "pad_crop(1)"
    c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1.5e-3, 0.05
    c.schedule.name = "cosine"
    c.evals.test = classification(split="test", every="25 %", batch_size=360)

    if "debug" in chosen:
        use_vit(c.model, "ViT-Ti/4", 32, 1, 64, 2)
        set_length(c, 64, "40 steps", "4 steps", save="10 steps", log="5 steps")
        c.evals.test.every = "20 steps"
    return c
