"""Masked autoencoders on ImageNet-1k (arXiv:2111.06377): --config=mae:MODEL

MODEL is ViT-B/16, ViT-L/16 or ViT-H/14. Words: 1600ep, finetune, linear, folder, cifar10, debug.
Without finetune and linear: pretraining, 800 epochs.

From the paper (appendix A) and its code: pretraining with 75 % of the patches hidden, a decoder of
8 layers of width 512, normalised pixels, AdamW with b2 0.95, weight decay 0.05, 1.5e-4 x batch /
256, batches of 4096, 40 epochs of warm-up, a cosine, crops of 20 % to 100 % of the area.
finetune, of --config.init_from: batches of 1024, 100 epochs (L and H: 50) with 5 of warm-up, AdamW
at 5e-4 x batch / 256 (L and H: 1e-3) with weight decay 0.05, layer decay 0.65 (L and H: 0.75),
stochastic depth 0.1 (L: 0.2, H: 0.3), RandAugment 9 / 0.5, MixUp 0.8 or CutMix 1.0, random erasing
0.25, label smoothing 0.1: the commands of the published code, which differ a little from the
paper's table 9. linear, of --config.init_from: LARS at 0.1 x batch / 256, batches of 16384, 90
epochs (L and H: 50) with 10 of warm-up, crops of 8 % to 100 % of the area, a batch norm without
scale and bias before the head; all other parameters are frozen.

Our choices: MODEL keeps its class token, and the head gets it, as in the published linear probe;
crops resize bilinearly, not bicubically; MixUp and CutMix draw for each pair of images; warm-up
begins at 0; the head begins at 0; the frequencies of the encoder's sine-cosine positions end at
1/10000; bfloat16.

python -m vit_jax.main --config=configs/mae.py:ViT-B/16 --workdir=$W/pre
python -m vit_jax.main --config=configs/mae.py:ViT-B/16,finetune --config.init_from=$W/pre \\
  --workdir=$W/fine
Published, top-1 after 1600 epochs: fine-tuned B/16 83.6 %, L/16 85.9 %, H/14 86.9 %; linear B/16
68.0 %, L/16 75.8 %, H/14 76.6 %.
Your own images, of any size, with or without classes:
  --config=configs/mae.py:folder --config.data.data_dir=IMAGES
CIFAR-10, minutes on a CPU: --config=configs/mae.py:cifar10 --config.data.data_dir=DIR
A minute on a CPU, on handwritten digits: --config=configs/mae.py:debug
"""

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import base_config, classification, reconstruction, split_words
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    debug_on_digits,
    debug_on_own_images,
    make_small_on_cifar10,
    set_length,
    use_imagenet,
    use_own_images,
)

