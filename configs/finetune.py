"""Fine-tuning as in the paper's table 4 (arXiv:2010.11929): --config=finetune:MODEL,DATA

DATA is imagenet2012, cifar10, cifar100, oxford_iiit_pet or oxford_flowers102. Other words:
headline, head_only. What to start from has to be said; the whole head is replaced by a new one.

The paper's: steps, SGD with momentum 0.9, batch 512, cosine, clipping at norm 1, no weight decay,
384 px (/14: 378), Inception crops and flips, tests on the whole image; of headline, for ImageNet,
512 px (/14: 518) and averages of 0.9999. Ours: of the learning rates of the row the third, unless
--config.optimizer.peak_lr says else (configs/finetune_study.py chooses); no warm-up, which the
table does not mention and the published code has (500 steps, --config.schedule.warmup='500 steps');
bfloat16.

A BiT (BiT-R50x1,cifar10) follows its HyperRule (arXiv:1912.11370) for DATA, whatever overrides say
of data: windows of 128 px of images at 160 px where they are smaller than 96 x 96, else of 480 at
512; by their number (from 20,000, from 500,000) 500, 10,000 or 20,000 steps at 0.003, divided by 10
three times, and MixUp from 20,000 images on.

python -m vit_jax.main --config=configs/finetune.py:ViT-B/16,cifar10 --workdir=$W \\
  --config.init_from=ViT-B/16@imagenet21k
A few seconds, digits from scratch: --config=configs/finetune.py:ViT-B/16,cifar10,debug
"""

from vit_jax.config import base_config, classification, split_words
from vit_jax.data.known import known_sizes
from vit_jax.errors import InputError
from vit_jax.recipes import (
    FINE_TUNING,
    HYPER_RULE_LR,
    find_fine_tuning,
    fine_tuning_size,
    hyper_rule,
    make_tiny,
)

WORDS = {
    "debug": "20 steps of a tiny model",
    "headline": "512 px and averaged weights, of imagenet2012",
    "head_only": "all but the head is frozen",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 2:
        raise InputError(
            f"got {arg!r}, needs MODEL,DATA, e.g. configs/finetune.py:ViT-B/16,cifar10, DATA one "
            f"of {', '.join(FINE_TUNING)}; besides them it takes {', '.join(WORDS)}"
        )
    model, data = words
    row, headline, is_bit = find_fine_tuning(data), "headline" in chosen, model.startswith("BiT-")
    if headline and (data != "imagenet2012" or is_bit):
        raise InputError(f"headline: is of ViTs on imagenet2012, not of {model} on {data}")

    c = base_config()
    c.init_from = ""  # has to be given
    c.global_batch_size, c.duration = 512, f"{row.steps} steps"
    c.model.name, c.model.dtype = model, "bfloat16"

    c.data.name, c.data.image_size = data, fine_tuning_size(model, headline=headline)
    c.data.ops = "inception_crop|flip"
    c.evals.test = classification(split=row.test_split, every="500 steps", ops="decode|resize")

    c.optimizer.name, c.optimizer.peak_lr = "sgd", row.peak_lrs[2]
    c.optimizer.grad_clip_norm = 1.0
    if headline:
        c.optimizer.ema_decay = 0.9999
    if "head_only" in chosen:
        c.optimizer.freeze = "(?!head(_distillation)?/).*"
    c.schedule.name = "cosine"
    if is_bit:
        follow_hyper_rule(c, row)
    c.checkpoint.every, c.log.every = "500 steps", "50 steps"

    if "debug" in chosen:
        c.init_from = "scratch"
        c.model.dtype = "float32"
        c.data.name, c.data.image_size = "digits", make_tiny(c.model, model)
        c.data.ops = "inception_crop(area_min=0.5)|flip"
        c.evals.test = classification(split="test", every="10 steps", ops="resize")
        c.global_batch_size, c.duration = 32, "20 steps"
        c.schedule.name, c.schedule.warmup, c.schedule.milestones = "cosine", "0 steps", ""
        c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    return c


def follow_hyper_rule(c, row):
    """What a BiT does in place of the table's row."""
    _, num_examples = known_sizes(c.data.name, "train")
    rule = hyper_rule(num_examples, row.image_size)
    c.duration, c.data.image_size = f"{rule.steps} steps", rule.crop
    c.data.ops = f"decode|resize(crop={rule.crop / rule.resize})|random_crop|flip"
    if rule.mixup:
        c.data.ops += f"|mixup({rule.mixup})"
    c.optimizer.peak_lr, c.optimizer.grad_clip_norm = HYPER_RULE_LR, None
    c.schedule.name, c.schedule.warmup = "multistep", f"{rule.warmup} steps"
    c.schedule.milestones = ", ".join(f"{step} steps" for step in rule.milestones)
