"""Your own pictures: a folder with one sub-folder per class; from scratch, minutes on a CPU.

python -m vit_jax.main --config=configs/folder.py --config.data.data_dir=PICTURES --workdir=$W

PICTURES holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg; then a tenth is held out for
validation. test/CLASS is evaluated too if it exists. For a larger model at 224 px, on an
accelerator: --config=configs/folder.py:ViT-S/16
A few seconds: --config=configs/folder.py:debug

The word list reads a list of files and labels instead of a folder; multilabel reads a list with
several labels per file: --config=configs/folder.py:multilabel --config.data.data_dir=LIST.csv
If some classes are rare: --config.loss.class_weights=balanced
"""

import difflib

from vit_jax.config import base_config, classification, multilabel, refuse_words, split_words
from vit_jax.models import create_model, fields_of
from vit_jax.recipes import make_tiny

WORDS = {
    "list": "a list of files and labels, CSV or JSON lines, in place of a folder",
    "multilabel": "a list with several labels for each file",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = "such as ViT-S/16 or BiT-R50x1, at 224 px instead of a small one at 64 px"
    is_model = bool(words) and not difflib.get_close_matches(words[0], WORDS)
    refuse_words(words[is_model:], {"MODEL": model} | WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration = 32, "40 epochs"
    if words:
        create_model(words[0], image_size=224)
        c.model.name, c.data.image_size, c.model.dtype = words[0], 224, "bfloat16"
    else:
        c.model.name, c.data.image_size, c.model.dtype = "ViT-Ti/8", 64, "float32"
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 128, 6, 512, 4
    fields = fields_of(c.model.name)
    if {"pool", "dropout"} <= {*fields}:
        c.model.dropout = 0.1
        # Published T2T-ViTs have a class token, and a DeiT is trained by its tokens.
        if not {"token_module", "distillation_head"} & {*fields}:
            c.model.pool = "gap"

    c.data.name = "list" if chosen & {"list", "multilabel"} else "folder"
    c.data.ops = "scaled_inception_crop(area_min=0.3)|flip"
    eval_ops = "scaled_decode|resize_small(antialias=True)|central_crop"
    evaluator = multilabel if "multilabel" in chosen else classification
    c.evals.val = evaluator(split="val", every="2 epochs", ops=eval_ops)
    c.evals.test = evaluator(split="test?", every="2 epochs", ops=eval_ops)  # if it is there

    if "multilabel" in chosen:
        c.data.multi_label, c.loss.name = True, "sigmoid"
    else:
        c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr, c.optimizer.weight_decay = 5e-4, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name, c.schedule.warmup = "cosine", "2 epochs"
    c.checkpoint.every, c.log.every = "2 epochs", "10 steps"

    if "debug" in chosen:
        c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
        c.data.image_size = make_tiny(c.model, c.model.name)
        c.duration, c.schedule.warmup = "20 steps", "2 steps"
        c.log.every, c.checkpoint.every, c.evals.val.every = "5 steps", "10 steps", "10 steps"
        c.evals.test.every = "10 steps"
    return c
