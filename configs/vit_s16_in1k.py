"""ViT-S/16, ImageNet-1k, 90 epochs. Published: 76.5 % top-1 at 224 px (arXiv:2205.01580).

The recipe is big_vision's configs/vit_s16_i1k.py: mean pooling, fixed sine-cosine positions, a
hidden tanh layer in the head, 99 % of train (the last 1 % is kept for tuning; results are on
validation), Inception crops, flips, RandAugment (2, 10), MixUp 0.2, Adam at 1e-3 with decay 0.1
times the learning rate and clipping at norm 1, 10,000 steps of warm-up, a cosine.

Ours differs from big_vision in five points. RandAugment's contrast blends with the image's mean
grey value, as the operation is defined; big_vision's averages the histogram's counts, which gives
the number of pixels / 256 (196 at 224 px) for every image, and so does the word published_contrast:
--config=configs/vit_s16_in1k.py:published_contrast. Adam's first moment is float32 instead
of bfloat16. MixUp draws a weight for each pair of images instead of one for the batch. Evaluation
resizes bilinearly instead of by area. The model computes in bfloat16.

python -m vit_jax.main --config=configs/vit_s16_in1k.py --workdir=$W
A few seconds, synthetic data: --config=configs/vit_s16_in1k.py:debug
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    augreg_ops,
    begin,
    debug_on_synthetic,
    set_length,
    use_adamw,
)

WORDS = {
    "published_contrast": "RandAugment's contrast as in the published code",
    "debug": "20 steps of a tiny model",
}
AUGMENTATION = "light2"  # AugReg's name of RandAugment (2, 10) and MixUp 0.2


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 1024, "90 epochs", "10000 steps", save="1000 steps", log="50 steps")
    c.model.name, c.model.pool, c.model.pos_embed = "ViT-S/16", "gap", "sincos_2d"
    c.model.hidden_head, c.model.dtype = True, "bfloat16"
    c.data.name, c.data.image_size, c.data.split = "imagenet2012", 224, "train[:99%]"
    c.data.ops = augreg_ops(AUGMENTATION, "inception_crop")
    c.evals.val = classification(split="validation", every="1 epochs", ops=EVAL_OPS)
    use_adamw(c, 1e-3, 0.1)
    if "debug" in chosen:
        debug_on_synthetic(c, augreg_ops(AUGMENTATION, ""))
    if "published_contrast" in chosen:
        c.data.ops = c.data.ops.replace("(2, 10)", "(2, 10, published_contrast=True)")
    return c
