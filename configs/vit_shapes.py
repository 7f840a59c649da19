"""Depth, width, patch size and MLP scaled apart, as in appendix D.2 (arXiv:2010.11929), figure 8.

python -m vit_jax.main study --config=configs/vit_shapes.py --workdir=$W --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/vit_shapes.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. From one small ViT, each of the four is changed while
the others stay; "all" changes depth, width and MLP together. The figure has test accuracy over the
exaFLOPs of training. The paper finds that depth helps most, up to 64 layers, that a smaller patch
helps without further parameters, and that width alone helps least.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "a few steps of tiny models"}

BASE = {"patch_size": 8, "width": 48, "depth": 2, "mlp_dim": 96}
SHAPES = {
    "depth": ({"depth": 1}, {"depth": 4}, {"depth": 8}),
    "width": ({"width": 24}, {"width": 96}, {"width": 144}),
    "patch": ({"patch_size": 16}, {"patch_size": 4}),
    "MLP": ({"mlp_dim": 48}, {"mlp_dim": 192}, {"mlp_dim": 384}),
    "all": (
        {},
        {"depth": 3, "width": 72, "mlp_dim": 144},
        {"depth": 4, "width": 96, "mlp_dim": 192},
    ),
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration, c.schedule.warmup = 50, "400 steps", "40 steps"
    c.model.name, c.model.num_heads = "ViT-Ti/8", 4
    c.data.name, c.data.image_size = "cifar10", 32
    c.data.ops = "decode|pad_crop(2)|flip"
    c.evals.test = classification(split="test", every="400 steps", ops="decode", batch_size=500)
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "400 steps", "50 steps"

    c.study.name, c.study.metric, c.study.seeds = "scaling", "test/top1", 1
    shapes, base = SHAPES, BASE
    if "debug" in chosen:
        base = {"patch_size": 4, "width": 16, "depth": 1, "mlp_dim": 32}
        shapes = {"depth": ({"depth": 2},), "all": ({},)}
        c.data.name, c.data.image_size, c.data.ops = "digits", 8, ""
        c.evals.test = classification(split="test", every="20 steps")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.model.name, c.checkpoint.every, c.log.every = "ViT-mu/4", "20 steps", "10 steps"
    c.study.cells = tuple(
        f"{scaled} | {describe(change)}: "
        + "; ".join(f"model.{field}={value}" for field, value in (base | change).items())
        for scaled, changes in shapes.items()
        for change in changes
    )
    return c


def describe(change):
    """The name of a size: what it changes, e.g. "depth 4, width 96"."""
    return ", ".join(f"{field} {value}" for field, value in change.items()) or "base"
