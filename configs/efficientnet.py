"""EfficientNet on ImageNet-1k from scratch (arXiv:1905.11946): --config=efficientnet:MODEL

MODEL is EfficientNet-B0 to -B8 or -L2. It decides the image size and the dropout, 0.2 to 0.5.

From the paper, section 5.2: RMSProp with decay 0.9 and momentum 0.9, weight decay 1e-5, learning
rate 0.256 that falls by 3 % every 2.4 epochs, batch-norm momentum 0.99, AutoAugment, stochastic
depth with survival probability 0.8. From its release, github.com/tensorflow/tpu,
models/official/efficientnet: 350 epochs, 0.256 as 0.016 for 256 images and so for a batch of 4,096,
5 epochs of warm-up, epsilon 1e-3 inside the root, weight decay as L2 regularisation of all
parameters except the norms', label smoothing 0.1, running averages with 0.9999, crops of 8 %
to 100 % of the area, the policy of AutoAugment, evaluation by a central crop that leaves out 32
pixels. The paper does not train L2 in this way; its size and B8's are here to be run.

Our choices: the learning rate multiplies the momentum's result instead of entering it, and its
staircase counts from the end of the warm-up, not from the start of the run; statistics cover
the whole batch, not groups of chips; random crops are resized bilinearly, not bicubically.

python -m vit_jax.main --config=configs/efficientnet.py:EfficientNet-B0 --workdir=$W
Published: B7 84.3 % top-1 (arXiv:1905.11946, table 2).
CPU, two minutes, synthetic data: --config=configs/efficientnet.py:EfficientNet-B0,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.models.efficientnet import find_variant
from vit_jax.run.setup.recipes import debug_on_synthetic, set_length, use_imagenet

WORDS = {"debug": "20 steps of a tiny model"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 1:
        raise InputError(
            f"got {arg!r}, needs MODEL, e.g. configs/efficientnet.py:EfficientNet-B0; optional "
            f"words: {', '.join(WORDS)}"
        )
    (model,) = words
    variant = find_variant(model)

    c = base_config()
    set_length(c, 4096, "350 epochs", "5 epochs", save="1000 steps", log="50 steps")
    c.model.name, c.model.dtype = model, "bfloat16"
    c.model.dropout, c.model.stochastic_depth = variant.dropout, 0.2

    size = variant.image_size
    use_imagenet(c, size)
    c.data.ops = "inception_crop(area_min=0.08)|autoaugment|flip"
    resize = f"torchvision_resize(filter='bicubic', cover=True, crop={size / (size + 32):.4f})"
    eval_ops = f"decode|{resize}|torchvision_crop"
    c.evals.val = classification(split="validation", every="1 epochs", ops=eval_ops)

    c.loss.label_smoothing = 0.1
    c.optimizer.name, c.optimizer.peak_lr = "rmsprop", 0.256
    c.optimizer.b2, c.optimizer.momentum, c.optimizer.eps = 0.9, 0.9, 1e-3
    c.optimizer.l2, c.optimizer.weight_decay_on = 1e-5, "(?!.*/norm_).*"
    c.optimizer.ema_decay = 0.9999
    c.schedule.name, c.schedule.timescale = "exponential", "2.4 epochs"

    if "debug" in chosen:
        debug_on_synthetic(c)
        c.optimizer.peak_lr = 0.01
    return c
