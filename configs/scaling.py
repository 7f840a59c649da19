"""Accuracy against the compute of training, for families x sizes x durations, on CIFAR-10.

python -m vit_jax.main study --config=configs/scaling.py --workdir=$W --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/scaling.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. ViTs of several widths, hybrids of a
ResNet's root and these ViTs, and BiT ResNets of several stages train from scratch for several
durations, each with its own schedule. The study reports the Pareto front over exaFLOPs and over
planned TPU-core-days, fits the law of arXiv:2106.04560, equation 1, without the largest run of each
family, and predicts that run. Figure 5 of arXiv:2010.11929 makes this comparison for pretraining on
JFT-300M, by the accuracy after fine-tuning.

What it costs on other chips: add --plan=v5e:1x1. How it works: docs/explanation/scaling.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, debug_on_digits, set_length, use_adamw, use_cifar10

WORDS = {"debug": "a few steps of tiny models"}

WIDTHS = ("width 24", "width 48", "width 96")
SIZES = {"ViT": WIDTHS, "BiT": ("1 stage", "2 stages", "3 stages"), "Hybrid": WIDTHS}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 50, "500 steps", "20 steps", save="500 steps", log="50 steps")
    c.model.name = "ViT-Ti/8"  # the study replaces it and sets its sizes
    use_cifar10(c)
    c.evals.test = classification(split="test", every="500 steps", ops="decode", batch_size=500)
    use_adamw(c)

    c.study.name, c.study.metric, c.study.seeds = "scaling", "test/top1", 1
    c.study.durations = ("60 steps", "125 steps", "250 steps", "500 steps")
    c.study.topology = "v5e:1x1"
    sizes, patch = SIZES, 8
    if "debug" in chosen:
        sizes, patch = {"ViT": ("width 16", "width 32"), "BiT": ("1 stage",)}, 4
        debug_on_digits(c)
        c.study.durations = ("10 steps", "20 steps")
    c.study.cells = tuple(
        f"{family} | {size}: {cell(family, size, patch)}"
        for family, of_family in sizes.items()
        for size in of_family
    )
    return c


def cell(family, size, patch):
    """The keys of a model.

    ViTs have three layers, BiTs one unit in each stage. A hybrid is the ViT of the same width, with
    as many tokens, on a root of stride 4. The number in its name is half the ViT's patch size.
    """
    if family == "BiT":
        stages = ",".join("1" * int(size.split()[0]))
        return f"model.name=BiT-R50x1; model.stages=({stages},); model.stem_width=32"
    width = int(size.split()[1])
    heads = 2 if width < 48 else width // 24
    name = (
        f"R+ViT-Ti/{patch // 2}; model.stem_width=32" if family == "Hybrid" else f"ViT-Ti/{patch}"
    )
    return (
        f"model.name={name}; model.width={width}; model.depth=3; "
        f"model.mlp_dim={4 * width}; model.num_heads={heads}"
    )
