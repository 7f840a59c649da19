"""LeJEPA (arXiv:2511.08544): views of a picture predict each other, and embeddings stay normal.

python -m vit_jax.main --config=configs/lejepa.py --config.data.data_dir=DIR --workdir=$W
About 11 CPU minutes: --config=configs/lejepa.py:cifar10 --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/lejepa.py:digits
A few seconds: --config=configs/lejepa.py:debug

DIR holds imagenet2012/VERSION, or cifar10/VERSION, as TFDS prepares it. From the paper: 1,024
directions and 17 points. From the authors' notes on their code: 100 epochs, AdamW at 5e-4 with
weight decay 0.05, a warm-up and a cosine, 2 global views of 30 % to 100 % and local ones of 5 % to
30 % of the area, and their colours. Assumed: the weight 0.05 (the code has 0.02), 8 local views
(the notes have 6), of 96 pixels, batches of 256, 10 epochs of warm-up, ViT-B/16, and gradients
clipped at 1. The docstring of vit_jax/objectives/lejepa.py lists what the objective assumes.
"""

from vit_jax.config import (
    base_config,
    knn,
    linear_probe,
    patch_features,
    rank,
    refuse_words,
    split_words,
)

WORDS = {
    "cifar10": "a small ViT on CIFAR-10",
    "digits": "a tiny ViT on handwritten digits, a minute",
    "debug": "a few steps of a tiny model",
}
COLOURS = "color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.objective.name, c.objective.sigreg_weight = "lejepa", 0.05
    c.optimizer.weight_decay, c.optimizer.grad_clip_norm = 0.05, 1.0
    c.schedule.name = "cosine"
    if "cifar10" in chosen:
        use_cifar10(c)
    else:
        use_imagenet(c)
    if chosen & {"digits", "debug"}:
        use_digits(c)
    if "debug" in chosen:
        make_small(c)
    return c


def use_imagenet(c):
    """See the top of this module."""
    c.global_batch_size, c.duration, c.schedule.warmup = 256, "100 epochs", "10 epochs"
    c.optimizer.peak_lr = 5e-4
    c.model.name, c.model.pool, c.model.dtype = "ViT-B/16", "token", "bfloat16"
    c.data.name, c.data.image_size = "imagenet2012", 224
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    end = f"flip|{COLOURS}|blur(0.5)|solarize(0.2)"
    c.data.num_global, c.data.global_ops = 2, f"inception_crop(area_min=0.3)|{end}"
    c.data.num_local, c.data.local_size = 8, 96
    c.data.local_ops = f"inception_crop(area_min=0.05, area_max=0.3)|{end}"
    c.checkpoint.every, c.log.every = "5 epochs", "100 steps"
    ops = "decode|resize_small(crop=0.875)|central_crop"
    splits = {"train_split": "train[:10%]", "test_split": "validation"}
    c.evals.near = knn(**splits, every="10 epochs", ops=ops, num_neighbours=(20,))
    c.evals.probe = linear_probe(**splits, every="100 epochs", ops=ops, l2=(0.001, 0.01, 0.1))
    c.evals.rank = rank(split="train", every="10 epochs", ops=ops)
    c.evals.pictures = patch_features(split="validation", every="10 epochs", ops=ops)


def use_cifar10(c):
    """A ViT of 0.5 million parameters, at 32 and 16 pixels; 0.7 CPU seconds a step."""
    c.global_batch_size, c.duration, c.schedule.warmup = 128, "800 steps", "80 steps"
    c.optimizer.peak_lr = 1e-3
    c.objective.directions, c.objective.head_width, c.objective.embedding_width = 256, 256, 32
    c.model.name, c.model.pool = "ViT-Ti/8", "gap"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
    c.data.name, c.data.image_size = "cifar10", 32
    end = f"flip|{COLOURS}"
    c.data.num_global, c.data.global_ops = 2, f"inception_crop(area_min=0.3)|{end}"
    c.data.num_local, c.data.local_size = 2, 16
    c.data.local_ops = f"inception_crop(area_min=0.1, area_max=0.3)|{end}"
    c.checkpoint.every, c.log.every = "200 steps", "10 steps"
    splits = {"train_split": "train[:10%]", "test_split": "test[:20%]"}
    how = {"every": "400 steps", "ops": "decode", "batch_size": 500}
    c.evals.near = knn(**splits, **how, num_neighbours=(20,))
    c.evals.probe = linear_probe(**splits, **how, l2=(0.01,))
    c.evals.rank = rank(split="train", **how, num_images=2000)
    c.evals.pictures = patch_features(split="test", **how)


def use_digits(c):
    """A ViT of width 32 on handwritten digits, shifted by up to a patch: as in does_it_learn.md."""
    c.model.name, c.model.pool, c.model.dtype = "ViT-mu/4", "gap", "float32"
    c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    c.data.name, c.data.image_size, c.data.local_size = "digits", 16, None
    c.data.num_global, c.data.global_ops = 2, "resize|pad_crop(3)"
    c.data.num_local, c.data.local_ops = 0, ""
    c.objective.directions, c.objective.head_width, c.objective.embedding_width = 64, 64, 16
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "600 steps", "50 steps"
    c.optimizer.peak_lr = 1e-3
    c.checkpoint.every, c.log.every = "600 steps", "10 steps"
    for entry in c.evals.values():
        entry.every, entry.ops, entry.batch_size = "50 steps", "resize", 256
        if entry.type in ("knn", "linear_probe"):
            entry.train_split, entry.test_split = "train", "test"
    c.evals.pictures.split = "test"
    c.evals.probe.every, c.evals.probe.l2 = "600 steps", (0.01,)


def make_small(c):
    """20 steps, with local views."""
    c.data.num_local, c.data.local_size, c.data.local_ops = 2, 8, "resize|random_crop"
    c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
    c.checkpoint.every, c.log.every = "10 steps", "5 steps"
    for entry in c.evals.values():
        entry.every = "20 steps"
