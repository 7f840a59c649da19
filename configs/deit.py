"""DeiT on ImageNet-1k (arXiv:2012.12877): --config=deit:MODEL

MODEL is DeiT-Ti/16, DeiT-S/16 or DeiT-B/16, whose second head learns from a teacher, which
--config.objective.teacher names (any source of init_from with ImageNet's classes); or ViT-Ti/16,
ViT-S/16 or ViT-B/16, trained by the same recipe without a teacher. Words: soft, 384.

From the paper (table 9) and its code: AdamW at 5e-4 x batch / 512 to 1e-5, weight decay 0.05, 300
epochs with 5 of warm-up, a cosine, RandAugment 9 / 0.5, MixUp 0.8 or CutMix 1.0, random erasing
0.25, stochastic depth 0.1, 3 views of an image in a batch, label smoothing 0.1, crops of 8 % to 100
% of the area; the teacher's hard label for half of the loss, with soft T = 3 for a tenth of it.
The rate is of the recipe's own batch: with another batch set --config.optimizer.peak_lr, and
--config.data.repeats, the views of an image, to a number that divides it (1 as in timm).
384, a fine-tuning of --config.init_from with its heads: 30 epochs at 5e-6 x batch / 512 with weight
decay 1e-8.

Our choices: batches of 960 (with 384 of 480) instead of 1024 (512), because a batch holds pairs of
images with 3 views each; warm-up begins at 0 instead of 1e-6; MixUp and CutMix draw for each pair
of images; training and evaluation resize bilinearly, not bicubically; bfloat16.

python -m vit_jax.main --config=configs/deit.py:DeiT-S/16 --workdir=$W \\
  --config.objective.teacher=TEACHER
Published, top-1 at 224 px: DeiT-Ti/16 74.5 %, S/16 81.2 %, B/16 83.4 %, at 384 px B/16 84.5 %;
without teacher ViT-Ti/16 72.2 %, S/16 79.8 %, B/16 81.8 %. Their teacher is a RegNetY-16GF.
CPU, under a minute, a tiny untrained teacher: --config=configs/deit.py:DeiT-S/16,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import EVAL_OPS, debug_on_synthetic, set_length, use_imagenet

WORDS = {
    "384": "fine-tuning at 384 px",
    "soft": "the teacher's probabilities instead of its most likely class",
    "debug": "20 steps of a tiny model, with a tiny untrained teacher",
}
MODELS = tuple(f"{family}-{size}/16" for family in ("DeiT", "ViT") for size in ("Ti", "S", "B"))
DEVICE_OPS = "flip|erase(0.25, area_max=0.333)|mixup_or_cutmix(0.8, 1.0)"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = words[0] if words else ""
    has_teacher = model.startswith("DeiT-")
    if len(words) != 1 or model not in MODELS or ("soft" in chosen and not has_teacher):
        raise InputError(
            f"got {arg!r}, needs one of {', '.join(MODELS)}; optional words: {', '.join(WORDS)}, "
            "soft with a DeiT only"
        )
    c = base_config()
    if "384" in chosen:
        c.init_from, c.init_head = "", "kept"  # init_from is required
        image_size, batch_size, epochs, lr_at_512 = 384, 480, 30, 5e-6
        c.optimizer.weight_decay, c.schedule.name = 1e-8, "constant"
    else:
        image_size, batch_size, epochs, lr_at_512 = 224, 960, 300, 5e-4
        c.optimizer.weight_decay, c.schedule.name = 0.05, "cosine"
    set_length(c, batch_size, f"{epochs} epochs", "5 epochs", save="1000 steps", log="50 steps")
    c.optimizer.peak_lr = lr_at_512 * batch_size / 512
    if c.schedule.name == "cosine":
        c.schedule.end_share = 1e-5 / c.optimizer.peak_lr
    c.model.name, c.model.dtype = model, "bfloat16"
    c.model.gelu, c.model.stochastic_depth = "exact", 0.1

    use_imagenet(c, image_size)
    c.data.repeats = 3
    c.data.ops = f"inception_crop(area_min=0.08)|randaugment(2, 9, 0.5)|{DEVICE_OPS}"
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)
    c.loss.label_smoothing = 0.1

    if has_teacher:
        c.objective.name, c.objective.teacher = "distillation", ""  # required
        c.objective.mode, c.objective.weight = "hard", 0.5
    if "soft" in chosen:
        c.objective.mode, c.objective.weight, c.objective.temperature = "soft", 0.1, 3.0

    if "debug" in chosen:
        c.init_from, c.init_head = "scratch", "new"
        c.objective.teacher = "untrained:ViT-mu/16" if has_teacher else None
        debug_on_synthetic(c, DEVICE_OPS)
        c.global_batch_size, c.evals.val.batch_size = 24, 32
    return c
