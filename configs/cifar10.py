"""ViT-S/4 on CIFAR-10 from scratch, 200 epochs; needs an accelerator.

python -m vit_jax.main --config=configs/cifar10.py --config.data.data_dir=DIR --workdir=$W
DIR holds cifar10/VERSION as TFDS prepares it.

Minutes on a CPU: --config=configs/cifar10.py:small (1.2M parameters, 3 epochs)
About 1,060 CPU seconds: --config=configs/cifar10.py:fast (1.1M parameters, 10 epochs)
About 6,500 CPU seconds: --config=configs/cifar10.py:hour (the same model, 36 epochs)
For choices, add the word held_out: it trains on nine tenths of the training images
A few seconds, synthetic data: --config=configs/cifar10.py:debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import classification
from vit_jax.run.setup.recipes import (
    AUGREG,
    augreg_ops,
    begin,
    set_length,
    use_adamw,
    use_cifar10,
    use_cifar10_fast,
    use_vit,
)

WORDS = {
    "small": "1.2M parameters, 3 epochs",
    "5k": "a small model that overfits 5,000 images",
    "fast": "1.1M parameters, 10 epochs, about 1,060 CPU seconds",
    "hour": "the model of fast, 36 epochs, about 6,500 CPU seconds",
    "held_out": "for choices: train on nine tenths, evaluate on the last tenth of train",
    **{name: f"AugReg's {name}" for name in AUGREG},
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    augmentation = [name for name in AUGREG if name in chosen] or ["none"]
    lengths = {"small", "5k", "fast", "hour"}
    if len(augmentation) > 1 or len(lengths & chosen) > 1 or {"5k", "held_out"} <= chosen:
        raise InputError(
            f"got {arg!r}, needs at most one of {', '.join(AUGREG)}, and at most one of small, 5k, "
            "fast, hour; held_out goes without 5k"
        )
    set_length(c, 1024, "200 epochs", "5 %", save="5 epochs", log="50 steps")
    c.model.name, c.model.pool = "ViT-S/4", "gap"
    c.model.dropout, c.model.dtype = 0.1, "bfloat16"
    c.loss.label_smoothing = 0.1
    use_adamw(c, 1e-3, 0.1)
    c.evals.test = classification(split="test", every="5 epochs", ops="decode")
    crop = "decode|pad_crop(4)"
    if chosen & lengths:
        c.model.dropout, c.model.dtype = 0.0, "float32"
        c.loss.label_smoothing, c.optimizer.weight_decay = 0.0, 0.05

    if "small" in chosen:
        use_vit(c.model, "ViT-Ti/8", 128, 6, 512, 4)
        set_length(c, 128, "3 epochs", "10 %", save="1 epochs", log="50 steps")
        crop = "decode|pad_crop(2)"
        c.evals.test.every = "1 epochs"
    if "5k" in chosen:
        use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3)
        c.data.split, crop = "train[:10%]", "decode"
        c.model.pos_embed, c.optimizer.peak_lr = "sincos_2d", 5e-4
        set_length(c, 32, "100 epochs", "2 %", save="20 epochs", log="500 steps")
        c.evals.test.every, c.evals.test.batch_size = "50 epochs", 1024
    if chosen & {"fast", "hour"}:
        use_cifar10_fast(c)
        c.loss.label_smoothing = 0.1
        crop = "decode|pad_crop(2)"
        if "hour" in chosen:
            c.duration, c.checkpoint.every, crop = "36 epochs", "6 epochs", "decode|pad_crop(4)"
        c.evals.test.every, c.evals.test.batch_size, c.evals.test.flips = "100 %", 512, True
    use_cifar10(c, augreg_ops(*augmentation, crop))

    if "debug" in chosen:
        use_vit(c.model, c.model.name if chosen & {"fast", "hour"} else "ViT-mu/8", 32, 1, 128, 2)
        c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 10, 256
        set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
        c.evals.test.every = "10 steps"
    if "held_out" in chosen:
        c.data.split, c.evals.test.split = "train[:90%]", "train[90%:]"
        c.evals = {"held_out": c.evals.test}
    return c
