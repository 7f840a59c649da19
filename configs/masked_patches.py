"""Masked patch prediction (arXiv:2010.11929, appendix B.1.2): --config=masked_patches:MODEL,DATA

DATA is imagenet2012, imagenet21k or jft=NAME, a TFDS data set of your own. Words: mean_colour (the
default), small_patch or pixels, what is predicted; finetune.

From the paper: half of the patch embeddings are corrupted, 80 % of them to the mask token, 10 % to
another patch, 10 % not at all; Adam, peak 2e-4, 10,000 steps of warm-up, a cosine, batches of 4096,
1,000,000 steps of ViT-B/16. finetune is the paper's fine-tuning on ImageNet (table 4) of
--config.init_from: SGD, 20,000 steps at 384 px; of its learning rates 0.003, 0.01, 0.03 and 0.06
the third.

Our choices: no weight decay; random crops of 5 % to 100 % of the area and flips; the other patch is
one of the same image; bfloat16.

python -m vit_jax.main --config=configs/masked_patches.py:ViT-B/16,jft=NAME --workdir=$W/pre
python -m vit_jax.main --config=configs/masked_patches.py:ViT-B/16,imagenet2012,finetune \\
  --config.init_from=$W/pre --workdir=$W/fine
Published: ViT-B/16, pretrained on JFT, 79.9 % top-1 on ImageNet; 2 % over training from scratch.
CIFAR-10, minutes on a CPU: --config=configs/masked_patches.py:cifar10 --config.data.data_dir=DIR
A minute on a CPU, on handwritten digits: --config=configs/masked_patches.py:debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, reconstruction, split_words
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    FINE_TUNING,
    SPLITS,
    debug_on_digits,
    fine_tuning_size,
    make_small_on_cifar10,
    set_length,
)

TARGETS = ("mean_colour", "small_patch", "pixels")
WORDS = {
    **{target: "what is predicted" for target in TARGETS},
    "finetune": "fine-tuning of --config.init_from on ImageNet",
    "cifar10": "a small model on CIFAR-10",
    "debug": "20 steps of a tiny model on handwritten digits",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    targets = [target for target in TARGETS if target in chosen]
    data = words[1].partition("=")[0] if len(words) == 2 else ""
    if {"cifar10", "debug"} & chosen and not words:
        words, data = ["ViT-B/16", "imagenet2012"], "imagenet2012"
    if len(words) != 2 or data not in SPLITS or len(targets) > 1:
        raise InputError(
            f"got {arg!r}, needs a model and one of {', '.join(SPLITS)}, e.g. "
            f"ViT-B/16,imagenet2012 (jft=NAME), or cifar10 or debug; optional words: "
            f"{', '.join(WORDS)}"
        )
    c = base_config()
    c.model.name, c.model.dtype = words[0], "bfloat16"
    c.data.name = words[1].partition("=")[2] or words[1]
    c.data.split, val = SPLITS[data]
    c.data.ops, c.schedule.name = "inception_crop|flip", "cosine"
    if "finetune" in chosen:
        finetune(c, val, FINE_TUNING["imagenet2012"])
    else:
        pretrain(c, val, *targets)
    if "cifar10" in chosen:
        make_small(c)
    if "debug" in chosen:
        make_tiny(c)
    return c


def pretrain(c, val, target="mean_colour"):
    set_length(c, 4096, "1000000 steps", "10000 steps", save="1000 steps", log="50 steps")
    c.objective.name, c.objective.target = "masked_patches", target
    c.data.image_size, c.optimizer.peak_lr = 224, 2e-4
    c.evals.images = reconstruction(split=val, every="10000 steps", ops=EVAL_OPS)


def finetune(c, val, row):
    set_length(c, 512, f"{row.steps} steps", "0 steps", save="1000 steps", log="50 steps")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.data.image_size = fine_tuning_size(c.model.name)
    c.optimizer.name, c.optimizer.peak_lr = "sgd", row.peak_lrs[2]
    c.optimizer.grad_clip_norm = 1.0
    c.evals.val = classification(split=val, every="2000 steps", ops="decode|resize")


def make_small(c):
    """A run of a few CPU minutes on CIFAR-10; finetune takes its workdir."""
    make_small_on_cifar10(c, near_every="400 steps")
    if c.objective.name == "masked_patches":
        c.evals.images.split, c.evals.images.every = "test[:10%]", "200 steps"
        c.evals.near.baselines = True
        c.global_batch_size, c.duration, c.schedule.warmup = 64, "400 steps", "10 %"
        c.optimizer.peak_lr = 1e-3


def make_tiny(c):
    if "near" in c.evals:
        del c.evals["near"]
    debug_on_digits(c, "ViT-mu/2", "flip", eval_every="10 steps", eval_batch_size=128)
    c.checkpoint.every, c.log.every = "10 steps", "5 steps"
    c.init_from, c.init_fields = None if c.init_from is None else "scratch", "config"
    c.model.dtype = "float32"
    c.objective.target = None if c.objective.target == "small_patch" else c.objective.target
