"""Pretraining as in the paper's table 3 (arXiv:2010.11929): --config=pretrain:MODEL,DATA

DATA is imagenet2012, imagenet21k or jft=NAME. JFT-300M is not public, so jft=NAME runs its recipe
on your own large TFDS data set NAME. docs/how_to/datasets.md shows how to prepare sets that the
TFDS catalogue lacks, such as imagenet21k. MODEL is a ViT; with jft also a hybrid or BiT of the
table.

python -m vit_jax.main --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=$W
Published, ViT-B/16 on ImageNet-1k, 300 epochs, from scratch: 77.9 % top-1 at 384 px.
CPU, under a minute, synthetic data: --config=configs/pretrain.py:ViT-L/16,imagenet21k,debug
"""

from vit_jax.config import base_config, classification, fewshot, split_words
from vit_jax.errors import InputError
from vit_jax.models import fields_of
from vit_jax.recipes import SPLITS, find_pretraining, make_tiny

WORDS = {
    "debug": "20 steps of a tiny model",
    "7ep": "7 epochs",
    "14ep": "14 epochs",
    "30ep": "30 epochs",
    "90ep": "90 epochs",
    "fewshot": "5-shot ImageNet during training, as in the paper's figures",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 2:
        raise InputError(
            f"got {arg!r}, needs MODEL,DATA, e.g. configs/pretrain.py:ViT-B/16,imagenet2012; "
            f"optional words: {', '.join(WORDS)}"
        )
    model, data = words
    data, _, tfds_name = data.partition("=")
    if (data == "jft") != bool(tfds_name):
        raise InputError(f"data {words[1]!r}: needs imagenet2012, imagenet21k or jft=<TFDS name>")
    row = find_pretraining(model, data)

    c = base_config()
    c.global_batch_size, c.duration = 4096, f"{choose_epochs(row, chosen)} epochs"
    c.model.name, c.model.dtype = model, "bfloat16"
    if "hidden_head" in fields_of(model):
        c.model.hidden_head, c.model.dropout = True, row.dropout

    train_split, val_split = SPLITS[data]
    c.data.name, c.data.image_size = tfds_name or data, 224
    c.data.split = train_split
    c.data.ops = "inception_crop|flip"
    eval_ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.val = classification(split=val_split, every="1 epochs", ops=eval_ops)

    if "fewshot" in chosen:
        c.evals.fewshot = fewshot(
            data_name=None if data == "imagenet2012" else "imagenet2012",
            train_split="train", test_split="validation", every="5000 steps",
            ops=eval_ops, shots=(5,),
        )  # fmt: skip

    if data == "imagenet2012":
        c.loss.name = "softmax"
    else:
        c.loss.name, c.model.head_bias = "sigmoid", -10.0

    c.optimizer.peak_lr, c.optimizer.weight_decay = row.peak_lr, row.weight_decay
    c.optimizer.grad_clip_norm = row.grad_clip_norm
    c.schedule.name, c.schedule.warmup = row.decay, "10000 steps"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"

    if "debug" in chosen:
        c.data.name, c.data.split, c.data.ops = "synthetic", "train", "flip"
        c.data.image_size = make_tiny(c.model, model)
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.val.split, c.evals.val.ops, c.evals.val.every = "val", "", "10 steps"
        if "fewshot" in chosen:
            c.evals.fewshot.data_name, c.evals.fewshot.test_split = None, "val"
            c.evals.fewshot.ops, c.evals.fewshot.every = "", "10 steps"
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
        c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    return c


def choose_epochs(row, chosen):
    """The number of epochs that a word sets, else the row's default."""
    wanted = [int(word.removesuffix("ep")) for word in chosen if word.endswith("ep")]
    if len(wanted) > 1 or (wanted and wanted[0] not in row.epochs):
        has = " or ".join(map(str, row.epochs))
        raise InputError(f"{' and '.join(map(str, wanted))} epochs: the paper's row has {has}")
    return wanted[0] if wanted else row.epochs[0]
