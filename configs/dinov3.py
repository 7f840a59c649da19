"""DINOv3 (arXiv:2508.10104), ViT-L/16 on ImageNet-1k: DINOv2 with rotary positions; Gram anchors.

python -m vit_jax.main --config=configs/dinov3.py --config.data.data_dir=DIR --workdir=$W/first
python -m vit_jax.main --config=configs/dinov3.py:gram --config.data.data_dir=DIR \\
  --config.init_from=$W/first --workdir=$W/gram
A few seconds, on handwritten digits: --config=configs/dinov3.py:debug

DIR holds imagenet2012/VERSION as TFDS prepares it. The first stage is the published code's
vitl_im1k_lin834.yaml: the recipe of the config dinov2 with its words own_head and sinkhorn, and
rotary positions of base 100 in place of learned ones. Its rate is 1e-3, which the
code's rule sqrt_wrt_1024 multiplies by 4 x sqrt(batch / 1,024): DINOv2's rate.

gram, of --config.init_from: the stage after it, published for the model of 7 billion parameters
(dinov3_vit7b16_gram_anchor.yaml). The similarities of the student's patches in an image stay those
of an older teacher, with weight 2. That teacher sees crops of 512 px without changes of colours,
and is replaced by the current one every 10,000 steps, 3 times. Constant: rate 3e-5 by the same
rule, weight decay 0.04, the teacher's momentum 0.999.

Our choices: as in the config dinov2. In the Gram stage: 40,000 steps; the heads begin anew, as
after every init_from, so that their prototypes are frozen for 1,250 steps and the temperature rises
from 0.04 to 0.07 over 12,500; the layer decay, clipping, stochastic depth and crops of 224 and 96
px of the first stage; local views keep their weight; patches of the older teacher are resampled
with a = -1/2 instead of -3/4; the student's crops are cut from the image, not from crops of 512 px.

Published, ImageNet-1k top-1 with frozen features, without the Gram stage: 82.2 % by nearest
neighbours, 83.3 % by a linear classifier.
"""

import pathlib

from vit_jax.config import refuse_words, split_words
from vit_jax.config.text import import_config
from vit_jax.run.setup.recipes import set_length

DINOV2 = import_config(pathlib.Path(__file__).with_name("dinov2.py"))
WORDS = {
    "gram": "the stage with Gram anchors, from --config.init_from",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    unknown, chosen = split_words(arg, WORDS)
    refuse_words(unknown, WORDS, __file__)
    c = DINOV2.get_config("own_head,sinkhorn")
    c.model.pos_embed, c.model.rotary = "none", "normalised"
    c.model.rotary_base, c.model.rotary_dtype = 100.0, "bfloat16"
    c.objective.num_prototypes = 65_536
    c.optimizer.weight_decay_on = ".*/kernel|class_token|objective/mask_token"
    if "gram" in chosen:
        c.init_from = ""  # required
        set_length(c, 2048, "40000 steps", "12500 steps", save="1250 steps", log="50 steps")
        o = c.objective
        o.gram_weight, o.gram_every, o.gram_size = 2.0, "10000 steps", 512
        o.temperature_warmup = "12500 steps"
        c.optimizer.peak_lr, c.schedule.name = 3e-5 * 4 * (2048 / 1024) ** 0.5, "constant"
        c.optimizer.weight_decay, c.optimizer.weight_decay_end = 0.04, None
        c.optimizer.ema_decay, c.optimizer.ema_decay_end = 0.999, 0.999
        c.schedule.end_share = None
    if "debug" in chosen:
        DINOV2.make_tiny(c)
        if "gram" in chosen:
            c.init_from = "scratch"
            c.objective.gram_size, c.objective.gram_every = 16, "5 steps"
            crop = "inception_crop(area_min=0.3)"
            c.data.global_ops = f"{crop}; {crop}|greyscale(0.2)|solarize(0.2)"
    return c
