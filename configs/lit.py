"""LiT (arXiv:2111.07991): a text tower learns to match a frozen image tower: --config=lit

python -m vit_jax.main --config=configs/lit.py --config.init_from=SOURCE \\
  --config.data.data_dir=TARS --workdir=$W
Your own pictures, from a list with the columns file and caption, for any SOURCE:
  --config=configs/lit.py:folder --config.init_from=SOURCE --config.data.data_dir=LIST.csv
A minute on a CPU, on made-up images: --config=configs/lit.py:debug

SOURCE is a ViT of any format, or a run; it gives the sizes of the image tower, the size of the
images and their values. No gradients of the image tower are computed. TARS is a folder of tar files
with images and captions, NAME.jpg and NAME.txt. The text tower has the width, depth and heads of
the image tower; objective.text_width, .text_depth, .text_heads and .text_mlp_dim change them. Of a
SOURCE with two towers of these sizes, the text tower is taken too.

From the published config (big_vision, lit_coco.py): the softmax, batches of 4,096, Adafactor at
1e-3 with weight decay 0.01, warm-up for 3 % of the steps, a cosine, clipping at norm 1, texts of 16
tokens. We chose texts of 32 tokens, 5,000 steps, the whole image, no augmentation, and bfloat16.
These flags train adapters of both towers instead: --config.model.lora_rank=8
--config.objective.text_lora_rank=8 --config.optimizer.freeze="(?!objective/|.*/lora_).*"
That config states 72.1 % zero-shot on ImageNet for B/16 with BERT base, trained on other data.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, retrieval, split_words, zeroshot
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    debug_on_captions,
    set_length,
    use_adamw,
    use_captions,
)

WORDS = {
    "folder": "your own pictures and a list of their captions, a text tower of 4 layers",
    "debug": "20 steps of tiny towers on made-up images, with folder on your own",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if words:
        raise InputError(f"got {arg!r}, needs folder, debug or nothing")
    c = base_config()
    use_captions(c, None, "softmax", text_length=32)
    c.init_from, c.init_fields, c.data.image_size = "", "source", None  # init_from is required
    c.model.dtype, c.optimizer.freeze = "bfloat16", "(?!objective/).*"
    use_adamw(c, 1e-3, 0.01)
    if "folder" in chosen:
        c.model.dtype, c.objective.duplicates = "float32", "ignored"
        c.objective.update(text_width=128, text_depth=4, text_heads=4, text_mlp_dim=512)
        c.data.name, c.data.ops = "list", "scaled_decode|resize"
        set_length(c, 64, "2000 steps", "10 %", save="250 steps", log="2 %")
        c.evals.retrieval = retrieval(split="val?", every="25 %", ops="scaled_decode|resize")
    else:
        set_length(c, 4096, "5000 steps", "3 %", save="1000 steps", log="50 steps")
        c.optimizer.name = "adafactor"
        c.evals.zeroshot = zeroshot(
            data_name="imagenet2012", split="validation?", every="500 steps", ops=EVAL_OPS
        )
    if "debug" in chosen:
        c.model.name, c.init_from, c.init_fields = "ViT-B/16", "scratch", "config"
        debug_on_captions(c, own="folder" in chosen)
    return c
