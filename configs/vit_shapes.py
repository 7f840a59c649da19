"""Depth, width, patch size and MLP scaled apart, as in appendix D.2 (arXiv:2010.11929), figure 8.

python -m vit_jax.main study --config=configs/vit_shapes.py --workdir=$W --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/vit_shapes.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. From one small ViT, each of the four is changed while
the others stay; "all" changes depth, width and MLP together. The figure has test accuracy over the
exaFLOPs of training. The paper finds that depth helps most, up to 64 layers, that a smaller patch
helps without further parameters, and that width alone helps least.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, debug_on_digits, set_length, use_adamw, use_cifar10

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
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 50, "400 steps", "40 steps", save="400 steps", log="50 steps")
    c.model.name, c.model.num_heads = "ViT-Ti/8", 4
    use_cifar10(c)
    c.evals.test = classification(split="test", every="400 steps", ops="decode", batch_size=500)
    use_adamw(c)

    c.study.name, c.study.metric, c.study.seeds = "scaling", "test/top1", 1
    shapes, base = SHAPES, BASE
    if "debug" in chosen:
        base = {"patch_size": 4, "width": 16, "depth": 1, "mlp_dim": 32}
        shapes = {"depth": ({"depth": 2},), "all": ({},)}
        debug_on_digits(c)
        c.model.num_heads = 4
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
