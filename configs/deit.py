"""DeiT on ImageNet-1k (arXiv:2012.12877): --config=deit:MODEL

MODEL is DeiT-Ti/16, DeiT-S/16 or DeiT-B/16, whose second head learns from a teacher, which
--config.objective.teacher names (any source of init_from with ImageNet's classes); or ViT-Ti/16,
ViT-S/16 or ViT-B/16, trained by the same recipe without a teacher. Words: soft, 384.

From the paper (table 9) and its code: AdamW at 5e-4 x batch / 512, weight decay 0.05, 300 epochs
with 5 of warm-up, a cosine, RandAugment 9 / 0.5, MixUp 0.8 or CutMix 1.0, random erasing 0.25,
stochastic depth 0.1, 3 views of an image in a batch, label smoothing 0.1, crops of 8 % to 100 % of
the area; the teacher's hard label for half of the loss, with soft T = 3 for a tenth of it. 384, a
fine-tuning of --config.init_from with its heads: 30 epochs at 5e-6 x batch / 512 with weight decay
1e-8.

Our choices: batches of 960 (with 384 of 480) instead of 1024 (512), because a batch holds pairs of
images with 3 views each; the cosine ends at 0 instead of 1e-5, and warm-up begins at 0 instead of
1e-6; MixUp and CutMix draw for each pair of images; training and evaluation resize bilinearly, not
bicubically; bfloat16.

python -m vit_jax.main --config=configs/deit.py:DeiT-S/16 --workdir=$W \\
  --config.objective.teacher=TEACHER
Published, top-1 at 224 px: DeiT-Ti/16 74.5 %, S/16 81.2 %, B/16 83.4 %, at 384 px B/16 84.5 %;
without teacher ViT-Ti/16 72.2 %, S/16 79.8 %, B/16 81.8 %. Their teacher is a RegNetY-16GF.
CPU, under a minute, a tiny untrained teacher: --config=configs/deit.py:DeiT-S/16,debug
"""

from vit_jax.config import base_config, classification, split_words
from vit_jax.errors import InputError
from vit_jax.recipes import DEIT, make_tiny

WORDS = {
    "384": "fine-tuning at 384 px",
    "soft": "the teacher's probabilities instead of its most likely class",
    "debug": "20 steps of a tiny model, with a tiny untrained teacher",
}
MODELS = tuple(f"{family}-{size}/16" for family in ("DeiT", "ViT") for size in ("Ti", "S", "B"))


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = words[0] if words else ""
    has_teacher = model.startswith("DeiT-")
    if len(words) != 1 or model not in MODELS or ("soft" in chosen and not has_teacher):
        raise InputError(
            f"got {arg!r}, needs one of {', '.join(MODELS)}; optional words: {', '.join(WORDS)}, "
            "soft with a DeiT only"
        )
    recipe = DEIT["384" if "384" in chosen else "224"]
    c = base_config()
    c.global_batch_size, c.duration = recipe.batch_size, f"{recipe.epochs} epochs"
    c.model.name, c.model.dtype = model, "bfloat16"
    c.model.gelu, c.model.stochastic_depth = "exact", 0.1

    c.data.name, c.data.image_size, c.data.repeats = "imagenet2012", recipe.image_size, 3
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    c.data.ops = f"inception_crop(area_min=0.08)|{recipe.ops}"
    eval_ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.val = classification(split="validation", every="1 epochs", ops=eval_ops)

    c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr = recipe.lr_at_512 * recipe.batch_size / 512
    c.optimizer.weight_decay = recipe.weight_decay
    c.schedule.name, c.schedule.warmup = recipe.schedule, "5 epochs"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"

    if has_teacher:
        c.objective.name, c.objective.teacher = "distillation", ""  # required
        c.objective.mode, c.objective.weight = "hard", 0.5
    if "soft" in chosen:
        c.objective.mode, c.objective.weight, c.objective.temperature = "soft", 0.1, 3.0
    if "384" in chosen:
        c.init_from, c.init_head = "", "kept"  # init_from is required

    if "debug" in chosen:
        c.init_from, c.init_head = "scratch", "new"
        c.objective.teacher = "untrained:ViT-mu/16" if has_teacher else None
        c.data.name, c.data.split, c.data.ops = "synthetic", "train", recipe.ops_on_device
        c.data.image_size = make_tiny(c.model, model)
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.val.split, c.evals.val.ops, c.evals.val.every = "val", "", "10 steps"
        c.evals.val.batch_size = 32
        c.global_batch_size, c.duration, c.schedule.warmup = 24, "20 steps", "5 steps"
        c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    return c
