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

from vit_jax.config import base_config, classification, knn, reconstruction, split_words
from vit_jax.errors import InputError
from vit_jax.recipes import SPLITS, find_fine_tuning, fine_tuning_size, make_small_on_cifar10

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
    if "finetune" in chosen:
        finetune(c, val)
    else:
        pretrain(c, val, *targets)
    if "cifar10" in chosen:
        cifar10(c)
    if "debug" in chosen:
        debug(c)
    return c


def pretrain(c, val, target="mean_colour"):
    c.objective.name, c.objective.target = "masked_patches", target
    c.global_batch_size, c.duration = 4096, "1000000 steps"
    c.data.image_size = 224
    c.data.ops = "inception_crop|flip"
    c.optimizer.peak_lr = 2e-4
    c.schedule.name, c.schedule.warmup = "cosine", "10000 steps"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"
    ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.pictures = reconstruction(split=val, every="10000 steps", ops=ops)


def finetune(c, val):
    row = find_fine_tuning("imagenet2012")
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.pos_embed = c.model.gelu = None  # those of the source
    c.global_batch_size, c.duration = 512, f"{row.steps} steps"
    c.data.image_size = fine_tuning_size(c.model.name)
    c.data.ops = "inception_crop|flip"
    c.optimizer.name, c.optimizer.peak_lr = "sgd", row.peak_lrs[2]
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"
    c.evals.val = classification(split=val, every="2000 steps", ops="decode|resize")


def cifar10(c):
    """A run of a few CPU minutes; finetune takes its workdir."""
    make_small_on_cifar10(c)
    splits = {"train_split": "train[:20%]", "test_split": "test"}
    c.evals.near = knn(
        **splits, every="400 steps", ops="decode", batch_size=500, num_neighbours=(20,)
    )
    if c.objective.name == "masked_patches":
        c.evals.pictures.split, c.evals.pictures.every = "test[:10%]", "200 steps"
        c.global_batch_size, c.duration, c.schedule.warmup = 64, "400 steps", "40 steps"
        c.optimizer.peak_lr = 1e-3


def debug(c):
    c.model.name, c.model.dtype = "ViT-mu/2", "float32"
    c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    c.data.name, c.data.split, c.data.image_size, c.data.ops = "digits", "train", 8, "flip"
    c.init_from = None if c.init_from is None else "scratch"
    c.init_fields = "config"
    c.objective.target = None if c.objective.target == "small_patch" else c.objective.target
    c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
    c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    if "near" in c.evals:
        del c.evals["near"]
    for entry in c.evals.values():
        entry.split, entry.every, entry.ops, entry.batch_size = "test", "10 steps", "", 128
