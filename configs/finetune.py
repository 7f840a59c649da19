"""Fine-tuning of any source, --config=finetune:DATA, and as in the paper, finetune:MODEL,DATA

DATA is folder, list or multilabel, your own images, or one of the data sets of table 4:
imagenet2012, cifar10, cifar100, oxford_iiit_pet or oxford_flowers102. --config.init_from is
required; the whole head is replaced by a new one. One of the words head_only, lastN (last4: the
last 4 layers and the head) and lora (lora16: of rank 16; without a number 8) trains a part of the
model; with lora by AdamW at a learning rate of 0.003.

Without MODEL, or with your own images, everything that the source knows is taken from it: the model
with its sizes, pool, positions, value range, image size. Steps, warm-up and learning rate follow
from the number of images (vit_jax/experiment/finetune_length.py); batches of 64, and all else, as
from the paper. The folder holds IMAGES/CLASS/*.jpg; list and multilabel read a list of files and
labels, as in configs/folder.py.

python -m vit_jax.main --config=configs/finetune.py:folder --workdir=$W \\
  --config.data.data_dir=IMAGES --config.init_from=hf:google/vit-base-patch16-224

MODEL,DATA: a row of table 4 (arXiv:2010.11929). Further word: headline.

From the paper: steps, SGD with momentum 0.9, batch 512, cosine, clipping at norm 1, no weight
decay, 384 px (/14: 378), Inception crops and flips, tests on the whole image; headline, for
ImageNet: 512 px (/14: 518) and weight averaging with decay 0.9999.

Our choices: the third learning rate of the row (configs/finetune_study.py selects among them); no
warm-up, which the table does not mention, while the published code has 500 steps
(--config.schedule.warmup='500 steps'); bfloat16.

A BiT (BiT-R50x1,cifar10) follows its HyperRule (arXiv:1912.11370) for DATA, even if you override
`data`: images smaller than 96 x 96 are resized to 160 px and cropped to 128, others resized to
512 and cropped to 480. With fewer than 20,000, fewer than 500,000, or more training images it takes
500, 10,000 or 20,000 steps at learning rate 0.003, divided by 10 three times. MixUp is on from
20,000 images.

python -m vit_jax.main --config=configs/finetune.py:ViT-B/16,cifar10 --workdir=$W \\
  --config.init_from=ViT-B/16@imagenet21k
A few seconds, digits from scratch: --config=configs/finetune.py:ViT-B/16,cifar10,debug
"""

import re

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import base_config, classification, multilabel, split_words
from vit_jax.data.dataset_sizes import known_sizes
from vit_jax.experiment.finetune_length import BIT_LR
from vit_jax.models import find_family
from vit_jax.run.setup.recipes import (
    FINE_TUNING,
    fine_tuning_size,
    hyper_rule,
    make_tiny,
    set_length,
)

OWN = ("folder", "list")  # data sets of the user's images
WORDS = {
    "list": "a list of files and labels, CSV or JSON lines, in place of a folder",
    "multilabel": "a list with several labels for each file",
    "debug": "20 steps of a tiny model",
    "headline": "512 px and averaged weights, for imagenet2012",
    "head_only": "train only the head",
    "lastN": "train only the last N layers and the head, e.g. last4",
    "lora": "train LoRA adapters of query and value, and the head; lora16: of rank 16",
}
_LORA_RANK, _LORA_LR = 8, 3e-3
_HEAD = "head(_distillation)?/"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    parts = [word for word in words if re.fullmatch(r"last\d+|lora\d+", word)]
    parts += sorted(chosen & {"head_only", "lora"})
    words = [word for word in words if word not in parts]
    if chosen & {"list", "multilabel"}:
        words = [*(word for word in words if word != "folder"), "list"]
    data = words[-1] if words else ""
    model = words[0] if len(words) == 2 else None
    if not words or len(words) > 2 or len(parts) > 1 or "lastN" in chosen:
        raise InputError(
            f"got {arg!r}, needs DATA or MODEL,DATA, e.g. configs/finetune.py:folder or "
            f"ViT-B/16,cifar10, DATA one of folder, {', '.join(FINE_TUNING)}; optional words: "
            f"{', '.join(WORDS)}, at most one of head_only, lastN (such as last4) and lora"
        )
    if data not in (*OWN, *FINE_TUNING):
        known = [word for word in dict.fromkeys([*OWN, *FINE_TUNING, *WORDS]) if word != "lastN"]
        raise InputError(f"data {data!r}: {nearest(data, known)}")
    headline, is_bit = "headline" in chosen, model is not None and model.startswith("BiT-")
    if headline and (data != "imagenet2012" or is_bit or model is None):
        raise InputError(
            f"headline: got {','.join(words)}; it is defined for ViTs on imagenet2012, as in "
            "ViT-B/16,imagenet2012,headline; leave it out"
        )

    c = base_config()
    c.init_from = ""  # required
    c.model.name, c.model.dtype, c.data.name = model, "bfloat16", data
    c.optimizer.name, c.optimizer.grad_clip_norm, c.schedule.name = "sgd", 1.0, "cosine"
    c.checkpoint.every, c.log.every = "500 steps", "50 steps"
    if model is None or data in OWN:
        follow_source(c, multilabel if "multilabel" in chosen else classification)
    else:
        follow_table(c, FINE_TUNING[data], headline)
        if is_bit:
            follow_hyper_rule(c, FINE_TUNING[data])
    for part in parts:  # at most one
        number = re.sub(r"\D", "", part)
        if part == "head_only":
            c.optimizer.freeze = f"(?!{_HEAD}).*"
        elif part.startswith("last"):
            c.optimizer.last_layers = int(number)
        else:
            c.model.lora_rank = int(number or _LORA_RANK)
            c.optimizer.freeze = f"(?!{_HEAD}|.*/lora_[ab]$).*"
            c.optimizer.name, c.optimizer.peak_lr = "adamw", _LORA_LR
    if "debug" in chosen:
        make_small(c)
    return c


