"""Masked autoencoders on ImageNet-1k (arXiv:2111.06377): --config=mae:MODEL

MODEL is ViT-B/16, ViT-L/16 or ViT-H/14. Words: 1600ep, finetune, linear, cifar10, debug. Without
finetune and linear: pretraining, 800 epochs.

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
CIFAR-10, minutes on a CPU: --config=configs/mae.py:cifar10 --config.data.data_dir=DIR
A minute on a CPU, on handwritten digits: --config=configs/mae.py:debug
"""

from vit_jax.config import base_config, classification, knn, reconstruction, split_words
from vit_jax.errors import InputError
from vit_jax.recipes import MAE, make_small_on_cifar10

WORDS = {
    "1600ep": "1600 epochs of pretraining instead of 800",
    "finetune": "fine-tuning of --config.init_from",
    "linear": "a linear classifier on the frozen features of --config.init_from",
    "cifar10": "pretraining of a small model on CIFAR-10",
    "debug": "20 steps of a tiny model on handwritten digits",
}
EVAL_OPS = "decode|resize_small(crop=0.875)|central_crop"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if {"cifar10", "debug"} & chosen and not words:
        words = ["ViT-B/16"]
    if len(words) != 1 or words[0] not in MAE or len({"finetune", "linear"} & chosen) == 2:
        raise InputError(
            f"got {arg!r}, needs one of {', '.join(MAE)}, or cifar10 or debug; optional words: "
            f"{', '.join(WORDS)}, but not both finetune and linear"
        )
    c = base_config()
    c.model.name, c.model.dtype = words[0], "bfloat16"
    c.model.gelu, c.model.pos_embed = "exact", "sincos_2d"
    c.data.name, c.data.image_size = "imagenet2012", 224
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"
    if "finetune" in chosen:
        finetune(c, MAE[words[0]])
    elif "linear" in chosen:
        linear(c, MAE[words[0]])
    else:
        pretrain(c, "1600" if "1600ep" in chosen else "800")
    if "cifar10" in chosen:
        cifar10(c)
    if "debug" in chosen:
        debug(c)
    if "linear" in chosen:
        c.optimizer.peak_lr = 0.1 * c.global_batch_size / 256
    return c


def pretrain(c, epochs):
    c.objective.name = "mae"
    c.global_batch_size, c.duration, c.schedule.warmup = 4096, f"{epochs} epochs", "40 epochs"
    c.data.ops = "inception_crop(area_min=0.2)|flip"
    c.optimizer.peak_lr, c.optimizer.b2 = 1.5e-4 * 4096 / 256, 0.95
    c.optimizer.weight_decay = 0.05
    c.optimizer.weight_decay_on = ".*/kernel|class_token|objective/mask_token"
    c.evals.pictures = reconstruction(split="validation", every="20 epochs", ops=EVAL_OPS)


def finetune(c, recipe):
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.pos_embed = c.model.gelu = None  # those of the source
    c.global_batch_size, c.duration = 1024, f"{recipe.epochs} epochs"
    c.schedule.warmup = "5 epochs"
    c.data.ops = (
        "inception_crop(area_min=0.08)|randaugment(2, 9, 0.5)|flip|erase(0.25, area_max=0.333)|"
        "mixup_or_cutmix(0.8, 1.0)"
    )
    c.loss.label_smoothing = 0.1
    c.model.stochastic_depth = recipe.stochastic_depth
    c.optimizer.peak_lr, c.optimizer.weight_decay = recipe.lr_at_256 * 1024 / 256, 0.05
    c.optimizer.layer_decay = recipe.layer_decay
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)


def linear(c, recipe):
    c.init_from, c.init_fields = "", "source"  # init_from is required
    c.model.pos_embed = c.model.gelu = None  # those of the source
    c.global_batch_size, c.duration = 16384, f"{recipe.linear_epochs} epochs"
    c.schedule.warmup = "10 epochs"
    c.data.ops = "inception_crop(area_min=0.08)|flip"
    c.model.head_batch_norm = True
    c.optimizer.name = "lars"
    c.optimizer.freeze = "(?!head/).*"
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)


def cifar10(c):
    """A run of a few CPU minutes; finetune and linear take its workdir."""
    make_small_on_cifar10(c)
    splits = {"train_split": "train[:20%]", "test_split": "test"}
    c.evals.near = knn(
        **splits, every="600 steps", ops="decode", batch_size=500, num_neighbours=(20,)
    )
    if c.objective.name == "mae":
        c.evals.pictures.split, c.evals.pictures.every = "test[:10%]", "300 steps"
        c.objective.decoder_width, c.objective.decoder_depth = 64, 1
        c.objective.decoder_heads = 4
        c.duration, c.schedule.warmup = "600 steps", "60 steps"
        c.optimizer.peak_lr = 2e-3


def debug(c):
    c.model.name, c.model.dtype = "ViT-mu/2", "float32"
    c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    c.data.name, c.data.split, c.data.image_size = "digits", "train", 8
    c.data.ops = "flip|mixup_or_cutmix(0.8, 1.0)" if c.loss.label_smoothing else "flip"
    c.init_from = None if c.init_from is None else "scratch"
    c.init_fields = "config"
    c.model.gelu, c.model.pos_embed = "exact", "sincos_2d"  # so that a run of mae:debug fits too
    if c.objective.name == "mae":
        c.objective.decoder_width, c.objective.decoder_depth = 16, 1
        c.objective.decoder_heads = 2
    c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
    c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    if "near" in c.evals:
        del c.evals["near"]
    for entry in c.evals.values():
        entry.split, entry.every, entry.ops, entry.batch_size = "test", "10 steps", "", 128
