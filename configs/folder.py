"""Your own images: a folder with one sub-folder per class; from scratch, minutes on a CPU.

python -m vit_jax.main --config=configs/folder.py --config.data.data_dir=IMAGES --workdir=$W

IMAGES holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg; then a tenth is held out for
validation. test/CLASS is evaluated too if it exists. For a larger model at 224 px, on an
accelerator: --config=configs/folder.py:ViT-S/16
A few seconds: --config=configs/folder.py:debug

The word list reads a list of files and labels instead of a folder; multilabel reads a list with
several labels per file: --config=configs/folder.py:multilabel --config.data.data_dir=LIST.csv
With the word native pictures keep their shape: --config=configs/folder.py:ViT-S/16,native
With packed a row of tokens holds four of them, in several sizes:
  --config=configs/folder.py:ViT-S/16,packed
If some classes are rare: --config.loss.class_weights=balanced
"""

import difflib
import math

from vit_jax.config import base_config, classification, multilabel, refuse_words, split_words
from vit_jax.models import create_model, fields_of, token_stride
from vit_jax.run.setup.recipes import make_tiny, set_length, use_adamw, use_vit

WORDS = {
    "list": "a list of files and labels, CSV or JSON lines, in place of a folder",
    "multilabel": "a list with several labels for each file",
    "native": "pictures keep their shape, with as many patches as a square would have",
    "packed": "native, and a row of tokens holds four pictures in training: one with up to all "
    "patches, one with half of them, two with a quarter",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    model = "such as ViT-S/16 or BiT-R50x1, at 224 px instead of a small one at 64 px"
    is_model = bool(words) and not difflib.get_close_matches(words[0], WORDS)
    refuse_words(words[is_model:], {"MODEL": model} | WORDS, __file__)
    c = base_config()
    set_length(c, 32, "40 epochs", "5 %", save="2 epochs", log="10 steps")
    if words:
        create_model(words[0], image_size=224)
        c.model.name, c.data.image_size, c.model.dtype = words[0], 224, "bfloat16"
    else:
        use_vit(c.model, "ViT-Ti/8", 128, 6, 512, 4)
        c.data.image_size = 64
    fields = {*fields_of(c.model.name)}
    if {"pool", "dropout"} <= fields:
        c.model.dropout = 0.1
        # Published T2T-ViTs have a class token, and a DeiT is trained by its tokens.
        if not {"token_module", "distillation_head"} & fields:
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
    use_adamw(c, peak_lr=5e-4)

    if "debug" in chosen:
        use_vit(c.model, c.model.name)
        c.data.image_size = make_tiny(c.model, c.model.name)
        set_length(c, 32, "20 steps", "2 steps", save="10 steps", log="5 steps")
        c.evals.val.every = c.evals.test.every = "10 steps"
    if chosen & {"native", "packed"}:
        c.data.max_tokens = most = math.prod(
            c.data.image_size // side for side in token_stride(c.model.name)
        )
        if "packed" in chosen:  # larger ones are multiples of 8, which TPUs' kernels need not pad
            numbers = (most, most // 2, most // 4, most // 4)
            c.data.pack = tuple(n - n % 8 if n > 32 else n for n in numbers)
        c.data.ops, c.evals.val.ops, c.evals.test.ops = "decode|flip", "decode", "decode"
    return c
