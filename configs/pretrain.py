"""Pretraining as in the paper's table 3 (arXiv:2010.11929): --config=pretrain:MODEL,DATA

DATA is imagenet2012, imagenet21k or jft=NAME. JFT-300M is not public, so jft=NAME runs its recipe
on your own large TFDS data set NAME. docs/how_to/data.md shows how to prepare sets that the
TFDS catalogue lacks, such as imagenet21k. MODEL is a ViT; with jft also a hybrid or BiT of the
table.

python -m vit_jax.main --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=$W
Published, ViT-B/16 on ImageNet-1k, 300 epochs, from scratch: 77.9 % top-1 at 384 px.
CPU, under a minute, synthetic data: --config=configs/pretrain.py:ViT-L/16,imagenet21k,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, fewshot, split_words
from vit_jax.models import fields_of, find_family
from vit_jax.run.setup.recipes import EVAL_OPS, SPLITS, debug_on_synthetic, set_length

WORDS = {
    "debug": "20 steps of a tiny model",
    "7ep": "7 epochs",
    "14ep": "14 epochs",
    "30ep": "30 epochs",
    "90ep": "90 epochs",
    "fewshot": "5-shot ImageNet during training, as in the paper's figures",
}

# Table 3. The paper's choices of epochs, the usual one first; learning rate, decay, weight decay
# (decoupled, multiplied by the current learning rate), dropout.
JFT = {
    "ViT-B/16": ((7,), 8e-4, "linear", 0.1, 0.0),
    "ViT-B/32": ((7,), 8e-4, "linear", 0.1, 0.0),
    "ViT-L/32": ((7,), 6e-4, "linear", 0.1, 0.0),
    "ViT-L/16": ((7, 14), 4e-4, "linear", 0.1, 0.0),
    "ViT-H/14": ((14,), 3e-4, "linear", 0.1, 0.0),
    "BiT-R50x1": ((7,), 1e-3, "linear", 0.1, 0.0),
    "BiT-R101x1": ((7,), 8e-4, "linear", 0.1, 0.0),
    "BiT-R152x1": ((7,), 6e-4, "linear", 0.1, 0.0),
    "BiT-R50x2": ((7,), 1e-3, "linear", 0.1, 0.0),
    "BiT-R152x2": ((7,), 6e-4, "linear", 0.1, 0.0),
    "R50+ViT-B/32": ((7,), 8e-4, "linear", 0.1, 0.0),
    "R50+ViT-B/16": ((7,), 8e-4, "linear", 0.1, 0.0),
    "R50+ViT-L/32": ((7,), 2e-4, "linear", 0.1, 0.0),
    "R50+ViT-L/16": ((7, 14), 4e-4, "linear", 0.1, 0.0),
}
IMAGENET21K = {
    "ViT-B/16": ((90,), 1e-3, "linear", 0.03, 0.1),
    "ViT-B/32": ((90,), 1e-3, "linear", 0.03, 0.1),
    "ViT-L/16": ((90, 30), 1e-3, "linear", 0.03, 0.1),
    "ViT-L/32": ((90, 30), 1e-3, "linear", 0.03, 0.1),
}
ANY_VIT_ON_IMAGENET = ((300,), 3e-3, "cosine", 0.3, 0.1)  # and clipping at norm 1


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 2:
        raise InputError(
            f"got {arg!r}, needs MODEL,DATA, e.g. configs/pretrain.py:ViT-B/16,imagenet2012; "
            f"optional words: {', '.join(WORDS)}"
        )
    model, data = words
    data, _, tfds_name = data.partition("=")
    if (data == "jft") != bool(tfds_name) or data not in SPLITS:
        raise InputError(f"data {words[1]!r}: needs imagenet2012, imagenet21k or jft=<TFDS name>")
    epochs, peak_lr, decay, weight_decay, dropout = find_row(model, data)

    c = base_config()
    duration = f"{choose_epochs(epochs, chosen)} epochs"
    set_length(c, 4096, duration, "10000 steps", save="1000 steps", log="50 steps")
    c.model.name, c.model.dtype = model, "bfloat16"
    if "hidden_head" in fields_of(model):
        c.model.hidden_head, c.model.dropout = True, dropout
    c.data.name, c.data.image_size, c.data.ops = tfds_name or data, 224, "inception_crop|flip"
    c.data.split, val_split = SPLITS[data]
    c.evals.val = classification(split=val_split, every="1 epochs", ops=EVAL_OPS)
    if "fewshot" in chosen:
        c.evals.fewshot = fewshot(
            data_name=None if data == "imagenet2012" else "imagenet2012",
            train_split="train", test_split="validation", every="5000 steps",
            ops=EVAL_OPS, shots=(5,),
        )  # fmt: skip
    if data == "imagenet2012":
        c.optimizer.grad_clip_norm = 1.0
    else:
        c.loss.name, c.model.head_bias = "sigmoid", -10.0
    c.optimizer.peak_lr, c.optimizer.weight_decay, c.schedule.name = peak_lr, weight_decay, decay

    if "debug" in chosen:
        debug_on_synthetic(c)
        if "fewshot" in chosen:
            c.evals.fewshot.data_name, c.evals.fewshot.test_split = None, "val"
            c.evals.fewshot.ops, c.evals.fewshot.every = "", "10 steps"
    return c


def find_row(model, data):
    """The row of table 3; raises InputError, with the rows that there are, if there is none."""
    find_family(model).parse(model)
    if data == "imagenet2012" and model.startswith("ViT-"):
        return ANY_VIT_ON_IMAGENET
    rows = {"imagenet21k": IMAGENET21K, "jft": JFT}
    if model not in rows.get(data, {}):
        have = "; ".join(f"{name}: {', '.join(models)}" for name, models in rows.items())
        raise InputError(
            f"table 3 of the paper has no row for {model} on {data}; it has {have}; "
            "imagenet2012: any ViT"
        )
    return rows[data][model]


def choose_epochs(epochs, chosen):
    """The number of epochs that a word sets, else the row's default."""
    wanted = sorted(int(word.removesuffix("ep")) for word in chosen if word.endswith("ep"))
    if len(wanted) > 1 or (wanted and wanted[0] not in epochs):
        has = " or ".join(map(str, epochs))
        raise InputError(f"{' and '.join(map(str, wanted))} epochs: the paper's row has {has}")
    return wanted[0] if wanted else epochs[0]