def follow_source(c, evaluator):
    """Set what depends neither on the source nor on the number of images."""
    if c.model.name is not None:
        find_family(c.model.name)
    c.init_fields, c.schedule.rule, c.global_batch_size = "source", "bit", 64
    how = {"every": "250 steps"}
    if evaluator is multilabel:
        c.data.multi_label, c.loss.name = True, "sigmoid"
    if c.data.name in OWN:
        c.data.ops = "scaled_inception_crop|flip"
        how["ops"] = "scaled_decode|resize(antialias=True)"
        c.evals.val = evaluator(split="val", **how)
        c.evals.test = evaluator(split="test?", **how)  # if it is there
    else:
        c.data.ops, how["ops"] = "inception_crop|flip", "decode|resize(antialias=True)"
        c.evals.test = classification(split=FINE_TUNING[c.data.name].test_split, **how)


def follow_table(c, row, headline):
    """Set the row of table 4."""
    c.global_batch_size, c.duration = 512, f"{row.steps} steps"
    c.data.image_size = fine_tuning_size(c.model.name, headline=headline)
    c.data.ops, c.optimizer.peak_lr = "inception_crop|flip", row.peak_lrs[2]
    c.evals.test = classification(split=row.test_split, every="500 steps", ops="decode|resize")
    if headline:
        c.optimizer.ema_decay = 0.9999


def follow_hyper_rule(c, row):
    """Replace the settings of the table's row in `c` by BiT's HyperRule."""
    _, num_examples = known_sizes(c.data.name, "train")
    rule = hyper_rule(num_examples, row.image_size)
    c.duration, c.data.image_size = f"{rule.steps} steps", rule.crop
    c.data.ops = f"decode|resize(crop={rule.crop / rule.resize})|random_crop|flip"
    if rule.mixup:
        c.data.ops += f"|mixup({rule.mixup})"
    c.optimizer.peak_lr, c.optimizer.grad_clip_norm = BIT_LR, None
    c.schedule.name, c.schedule.warmup = "multistep", f"{rule.warmup} steps"
    c.schedule.milestones = ", ".join(f"{step} steps" for step in rule.milestones)


def make_small(c):
    """20 steps of a tiny model from scratch, on your own images, else on handwritten digits."""
    c.init_from, c.init_fields, c.schedule.rule = "scratch", "config", None
    c.data.image_size = make_tiny(c.model, c.model.name or "ViT-B/16")
    c.model.dtype = "float32"
    if c.data.name in OWN:
        c.evals.val.every = c.evals.test.every = "10 steps"
    else:
        c.data.name, c.data.ops = "digits", "inception_crop(area_min=0.5)|flip"
        c.evals = {"test": classification(split="test", every="10 steps", ops="resize")}
    c.optimizer.peak_lr = c.optimizer.peak_lr or 0.003
    if c.optimizer.last_layers is not None:
        c.optimizer.last_layers = 1
    c.schedule.name, c.schedule.milestones = "cosine", None
    set_length(c, 32, "20 steps", "0 steps", save="10 steps", log="5 steps")
