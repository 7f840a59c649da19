"""How much of a model to fine-tune: all of it, the head, or LoRA adapters and the head.

python -m vit_jax.main --config=configs/five_classes.py:pretrain --config.data.data_dir=DIR \\
  --config.duration='3 epochs' --workdir=$W/pre
python -m vit_jax.main study --config=configs/finetune_parts.py:choose --config.data.data_dir=DIR \\
  --config.init_from=$W/pre --workdir=$W/choose
python -m vit_jax.main study --config=configs/finetune_parts.py --config.data.data_dir=DIR \\
  --config.init_from=$W/pre --workdir=$W/parts
A minute, on handwritten digits: --config=configs/finetune_parts.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The source was trained on the first five classes of
CIFAR-10; the study fine-tunes it on 250 images of the last five (48 to 51 each), three seeds.
The word choose compares learning rates on other training images.
Results: docs/explanation/results.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, debug_on_digits, set_length, use_cifar10

WORDS = {
    "choose": "compare learning rates on images that are not in the test split, one seed",
    "debug": "a few steps of a tiny model, one seed",
}

PARTS = {  # name: its learning rate, and the other keys that it sets
    "whole model": (0.001, ""),
    "head": (0.01, "; optimizer.freeze=(?!head/).*"),
    "LoRA of rank 8, and head": (
        0.003,
        "; model.lora_rank=8; optimizer.freeze=(?!head/|.*/lora_[ab]$).*",
    ),
}
PEAK_LRS = (0.0003, 0.001, 0.003, 0.01, 0.03)


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.name = "ViT-Ti/8"  # with the sizes of the source
    # 250 images of these classes, at the size of the source.
    use_cifar10(c, image_size=None, classes=(5, 6, 7, 8, 9), split="train[2500:2961]")
    set_length(c, 50, "60 epochs", "6 epochs", save="300 steps", log="50 steps")
    c.evals.test = classification(split="test", every="60 epochs", ops="decode", batch_size=500)
    c.optimizer.peak_lr, c.optimizer.grad_clip_norm = 0.001, 1.0  # the cells replace the rate
    c.schedule.name = "cosine"
    c.study.name, c.study.metric = "grid", "test/top1"
    c.study.cells = tuple(
        f"{part} | top-1: optimizer.peak_lr={lr}{others}" for part, (lr, others) in PARTS.items()
    )

    if "choose" in chosen:
        c.evals.test.split, c.study.seeds = "train[10000:20000]", 1
        c.study.cells = tuple(
            f"{part} | {lr}: optimizer.peak_lr={lr}{others}"
            for part, (_, others) in PARTS.items()
            for lr in PEAK_LRS
        )

    if "debug" in chosen:
        c.init_from, c.init_fields = "scratch", "config"
        debug_on_digits(c, "ViT-mu/8", "resize|flip", eval_ops="resize")
        c.data.image_size, c.data.classes, c.study.seeds = 16, None, 1
    return c
