"""Small BiT and ViT models compared over the number of training images, on CIFAR-10.

python -m vit_jax.main study --config=configs/bit_and_vit.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on synthetic data: --config=configs/bit_and_vit.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Both models train from scratch on the first 100,
1,000 and 10,000 images, with three seeds each and the same steps, batch, augmentation and
optimizer, and are tested on the whole test split. Figure 4 of arXiv:2010.11929 makes the same
comparison on subsets of JFT-300M, by five-shot ImageNet accuracy.

Results: docs/explanation/results.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, set_length, use_adamw, use_cifar10

WORDS = {"debug": "a few steps of tiny models, one seed"}

MODELS = {
    "BiT": "model.name=BiT-R50x1; model.stages=1,1,1; model.stem_width=32",
    "ViT": "model.name=ViT-Ti/8; model.width=96; model.depth=4; model.mlp_dim=384; "
    "model.num_heads=3",
}
TINY = {
    "BiT": "model.name=BiT-R50x1; model.stages=1,; model.stem_width=32",
    "ViT": "model.name=ViT-mu/8",
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 64, "1500 steps", "150 steps", save="1500 steps", log="100 steps")
    c.model.name = "ViT-Ti/8"  # the study replaces it and sets its sizes
    use_cifar10(c)
    c.evals.test = classification(split="test", every="1500 steps", ops="decode", batch_size=500)
    use_adamw(c)

    models, sizes, some = MODELS, (100, 1_000, 10_000), "data.split=train[:{}]"
    c.study.name, c.study.metric = "grid", "test/top1"
    if "debug" in chosen:
        models, sizes, some = TINY, (64, 256), "data.num_examples={}"
        c.model.name = "ViT-mu/8"
        c.data.name, c.data.image_size, c.data.ops = "synthetic", 16, "flip"
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.test = classification(split="test", every="20 steps")
        set_length(c, 32, "20 steps", "2 steps", save="20 steps", log="10 steps")
        c.study.seeds = 1
    c.study.cells = tuple(
        f"{model} | {size} training images: {some.format(size)}; {fields}"
        for model, fields in models.items()
        for size in sizes
    )
    return c