WORDS = {
    "1600ep": "1600 epochs of pretraining instead of 800",
    "finetune": "fine-tuning of --config.init_from",
    "linear": "a linear classifier on the frozen features of --config.init_from",
    "folder": "pretraining of a small model on your own images, with or without classes",
    "cifar10": "pretraining of a small model on CIFAR-10",
    "debug": "20 steps of a tiny model on handwritten digits, or your own images",
}
# Of the fine-tuning: epochs, learning rate for a batch of 256, layer decay and stochastic depth;
# epochs of the linear classifier.
MODELS = {
    "ViT-B/16": (100, 5e-4, 0.65, 0.1, 90),
    "ViT-L/16": (50, 1e-3, 0.75, 0.2, 50),
    "ViT-H/14": (50, 1e-3, 0.75, 0.3, 50),
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if {"folder", "cifar10", "debug"} & chosen and not words:
        words = ["ViT-B/16"]
    tasks = {"finetune", "linear", "folder"} & chosen
    if len(words) == 1 and words[0] not in MODELS:
        raise InputError(f"got {arg!r}: {nearest(words[0], [*MODELS, *WORDS])}")
    if len(words) != 1 or len(tasks) > 1:
        raise InputError(
            f"got {arg!r}, needs one of {', '.join(MODELS)}, or folder, cifar10 or debug; optional "
            f"words: {', '.join(WORDS)}, but one of finetune, linear and folder; a run of folder "
            "is fine-tuned by --config=finetune:folder"
        )
    c = base_config()
    c.model.name, c.model.dtype = words[0], "bfloat16"
    use_imagenet(c)
    c.schedule.name = "cosine"
    if "finetune" in chosen:
        finetune(c, *MODELS[words[0]][:4])
    elif "linear" in chosen:
        classify_linearly(c, MODELS[words[0]][4])
    else:
        pretrain(c, *(("1600 epochs", "2.5 %") if "1600ep" in chosen else ("800 epochs", "5 %")))
    if "folder" in chosen:
        make_own(c)
    elif "cifar10" in chosen:
        make_small(c)
    if "debug" in chosen:
        make_tiny(c)
    if "linear" in chosen:
        c.optimizer.peak_lr = 0.1 * c.global_batch_size / 256
    return c


def pretrain(c, duration, warmup):
    set_length(c, 4096, duration, warmup, save="1000 steps", log="50 steps")
    c.objective.name, c.model.gelu, c.model.pos_embed = "mae", "exact", "sincos_2d"
    c.data.ops = "inception_crop(area_min=0.2)|flip"
    c.optimizer.peak_lr, c.optimizer.b2 = 1.5e-4 * 4096 / 256, 0.95
    c.optimizer.weight_decay = 0.05
    c.optimizer.weight_decay_on = ".*/kernel|class_token|objective/mask_token"
    c.evals.images = reconstruction(split="validation", every="20 epochs", ops=EVAL_OPS)


def finetune(c, epochs, lr_at_256, layer_decay, stochastic_depth):
    set_length(c, 1024, f"{epochs} epochs", f"{500 // epochs} %", save="1000 steps", log="50 steps")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.data.ops = (
        "inception_crop(area_min=0.08)|randaugment(2, 9, 0.5)|flip|erase(0.25, area_max=0.333)|"
        "mixup_or_cutmix(0.8, 1.0)"
    )
    c.loss.label_smoothing, c.model.stochastic_depth = 0.1, stochastic_depth
    c.optimizer.peak_lr, c.optimizer.weight_decay = lr_at_256 * 1024 / 256, 0.05
    c.optimizer.layer_decay = layer_decay
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)


def classify_linearly(c, epochs):
    set_length(c, 16384, f"{epochs} epochs", "10 epochs", save="1000 steps", log="50 steps")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.data.ops = "inception_crop(area_min=0.08)|flip"
    c.model.head_batch_norm = True
    c.optimizer.name, c.optimizer.freeze = "lars", "(?!head/).*"
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)


def make_own(c):
    """A ViT of 1.2 million parameters on own images, from scratch."""
    use_own_images(c, "3000 steps")
    c.objective.update(decoder_width=64, decoder_depth=1, decoder_heads=4)
    c.data.ops, c.optimizer.peak_lr = "scaled_inception_crop(area_min=0.2)|flip", 1e-3
    c.evals.images = reconstruction(
        data_name="folder", split="val?", every="25 %", ops=c.evals.features.ops
    )


def make_small(c):
    """A run of a few CPU minutes on CIFAR-10; finetune and linear take its workdir."""
    make_small_on_cifar10(c, near_every="600 steps")
    if c.objective.name == "mae":
        c.evals.images.split, c.evals.images.every = "test[:10%]", "300 steps"
        c.evals.near.baselines = True
        c.objective.update(decoder_width=64, decoder_depth=1, decoder_heads=4)
        c.duration, c.schedule.warmup = "600 steps", "10 %"
        c.optimizer.peak_lr = 2e-3


def make_tiny(c):
    if c.data.name == "unlabelled":
        c.objective.update(decoder_width=16, decoder_depth=1, decoder_heads=2)
        debug_on_own_images(c)
        return
    if "near" in c.evals:
        del c.evals["near"]
    ops = "flip|mixup_or_cutmix(0.8, 1.0)" if c.loss.label_smoothing else "flip"
    debug_on_digits(c, "ViT-mu/2", ops, eval_every="10 steps", eval_batch_size=128)
    c.checkpoint.every, c.log.every = "10 steps", "5 steps"
    c.init_from, c.init_fields = None if c.init_from is None else "scratch", "config"
    # The same for every word, so that a run of mae:debug fits as the source.
    c.model.gelu, c.model.pos_embed, c.model.dtype = "exact", "sincos_2d", "float32"
    if c.objective.name == "mae":
        c.objective.update(decoder_width=16, decoder_depth=1, decoder_heads=2)
