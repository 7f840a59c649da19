"""DINO (arXiv:2104.14294): a ViT predicts the outputs of its own running average, without labels.

python -m vit_jax.main --config=configs/dino.py --config.data.data_dir=DIR --workdir=$W
Your own images, of any size, with or without classes:
  --config=configs/dino.py:folder --config.data.data_dir=IMAGES
About 11 CPU minutes: --config=configs/dino.py:cifar10 --config.data.data_dir=DIR
A few seconds, on handwritten digits: --config=configs/dino.py:debug

DIR holds imagenet2012/VERSION, or cifar10/VERSION, as TFDS prepares it. ViT-S/16 as published (the
paper's table and its code's command): 800 epochs at batches of 1,024, AdamW at 5e-4 x batch / 256
with 10 epochs of warm-up and a cosine, weight decay 0.04 to 0.4, the teacher's momentum 0.996 to 1
and temperature 0.04 to 0.07 over 30 epochs, 65,536 prototypes that do not learn in the first epoch,
2 global and 10 local views, stochastic depth 0.1.

dino:folder is smaller: 1,024 prototypes, the teacher's momentum 0.99 to 1, a rate of 5e-4. It adds
KoLeo of DINOv2 and keeps the teacher's temperature at 0.04: with a rising temperature, a rate of
1e-3 and no KoLeo all targets became nearly uniform within 100 steps on 5,000 images. After 320
steps on 5,000 images, in 24 CPU minutes, its features are below the pixels by nearest neighbours;
selfsup:folder's are above them (docs/explanation/does_it_learn.md).

Our choices: the rate ends at 0 instead of 1e-5; crops resize bilinearly, with antialiasing, not
bicubically; the blur has a kernel of 9 pixels; prototypes have the fixed length 1; bfloat16.

Published, ImageNet-1k top-1 with frozen features: 74.5 % by 20 nearest neighbours, 77.0 % by a
linear classifier.
"""

from vit_jax.config import knn, patch_features, rank
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    begin,
    debug_on_digits,
    debug_on_own_images,
    set_length,
    use_cifar10,
    use_imagenet,
    use_own_images,
    use_small_views,
    use_vit,
    view_ops,
)

WORDS = {
    "folder": "a small ViT on your own images, with or without classes",
    "cifar10": "a small ViT on CIFAR-10",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    c.objective.name = "self_distillation"
    c.objective.first_temperature, c.objective.teacher_temperature = 0.04, 0.07
    c.optimizer.ema_decay, c.optimizer.ema_decay_end = 0.996, 1.0
    c.optimizer.weight_decay, c.optimizer.weight_decay_end = 0.04, 0.4
    c.optimizer.weight_decay_on = ".*/kernel|class_token|pos_embedding"
    c.schedule.name = "cosine"
    if "folder" in chosen:
        make_own(c)
    elif "cifar10" in chosen:
        make_small(c)
    else:
        follow_paper(c)
    if "debug" in chosen:
        make_tiny(c)
    return c


def follow_paper(c):
    set_length(c, 1024, "800 epochs", "1.25 %", save="5 epochs", log="100 steps")
    c.objective.temperature_warmup, c.objective.freeze_prototypes = "30 epochs", "1 epochs"
    c.optimizer.peak_lr = 5e-4 * 1024 / 256
    c.model.name, c.model.gelu, c.model.stochastic_depth = "ViT-S/16", "exact", 0.1
    c.model.dtype = "bfloat16"
    use_imagenet(c)
    c.data.num_global, c.data.num_local, c.data.local_size = 2, 10, 96
    c.data.global_ops, c.data.local_ops = view_ops(smallest=0.25, middle=0.25)
    splits = {"train_split": "train", "test_split": "validation"}
    c.evals.near = knn(**splits, every="100 epochs", ops=EVAL_OPS, num_neighbours=(20,))
    c.evals.rank = rank(split="train", every="10 epochs", ops=EVAL_OPS)
    c.evals.images = patch_features(split="validation", every="10 epochs", ops=EVAL_OPS)


def make_own(c):
    """A ViT of 1.2 million parameters on own images, from scratch.

    KoLeo and a low temperature keep the features apart and the targets sharp, also in short runs.
    """
    use_own_images(c, "1000 steps")
    use_small_views(c, "scaled_inception_crop")
    use_small_head(c)
    c.objective.first_temperature, c.objective.temperature_warmup = None, None
    c.objective.teacher_temperature, c.objective.koleo_weight = 0.04, 0.1
    c.objective.freeze_prototypes, c.optimizer.peak_lr = "3 %", 5e-4


def use_small_head(c):
    c.objective.num_prototypes, c.objective.head_width, c.objective.bottleneck = 1024, 256, 64
    c.objective.temperature_warmup, c.objective.freeze_prototypes = "200 steps", "35 steps"
    c.optimizer.peak_lr, c.optimizer.grad_clip_norm, c.optimizer.ema_decay = 1e-3, 3.0, 0.99


def make_small(c):
    """A ViT of 0.5 million parameters and 1,024 prototypes on CIFAR-10; 0.9 CPU seconds a step."""
    set_length(c, 128, "600 steps", "10 %", save="300 steps", log="10 steps")
    use_small_head(c)
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3, pos_embed="sincos_2d")
    use_cifar10(c, "")
    use_small_views(c, "inception_crop")
    splits = {"train_split": "train[:10%]", "test_split": "test[:20%]"}
    how = {"every": "300 steps", "ops": "decode", "batch_size": 500}
    c.evals.near = knn(**splits, **how, num_neighbours=(20,), baselines=True)
    c.evals.rank = rank(split="train", **how, num_images=2000)
    c.evals.images = patch_features(split="test", **how)


def make_tiny(c):
    """20 steps of a tiny model, on own images or handwritten digits."""
    c.objective.num_prototypes, c.objective.head_width, c.objective.bottleneck = 32, 16, 8
    c.objective.freeze_prototypes = "5 steps"
    if c.data.name == "unlabelled":
        debug_on_own_images(c)
        return
    c.objective.temperature_warmup = "10 steps"
    debug_on_digits(c, eval_every="10 steps", eval_batch_size=256)
    set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
    c.model.dtype, c.model.stochastic_depth = "float32", None
    c.data.num_local, c.data.local_size = 2, 4
    c.data.global_ops = "pad_crop(2); pad_crop(2)|greyscale(0.2)|solarize(0.2)"
    c.data.local_ops = "random_crop|color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)"
