"""DINOv2 (arXiv:2304.07193), ViT-L/16 on ImageNet-1k: self-distillation of views and of patches.

python -m vit_jax.main --config=configs/dinov2.py --config.data.data_dir=DIR --workdir=$W
A few seconds, on handwritten digits: --config=configs/dinov2.py:debug

DIR holds imagenet2012/VERSION as TFDS prepares it. From the published code's short setting: 100
"epochs" of 1,250 steps at batches of 2,048, AdamW at 0.004 x sqrt(batch / 1,024) to 1e-6 with
12,500 steps of warm-up, layer decay 0.9, a fifth of the rate for the patch embedding, gradients
clipped at 3, weight decay 0.04 to 0.4, the teacher's momentum 0.992 to 1 and temperature 0.04 to
0.07 over 37,500 steps, one head of 65,536 prototypes for views and patches, KoLeo 0.1 in groups of
64 images (a device's batch, as published), 10 % to 50 % of the patches hidden in half of the global
views, 2 global and 8 local views, layer scale 1e-5, stochastic depth 0.3 in all layers. Words:
own_head, sinkhorn, as the larger published runs have them.

Our choices: in each image one of the two global views has hidden patches, where the published code
draws half of a batch's; gradients are clipped as a whole, not for the backbone and the heads
apart; the mask token learns at the rate of the heads instead of the patch embedding; crops are
bilinear; prototypes have the fixed length 1; bfloat16.

Published, ImageNet-1k top-1 with frozen features: 81.6 % by nearest neighbours, 82.9 % by a linear
classifier.
"""

from vit_jax.config import knn, patch_features, rank
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    begin,
    debug_on_digits,
    set_length,
    use_imagenet,
    view_ops,
)

WORDS = {
    "own_head": "a second head for the patches",
    "sinkhorn": "Sinkhorn-Knopp instead of a centre",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 2048, "125000 steps", "10 %", save="1250 steps", log="50 steps")
    c.model.name, c.model.gelu, c.model.layer_scale = "ViT-L/16", "exact", 1e-5
    c.model.stochastic_depth, c.model.uniform_depth, c.model.dtype = 0.3, True, "bfloat16"
    use_imagenet(c)
    c.data.num_global, c.data.num_local, c.data.local_size = 2, 8, 96
    c.data.global_ops, c.data.local_ops = view_ops(smallest=0.32, middle=0.32)

    o = c.objective
    o.name, o.first_temperature, o.teacher_temperature = "self_distillation", 0.04, 0.07
    o.temperature_warmup, o.freeze_prototypes = "37500 steps", "1250 steps"
    o.patch_weight, o.koleo_weight, o.koleo_group = 1.0, 0.1, 64
    if "own_head" in chosen:
        o.patch_head = "own"
    if "sinkhorn" in chosen:
        o.centring = "sinkhorn"

    c.optimizer.peak_lr, c.optimizer.grad_clip_norm = 0.004 * (2048 / 1024) ** 0.5, 3.0
    c.optimizer.layer_decay, c.optimizer.embedding_rate = 0.9, 0.2
    c.optimizer.weight_decay, c.optimizer.weight_decay_end = 0.04, 0.4
    c.optimizer.weight_decay_on = ".*/kernel|class_token|pos_embedding|objective/mask_token"
    c.optimizer.ema_decay, c.optimizer.ema_decay_end = 0.992, 1.0
    c.schedule.name, c.schedule.end_share = "cosine", 1e-6 / c.optimizer.peak_lr
    how = {"every": "12500 steps", "ops": EVAL_OPS}
    c.evals.near = knn(train_split="train", test_split="validation", **how, num_neighbours=(20,))
    c.evals.rank = rank(split="train", **how)
    c.evals.images = patch_features(split="validation", **how)
    if "debug" in chosen:
        make_tiny(c)
    return c


def make_tiny(c):
    """20 steps of a tiny model on handwritten digits."""
    debug_on_digits(c, "ViT-mu/2", eval_every="10 steps", eval_batch_size=256)
    set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
    c.model.dtype, c.model.layer_scale, c.model.stochastic_depth = "float32", 0.1, None
    o = c.objective
    o.num_prototypes, o.head_width, o.bottleneck, o.koleo_group = 32, 16, 8, 8
    o.temperature_warmup, o.freeze_prototypes = "10 steps", "5 steps"
    c.data.num_local, c.data.local_size = 2, 4
    c.data.global_ops = "pad_crop(2); pad_crop(2)|greyscale(0.2)|solarize(0.2)"
    c.data.local_ops = "random_crop|color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)"
