"""Self-supervised training on your own images, of any size: selfsup:folder, or selfsup:MODEL

python -m vit_jax.main --config=configs/selfsup.py:folder --config.data.data_dir=IMAGES \\
  --workdir=$W

IMAGES holds images at any depth, with or without folders of classes. selfsup:folder is
lejepa:folder. After twenty CPU minutes on 5,000 images it is the best by nearest neighbours, and
mae:folder by a linear probe (docs/explanation/does_it_learn.md). It trains a small ViTC at 64 px
from scratch. If the images lie in a folder for each class, a tenth is held out to measure, by
nearest neighbours; no training sees a label.

A MODEL goes on from published weights or a run, at 224 px, for one GPU:

python -m vit_jax.main --config=configs/selfsup.py:ViT-S/16 --config.init_from=SOURCE \\
  --config.data.data_dir=IMAGES --workdir=$W

SOURCE is whatever init_from takes; scratch, with --config.init_fields=config, starts from random
weights. With MODEL,folder a tenth of each class is held out of the training too.
A minute, with your images: --config=configs/selfsup.py:ViT-S/16,debug

With a MODEL the objective is DINOv2, made smaller for one device: batches of 64 (up to 256 with
more memory; then multiply optimizer.peak_lr by the square root of the ratio), 4,096 prototypes,
Sinkhorn-Knopp, which needs no long average, 2 global and 6 local views, KoLeo over the batch. A
rate of 1e-4 suits a trained model; from scratch it is 5e-4. Exports and `init_from` of such a run
take the teacher, the running average.
"""

import difflib

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, knn, patch_features, rank, refuse_words, split_words
from vit_jax.config.text import load_config
from vit_jax.models import create_model, token_stride
from vit_jax.run.setup.recipes import debug_on_own_images, set_length, view_ops

WORDS = {
    "folder": "a small model from scratch; with MODEL: images in a folder for each class",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = "such as ViT-S/16 or ViT-B/14"
    is_model = bool(words) and not difflib.get_close_matches(words[0], WORDS)
    refuse_words(words[is_model:], {"MODEL": model} | WORDS, __file__)
    if not words and "folder" not in chosen:
        raise InputError(
            f"got {arg!r}, needs folder or a MODEL {model}; optional words: {', '.join(WORDS)}"
        )
    if not words:
        return load_config(f"lejepa:{arg}")
    c = base_config()
    follow_dinov2(c)
    go_on(c, words[0], "folder" if "folder" in chosen else "unlabelled")
    if "debug" in chosen:
        debug(c)
    return c


def follow_dinov2(c):
    o = c.objective
    o.name, o.centring = "self_distillation", "sinkhorn"
    o.first_temperature, o.teacher_temperature = 0.04, 0.07
    o.patch_weight, o.koleo_weight = 1.0, 0.1
    c.optimizer.layer_decay, c.optimizer.embedding_rate = 0.9, 0.2
    c.optimizer.grad_clip_norm, c.schedule.name = 3.0, "cosine"
    c.optimizer.weight_decay, c.optimizer.weight_decay_end = 0.04, 0.2
    c.optimizer.ema_decay, c.optimizer.ema_decay_end = 0.994, 1.0


def go_on(c, model, data):
    """Go on from a source, with its model."""
    patch = token_stride(model)[0]
    size = 224 if 224 % patch == 0 else 14 * patch
    create_model(model, image_size=size)
    set_length(c, 64, "2000 steps", "10 %", save="500 steps", log="10 steps")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.name, c.model.dtype, c.data.name = model, "bfloat16", data
    c.data.image_size, c.data.local_size = size, max(1, round(96 / patch)) * patch
    c.data.num_global, c.data.num_local = 2, 6
    c.data.global_ops, c.data.local_ops = view_ops(smallest=0.32, middle=0.32)
    c.objective.num_prototypes, c.objective.head_width = 4096, 1024
    c.objective.temperature_warmup, c.objective.freeze_prototypes = "500 steps", "100 steps"
    c.optimizer.peak_lr = 1e-4
    ops = "decode|resize_small(crop=0.875, antialias=True)|central_crop"
    how = {"every": "500 steps", "ops": ops}
    c.evals.rank = rank(split="train", **how, num_images=2000)
    c.evals.images = patch_features(split="train", **how)
    if data == "folder":
        splits = {"train_split": "train", "test_split": "val"}
        c.evals.near = knn(**splits, **how, num_neighbours=(20,), baselines=True)


def debug(c):
    """20 steps of a tiny model."""
    c.init_from, c.init_fields = "scratch", "config"
    debug_on_own_images(c)
    o = c.objective
    o.num_prototypes, o.head_width, o.bottleneck = 32, 16, 8
    o.temperature_warmup, o.freeze_prototypes = "10 steps", "5 steps"
