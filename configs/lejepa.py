"""LeJEPA (arXiv:2511.08544): views of an image predict each other, and embeddings stay normal.

python -m vit_jax.main --config=configs/lejepa.py --config.data.data_dir=DIR --workdir=$W
Your own images, of any size, with or without classes:
  --config=configs/lejepa.py:folder --config.data.data_dir=IMAGES
About 11 CPU minutes: --config=configs/lejepa.py:cifar10 --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/lejepa.py:digits
A few seconds: --config=configs/lejepa.py:debug

DIR holds imagenet2012/VERSION, or cifar10/VERSION, as TFDS prepares it. From the paper: 1,024
directions and 17 points. From the authors' notes on their code: 100 epochs, AdamW at 5e-4 with
weight decay 0.05, a warm-up and a cosine, 2 global views of 30 % to 100 % and local ones of 5 % to
30 % of the area, and their colours. Assumed: the weight 0.05 (the code has 0.02), 8 local views
(the notes have 6), of 96 pixels, batches of 256, 10 epochs of warm-up, ViT-B/16, and gradients
clipped at 1. The docstring of vit_jax/objectives/lejepa.py lists what the objective assumes.

lejepa:folder trains a ViTC at 64 px, about 20 CPU minutes: two views, no local ones; 256
directions, embeddings of 128 values, and the optimizer and batch of cifar10:fast. Trials chose the
views, the weight of SIGReg and the embeddings (docs/explanation/does_it_learn.md), not the rest.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import knn, linear_probe, patch_features, rank
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    begin,
    debug_on_digits,
    debug_on_own_images,
    set_length,
    use_adamw,
    use_cifar10,
    use_imagenet,
    use_own_images_fast,
    use_vit,
)

WORDS = {
    "folder": "a small ViTC on your own images, with or without classes",
    "cifar10": "a small ViT on CIFAR-10",
    "digits": "a tiny ViT on handwritten digits, a minute",
    "debug": "a few steps of a tiny model, with folder on your own images",
}
COLOURS = "flip|color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    if len({"folder", "cifar10", "digits"} & chosen) > 1:
        raise InputError(f"got {arg!r}, needs at most one of folder, cifar10, digits")
    c.objective.name, c.objective.sigreg_weight = "lejepa", 0.05
    use_adamw(c)
    if "folder" in chosen:
        make_own(c)
    elif "cifar10" in chosen:
        make_small(c)
    else:
        follow_paper(c)
    if "folder" not in chosen and chosen & {"digits", "debug"}:
        use_digits(c)
    if {"folder", "debug"} <= chosen:
        debug_on_own_images(c)
    elif "debug" in chosen:  # with local views
        c.data.num_local, c.data.local_size, c.data.local_ops = 2, 8, "resize|random_crop"
        set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
        for entry in c.evals.values():
            entry.every = "20 steps"
    return c


def follow_paper(c):
    """See the top of this module."""
    set_length(c, 256, "100 epochs", "10 %", save="5 epochs", log="100 steps")
    c.optimizer.peak_lr = 5e-4
    c.model.name, c.model.pool, c.model.dtype = "ViT-B/16", "token", "bfloat16"
    use_imagenet(c)
    end = f"{COLOURS}|blur(0.5)|solarize(0.2)"
    c.data.num_global, c.data.global_ops = 2, f"inception_crop(area_min=0.3)|{end}"
    c.data.num_local, c.data.local_size = 8, 96
    c.data.local_ops = f"inception_crop(area_min=0.05, area_max=0.3)|{end}"
    how, splits = {"ops": EVAL_OPS}, {"train_split": "train[:10%]", "test_split": "validation"}
    c.evals.near = knn(**splits, **how, every="10 epochs", num_neighbours=(20,))
    c.evals.probe = linear_probe(**splits, **how, every="100 epochs", l2=(0.001, 0.01, 0.1))
    c.evals.rank = rank(split="train", **how, every="10 epochs")
    c.evals.images = patch_features(split="validation", **how, every="10 epochs")


def make_own(c):
    """A ViTC of 1.2 million parameters on own images, from scratch."""
    use_own_images_fast(c, "1000 steps")
    c.objective.directions, c.objective.head_width, c.objective.embedding_width = 256, 512, 128


def make_small(c):
    """A ViT of 0.5 million parameters on CIFAR-10, at 32 and 16 pixels; 0.7 CPU seconds a step."""
    set_length(c, 128, "800 steps", "10 %", save="200 steps", log="10 steps")
    c.objective.directions, c.objective.head_width, c.objective.embedding_width = 256, 256, 32
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3, pool="gap")
    use_cifar10(c, "")
    c.data.num_global, c.data.global_ops = 2, f"inception_crop(area_min=0.3)|{COLOURS}"
    c.data.num_local, c.data.local_size = 2, 16
    c.data.local_ops = f"inception_crop(area_min=0.1, area_max=0.3)|{COLOURS}"
    splits = {"train_split": "train[:10%]", "test_split": "test[:20%]"}
    how = {"every": "400 steps", "ops": "decode", "batch_size": 500}
    c.evals.near = knn(**splits, **how, num_neighbours=(20,), baselines=True)
    c.evals.probe = linear_probe(**splits, **how, l2=(0.01,))
    c.evals.rank = rank(split="train", **how, num_images=2000)
    c.evals.images = patch_features(split="test", **how)


def use_digits(c):
    """A ViT of width 32 on handwritten digits, shifted by up to a patch: as in does_it_learn.md."""
    debug_on_digits(c, eval_every="50 steps", eval_ops="resize", eval_batch_size=256)
    set_length(c, 64, "600 steps", "50 steps", save="600 steps", log="10 steps")
    c.optimizer.peak_lr = 1e-3
    c.model.pool, c.model.dtype = "gap", "float32"
    c.data.image_size, c.data.local_size = 16, None
    c.data.num_global, c.data.global_ops = 2, "resize|pad_crop(3)"
    c.data.num_local, c.data.local_ops = 0, ""
    c.objective.directions, c.objective.head_width, c.objective.embedding_width = 64, 64, 16
    c.evals.probe.every, c.evals.probe.l2 = "600 steps", (0.01,)
