"""How much of a model to fine-tune: all of it, the head, or LoRA adapters and the head.

python -m vit_jax.main --config=configs/five_classes.py:pretrain --config.data.data_dir=DIR \\
  --config.duration='3 epochs' --workdir=$W/pre
python -m vit_jax.main study --config=configs/finetune_parts.py:choose --config.data.data_dir=DIR \\
  --config.init_from=$W/pre --workdir=$W/choose
python -m vit_jax.main study --config=configs/finetune_parts.py --config.data.data_dir=DIR \\
  --config.init_from=$W/pre --workdir=$W/parts
A minute, on handwritten digits: --config=configs/finetune_parts.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The source was trained on the first five classes of
CIFAR-10; the study fine-tunes it on 250 pictures of the last five (48 to 51 each), three seeds.
The word choose compares learning rates on other training pictures.
Results: docs/explanation/results.md.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {
    "choose": "compare learning rates on pictures that are not in the test split, one seed",
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
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.name = "ViT-Ti/8"  # with the sizes of the source
    c.data.name, c.data.classes = "cifar10", (5, 6, 7, 8, 9)
    c.data.split = "train[2500:2961]"  # 250 of these classes
    c.data.ops = "decode|pad_crop(2)|flip"
    c.global_batch_size, c.duration, c.schedule.warmup = 50, "60 epochs", "6 epochs"
    c.evals.test = classification(split="test", every="60 epochs", ops="decode", batch_size=500)
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.log.every, c.checkpoint.every = "50 steps", "300 steps"
    c.study.name, c.study.metric = "grid", "test/top1"
    c.study.cells = tuple(
        f"{part} | top-1: optimizer.peak_lr={lr}{others}" for part, (lr, others) in PARTS.items()
    )
    c.optimizer.peak_lr = 0.001  # the cells replace it

    if "choose" in chosen:
        c.evals.test.split, c.study.seeds = "train[10000:20000]", 1
        c.study.cells = tuple(
            f"{part} | {lr}: optimizer.peak_lr={lr}{others}"
            for part, (_, others) in PARTS.items()
            for lr in PEAK_LRS
        )

    if "debug" in chosen:
        c.init_from, c.init_fields = "scratch", "config"
        c.model.name, c.data.image_size = "ViT-mu/8", 16
        c.data.name, c.data.classes, c.data.split = "digits", None, "train"
        c.data.ops = "resize|flip"
        c.evals.test = classification(split="test", every="20 steps", ops="resize")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.log.every, c.checkpoint.every = "10 steps", "20 steps"
        c.study.seeds = 1
    return c
