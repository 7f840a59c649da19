"""Pretraining of the largest ViTs on a very large labelled data set: --config=giant:MODEL,DATA

MODEL is ViT-g/14 or ViT-G/14 ("Scaling Vision Transformers", arXiv:2106.04560), or ViT-22B/14
(arXiv:2302.05442). DATA is imagenet21k or jft=NAME, your own TFDS data set NAME in place of JFT-3B,
which is not public.

Of g and G, from the authors' big_vision, configs/proj/scaling_laws/train_vit_g.py: Adafactor at
8e-4 with 10,000 steps of warm-up, then 1 / sqrt(step) with a timescale of 10,000 steps, and 50,000
steps of cooldown; batch 16,384, 1,000,000 steps; weight decay 0.03, of the head 3; clipping at norm
1; attention pooling; a sigmoid loss with the head's bias at -10; Inception crops of 224 px and
flips. 22B: batch 65,536, 177,000 steps, 1e-3, 30,000 steps of cooldown (section 3 of its paper).

Our choices: 22B takes what its paper leaves out from g and G; images are resized bilinearly;
evaluation resizes the whole image to 256 px on its shorter side; bfloat16, with parameters in
float32.

python -m vit_jax.main --config=configs/giant.py:ViT-g/14,jft=NAME --workdir=$W
Published: G/14 90.45 % top-1 on ImageNet after fine-tuning, 84.86 % by least squares on 10 images a
class; 22B 89.51 % by a linear classifier on frozen features.
CPU, under a minute, synthetic data: --config=configs/giant.py:ViT-G/14,imagenet21k,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import EVAL_OPS, SPLITS, debug_on_synthetic, set_length

WORDS = {"debug": "20 steps of a tiny model"}
DATA = ("imagenet21k", "jft")
# Batch, steps, steps of cooldown, learning rate.
MODELS = {
    "ViT-g/14": (16_384, 1_000_000, 50_000, 8e-4),
    "ViT-G/14": (16_384, 1_000_000, 50_000, 8e-4),
    "ViT-22B/14": (65_536, 177_000, 30_000, 1e-3),
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model, data = words if len(words) == 2 else ("", "")
    data, _, tfds_name = data.partition("=")
    if model not in MODELS or data not in DATA or (data == "jft") != bool(tfds_name):
        raise InputError(
            f"got {arg!r}, needs MODEL,DATA: one of {', '.join(MODELS)}, and imagenet21k or "
            "jft=<TFDS name>; optional word: debug"
        )
    batch_size, steps, cooldown, peak_lr = MODELS[model]
    c = base_config()
    c.model.name, c.model.pool, c.model.dtype, c.model.head_bias = model, "map", "bfloat16", -10.0
    c.data.name, c.data.image_size, c.data.ops = tfds_name or data, 224, "inception_crop|flip"
    c.data.split, val_split = SPLITS[data]
    c.evals.val = classification(split=val_split, every="5000 steps", ops=EVAL_OPS)
    set_length(c, batch_size, f"{steps} steps", "10000 steps", save="1000 steps", log="50 steps")
    c.schedule.name, c.schedule.timescale = "rsqrt", "10000 steps"
    c.schedule.cooldown = f"{cooldown} steps"
    c.optimizer.name, c.optimizer.peak_lr, c.optimizer.grad_clip_norm = "adafactor", peak_lr, 1.0
    c.optimizer.weight_decay, c.optimizer.head_decay = 0.03, 100.0
    c.loss.name = "sigmoid"
    if "debug" in chosen:
        debug_on_synthetic(c)
        c.schedule.timescale, c.schedule.cooldown = "5 steps", "5 steps"
    return c
