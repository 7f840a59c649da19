"""Pretraining with AugReg (arXiv:2106.10270): --config=augreg:MODEL,DATA,AUG

DATA is imagenet2012 or imagenet21k (docs/how_to/data.md shows how to prepare it). AUG is one of
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

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.models import fields_of, find_family
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    SPLITS,
    augreg_ops,
    debug_on_synthetic,
    set_length,
    use_adamw,
)

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

    c = base_config()
    duration = "30 epochs" if "30ep" in chosen else "300 epochs"
    set_length(c, 4096, duration, "10000 steps", save="1000 steps", log="50 steps")
    c.model.name, c.model.dtype = model, "bfloat16"
    if "reg" in chosen:
        c.model.dropout = c.model.stochastic_depth = 0.1
    c.data.name, c.data.image_size = data, 224
    c.data.split, val_split = SPLITS[data]
    c.data.ops = augreg_ops(augmentation, "inception_crop")
    c.evals.val = classification(split=val_split, every="1 epochs", ops=EVAL_OPS)
    if data == "imagenet21k":
        c.loss.name, c.model.head_bias = "sigmoid", -10.0
    use_adamw(c, 1e-3, 0.03 if "wd0.03" in chosen else 0.1)

    if "debug" in chosen:
        debug_on_synthetic(c, augreg_ops(augmentation, ""))
    return c
