"""Go on with self-supervised training on your own images, without classes: --config=selfsup:MODEL

python -m vit_jax.main --config=configs/selfsup.py:ViT-S/16 --config.init_from=SOURCE \\
  --config.data.data_dir=IMAGES --workdir=$W

IMAGES holds images at any depth. With the word folder they lie in a folder for each class, as
for configs/folder.py, and a tenth is held out; the classes are used only to measure, by 20 nearest
neighbours. SOURCE is whatever init_from takes: a workdir, a file or the name of published weights;
scratch, with --config.init_fields=config, starts from random weights.
A minute, with your images: --config=configs/selfsup.py:ViT-S/16,debug

The objective is DINOv2, made smaller for one device: batches of 64 (up to 256 with more memory;
then multiply optimizer.peak_lr by the square root of the ratio), 4,096 prototypes,
Sinkhorn-Knopp, which needs no long average, 2 global and 6 local views, KoLeo over the batch. A
rate of 1e-4 suits a trained model; from scratch take 5e-4. Exports and `init_from` of such a run
take the teacher, the running average.
"""

import difflib

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, knn, patch_features, rank, refuse_words, split_words
from vit_jax.experiment.recipes import make_tiny, set_length, view_ops
from vit_jax.models import create_model, token_stride

WORDS = {
    "folder": "images in a folder for each class",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = "such as ViT-S/16 or ViT-B/14"
    is_model = bool(words) and not difflib.get_close_matches(words[0], WORDS)
    refuse_words(words[is_model:], {"MODEL": model} | WORDS, __file__)
    if not words:
        raise InputError(f"got {arg!r}, needs a MODEL {model}; optional words: {', '.join(WORDS)}")
    patch = token_stride(words[0])[0]
    size = 224 if 224 % patch == 0 else 14 * patch
    create_model(words[0], image_size=size)
    c = base_config()
    set_length(c, 64, "2000 steps", "10 %", save="500 steps", log="10 steps")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.name, c.model.dtype = words[0], "bfloat16"
    c.data.name = "folder" if "folder" in chosen else "unlabelled"
    c.data.image_size, c.data.local_size = size, max(1, round(96 / patch)) * patch
    c.data.num_global, c.data.num_local = 2, 6
    c.data.global_ops, c.data.local_ops = view_ops(smallest=0.32, middle=0.32)

    o = c.objective
    o.name, o.centring = "self_distillation", "sinkhorn"
    o.num_prototypes, o.head_width = 4096, 1024
    o.first_temperature, o.teacher_temperature = 0.04, 0.07
    o.temperature_warmup, o.freeze_prototypes = "500 steps", "100 steps"
    o.patch_weight, o.koleo_weight = 1.0, 0.1

    c.optimizer.peak_lr, c.optimizer.layer_decay = 1e-4, 0.9
    c.optimizer.embedding_rate, c.optimizer.grad_clip_norm = 0.2, 3.0
    c.optimizer.weight_decay, c.optimizer.weight_decay_end = 0.04, 0.2
    c.optimizer.ema_decay, c.optimizer.ema_decay_end = 0.994, 1.0
    c.schedule.name = "cosine"
    ops = "decode|resize_small(crop=0.875, antialias=True)|central_crop"
    how = {"every": "500 steps", "ops": ops}
    c.evals.rank = rank(split="train", **how, num_images=2000)
    c.evals.images = patch_features(split="train", **how)
    if "folder" in chosen:
        c.evals.near = knn(train_split="train", test_split="val", **how, num_neighbours=(20,))
    if "debug" in chosen:
        debug(c)
    return c


def debug(c):
    """20 steps of a tiny model."""
    c.init_from, c.init_fields = "scratch", "config"
    c.data.image_size = 2 * make_tiny(c.model, c.model.name)
    c.model.dtype, c.data.local_size = "float32", c.data.image_size // 2
    o = c.objective
    o.num_prototypes, o.head_width, o.bottleneck = 32, 16, 8
    o.temperature_warmup, o.freeze_prototypes = "10 steps", "5 steps"
    c.data.num_local = 2
    set_length(c, 16, "20 steps", "5 steps", save="10 steps", log="5 steps")
    for entry in c.evals.values():
        entry.every = "10 steps"
    c.evals.rank.num_images = 100
    if "near" in c.evals:
        c.evals.near.num_neighbours = (2,)
