"""ViT-S/16, ImageNet-1k, 90 epochs. Published: 76.5 % top-1 at 224 px (arXiv:2205.01580).

The recipe is big_vision's configs/vit_s16_i1k.py: mean pooling, fixed sine-cosine positions, a
hidden tanh layer in the head, 99 % of train (the last 1 % is kept for tuning; results are on
validation), Inception crops, flips, RandAugment (2, 10), MixUp 0.2, Adam at 1e-3 with decay 0.1
times the learning rate and clipping at norm 1, 10,000 steps of warm-up, a cosine.

Ours differs from big_vision in five points. RandAugment's contrast blends with the image's mean
grey value, as the operation is defined; big_vision's averages the histogram's counts, which gives
the number of pixels / 256 (196 at 224 px) for every image. Adam's first moment is float32 instead
of bfloat16. MixUp draws a weight for each pair of images instead of one for the batch. Evaluation
resizes bilinearly instead of by area. The model computes in bfloat16.

python -m vit_jax.main --config=configs/vit_s16_in1k.py --workdir=$W
A few seconds, synthetic data: --config=configs/vit_s16_in1k.py:debug
"""

from vit_jax.config import base_config, classification, refuse_words, split_words
from vit_jax.recipes import BETTER_PLAIN

WORDS = {"debug": "20 steps of a tiny model"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration = 1024, "90 epochs"

    c.model.name, c.model.pool, c.model.pos_embed = "ViT-S/16", "gap", "sincos_2d"
    c.model.hidden_head, c.model.dtype = True, "bfloat16"

    c.data.name, c.data.image_size = "imagenet2012", 224
    c.data.split = "train[:99%]"
    c.data.ops = BETTER_PLAIN.ops("inception_crop")
    eval_ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.val = classification(split="validation", every="1 epochs", ops=eval_ops)

    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.1
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name, c.schedule.warmup = "cosine", "10000 steps"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"

    if "debug" in chosen:
        c.model.name = "ViT-mu/16"
        c.data.name, c.data.split, c.data.image_size = "synthetic", "train", 32
        c.data.ops = BETTER_PLAIN.ops("")
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.val.split, c.evals.val.ops, c.evals.val.every = "val", "", "10 steps"
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
        c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    return c
