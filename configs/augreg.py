"""Pretraining with AugReg (arXiv:2106.10270): --config=augreg:MODEL,DATA,AUG

DATA is imagenet2012 or imagenet21k (docs/how_to/datasets.md shows how to prepare it). AUG is one of
none, light1, light2, medium1, medium2, strong1, strong2. Optional words: wd0.03, reg, 30ep.

From the paper: the rows of AUG, Inception crops and flips, Adam with b2 0.999, batch 4096, learning
rate 1e-3 with 10,000 steps of warm-up and a cosine decay, clipping at norm 1, weight decay 0.1 or
0.03, dropout and stochastic depth both 0 or both 0.1, 300 epochs of ImageNet-1k, 300 or 30 of
ImageNet-21k, no hidden layer in the head.

Our choices: weight decay 0.1 and no dropout unless a word sets them; decay of kernels only and the
losses of table 3 of arXiv:2010.11929 (softmax for ImageNet-1k, sigmoid for ImageNet-21k); 50,000
images of ImageNet-21k held out; all of ImageNet-1k's train split, while big_vision's
configs/vit_i1k.py leaves out the last 1 %; RandAugment's contrast as defined (see
configs/vit_s16_in1k.py); computation in bfloat16.

python -m vit_jax.main --config=configs/augreg.py:ViT-B/16,imagenet21k,medium1 --workdir=$W
CPU, under a minute, synthetic data: --config=configs/augreg.py:ViT-B/16,imagenet21k,medium1,debug
"""

from vit_jax.config import base_config, classification, split_words
from vit_jax.errors import InputError
from vit_jax.models import fields_of, find_family
from vit_jax.recipes import SPLITS, find_augreg, make_tiny

WORDS = {
    "debug": "20 steps of a tiny model",
    "wd0.03": "weight decay 0.03 instead of 0.1",
    "reg": "dropout 0.1 and stochastic depth 0.1",
    "30ep": "30 epochs; for imagenet21k",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 3:
        raise InputError(
            f"got {arg!r}, needs MODEL,DATA,AUG, e.g. configs/augreg.py:ViT-B/16,imagenet21k,"
            f"medium1; optional words: {', '.join(WORDS)}"
        )
    model, data, augmentation = words
    find_family(model).parse(model)
    if "num_heads" not in fields_of(model):
        raise InputError(
            f"model {model!r}: AugReg's recipes need a ViT or a hybrid, such as ViT-B/16"
        )
    if data not in ("imagenet2012", "imagenet21k"):
        raise InputError(f"data {data!r}: needs imagenet2012 or imagenet21k")
    if "30ep" in chosen and data != "imagenet21k":
        raise InputError(f"30ep: the paper trains on {data} for 300 epochs; leave it out")
    recipe = find_augreg(augmentation)

    c = base_config()
    c.global_batch_size, c.duration = 4096, "30 epochs" if "30ep" in chosen else "300 epochs"
    c.model.name, c.model.dtype = model, "bfloat16"
    if "reg" in chosen:
        c.model.dropout = c.model.stochastic_depth = 0.1

    train_split, val_split = SPLITS[data]
    c.data.name, c.data.image_size = data, 224
    c.data.split = train_split
    c.data.ops = recipe.ops("inception_crop")
    eval_ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.val = classification(split=val_split, every="1 epochs", ops=eval_ops)

    if data == "imagenet2012":
        c.loss.name = "softmax"
    else:
        c.loss.name, c.model.head_bias = "sigmoid", -10.0

    c.optimizer.peak_lr = 1e-3
    c.optimizer.weight_decay = 0.03 if "wd0.03" in chosen else 0.1
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name, c.schedule.warmup = "cosine", "10000 steps"
    c.checkpoint.every, c.log.every = "1000 steps", "50 steps"

    if "debug" in chosen:
        c.data.name, c.data.split, c.data.ops = "synthetic", "train", recipe.ops("")
        c.data.image_size = make_tiny(c.model, model)
        c.data.num_classes, c.data.num_examples = 10, 256
        c.evals.val.split, c.evals.val.ops, c.evals.val.every = "val", "", "10 steps"
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
        c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    return c
