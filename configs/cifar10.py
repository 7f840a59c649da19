"""ViT-S/4 on CIFAR-10 from scratch, 200 epochs; needs an accelerator.

python -m vit_jax.main --config=configs/cifar10.py --config.data.data_dir=DIR --workdir=$W
DIR holds cifar10/VERSION as TFDS prepares it.

Minutes on a CPU: --config=configs/cifar10.py:small (1.2M parameters, 3 epochs)
A few seconds, synthetic data: --config=configs/cifar10.py:debug
"""

from vit_jax.config import base_config, classification, refuse_words, split_words
from vit_jax.errors import InputError
from vit_jax.recipes import AUGREG

WORDS = {
    "small": "1.2M parameters, 3 epochs",
    "5k": "a small model that overfits 5,000 images",
    **{name: f"AugReg's {name}" for name in AUGREG},
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    augmentation = [AUGREG[name] for name in AUGREG if name in chosen]
    if len(augmentation) > 1 or {"small", "5k"} <= chosen:
        raise InputError(
            f"got {arg!r}, needs at most one of {', '.join(AUGREG)}, and at most one of small, 5k"
        )
    c = base_config()
    c.global_batch_size, c.duration = 1024, "200 epochs"

    c.model.name, c.model.pool = "ViT-S/4", "gap"
    c.model.dropout, c.model.dtype = 0.1, "bfloat16"

    c.data.name, c.data.image_size = "cifar10", 32
    crop = "decode|pad_crop(4)"

    c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.1
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name, c.schedule.warmup = "cosine", "10 epochs"
    c.checkpoint.every, c.log.every = "5 epochs", "50 steps"
    c.evals.test = classification(split="test", every="5 epochs", ops="decode")

    if "small" in chosen:
        c.model.name = "ViT-Ti/8"
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 128, 6, 512, 4
        c.model.dropout, c.model.dtype = 0.0, "float32"
        c.global_batch_size, c.duration, c.schedule.warmup = 128, "3 epochs", "100 steps"
        crop = "decode|pad_crop(2)"
        c.loss.label_smoothing, c.optimizer.weight_decay = 0.0, 0.05
        c.checkpoint.every, c.evals.test.every = "1 epochs", "1 epochs"
    if "5k" in chosen:
        c.model.name = "ViT-Ti/8"
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
        c.model.dropout, c.model.dtype = 0.0, "float32"
        c.data.split, crop = "train[:10%]", "decode"
        c.model.pos_embed = "sincos_2d"
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "100 epochs", "2 epochs"
        c.optimizer.peak_lr = 5e-4
        c.loss.label_smoothing, c.optimizer.weight_decay = 0.0, 0.05
        c.log.every, c.checkpoint.every = "500 steps", "20 epochs"
        c.evals.test = classification(
            split="test", every="50 epochs", ops="decode", batch_size=1024
        )
    c.data.ops = (augmentation[0] if augmentation else AUGREG["none"]).ops(crop)

    if "debug" in chosen:
        c.model.name = "ViT-mu/8"
        c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
        c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 10, 256
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
        c.log.every, c.checkpoint.every, c.evals.test.every = "5 steps", "10 steps", "10 steps"
    return c
