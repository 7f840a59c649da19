"""Contrastive pretraining by the sigmoid of all pairs (arXiv:2303.15343): --config=siglip:MODEL

python -m vit_jax.main --config=configs/siglip.py:ViT-B/16 --config.data.data_dir=TARS \\
  --workdir=$W
A minute on a CPU, on made-up images: --config=configs/siglip.py:debug
With the word naflex pictures keep their shape, as in SigLIP 2: --config=siglip:ViT-B/16,naflex

MODEL is ViT-B/16, ViT-L/16 or another ViT; its text tower has the same width, depth and heads. TARS
is a folder of tar files with images and captions, NAME.jpg and NAME.txt. Without
--config.data.tokenizer the run trains one on them.

From the paper: batches of 32,768; b2 0.95, as a public replication quotes it. From its released
models (SigLIP_demo.ipynb of big_vision): 224 px, attention pooling, no projection of images, texts
of 64 tokens by SentencePiece with 32,000 ids, a scale that starts at 10, a bias that starts at -10.
From SigLIP 2 (arXiv:2502.14786), which states more: Adam at 1e-3 with weight decay 1e-4, clipping
at norm 1, 20,000 steps of warm-up, a cosine, 40 billion pairs. Our choices: the whole image,
resized, without other augmentation; decay of kernels only; bfloat16.

Zero-shot on ImageNet: --config.evals.zeroshot.data_dir=DIR, with DIR/imagenet2012. SigLIP 2's
README states 78.2 % top-1 for B/16 at 224 px, with other losses too and other data. A plan needs no
data: --config.data.num_classes=1 --config.data.num_examples=1000000000
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, split_words, zeroshot
from vit_jax.models import token_stride
from vit_jax.run.setup.recipes import EVAL_OPS, debug_on_captions, set_length, use_captions

WORDS = {
    "naflex": "pictures keep their shape, with at most 256 patches, and positions for 16 x 16",
    "debug": "20 steps of tiny towers on made-up images",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if "debug" in chosen and not words:
        words = ["ViT-B/16"]
    if len(words) != 1:
        raise InputError(
            f"got {arg!r}, needs a ViT, such as ViT-B/16, and perhaps naflex and debug"
        )
    c = base_config()
    use_captions(c, words[0], "sigmoid", text_length=64)
    c.model.update(pool="map", gelu="tanh", dtype="bfloat16")
    set_length(c, 32_768, "40e9 examples", "20000 steps", save="1000 steps", log="50 steps")
    c.optimizer.peak_lr, c.optimizer.b2, c.optimizer.weight_decay = 1e-3, 0.95, 1e-4
    c.optimizer.grad_clip_norm, c.schedule.name = 1.0, "cosine"
    c.evals.zeroshot = zeroshot(
        data_name="imagenet2012", split="validation?", every="20000 steps", ops=EVAL_OPS
    )
    if "naflex" in chosen:
        c.data.max_tokens = 256
        c.data.image_size = tuple(16 * side for side in token_stride(words[0]))
        c.data.ops = c.evals.zeroshot.ops = "decode"
    if "debug" in chosen:
        debug_on_captions(c)
        c.data.max_tokens = c.data.max_tokens and 8
    return c
