"""Small BiT and ViT models compared over the number of training images, on CIFAR-10.

python -m vit_jax.main study --config=configs/bit_and_vit.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on synthetic data: --config=configs/bit_and_vit.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Both models train from scratch on the first 100,
1,000 and 10,000 pictures, with three seeds each and the same steps, batch, augmentation and
optimizer, and are tested on the whole test split. Figure 4 of arXiv:2010.11929 makes the same
comparison on subsets of JFT-300M, by five-shot ImageNet accuracy.

Results: docs/explanation/results.md.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "a few steps of tiny models, one seed"}

MODELS = {
    "BiT": {"name": "BiT-R50x1", "stages": "1,1,1", "stem_width": "32"},
    "ViT": {"name": "ViT-Ti/8", "width": "96", "depth": "4", "mlp_dim": "384", "num_heads": "3"},
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "1500 steps", "150 steps"
    c.model.name = "ViT-Ti/8"  # the study replaces it and sets its sizes
    c.data.name, c.data.image_size = "cifar10", 32
    c.data.ops = "decode|pad_crop(2)|flip"
    c.evals.test = classification(split="test", every="1500 steps", ops="decode", batch_size=500)

    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "1500 steps", "100 steps"

    models, sizes, some = MODELS, (100, 1_000, 10_000), "data.split=train[:{}]"
    c.study.name, c.study.metric = "grid", "test/top1"
    if "debug" in chosen:
        models = {
            "BiT": {"name": "BiT-R50x1", "stages": "1,", "stem_width": "32"},
            "ViT": {"name": "ViT-mu/8"},
        }
        sizes, some = (64, 256), "data.num_examples={}"
        c.model.name = "ViT-mu/8"
        c.data.name, c.data.image_size, c.data.ops = "synthetic", 16, "flip"
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.test = classification(split="test", every="20 steps")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.checkpoint.every, c.log.every = "20 steps", "10 steps"
        c.study.seeds = 1
    c.study.cells = tuple(
        f"{model} | {size} training images: {some.format(size)}; "
        + "; ".join(f"model.{field}={value}" for field, value in fields.items())
        for model, fields in models.items()
        for size in sizes
    )
    return c
