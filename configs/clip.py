"""Contrastive pretraining with a softmax over texts and over images (arXiv:2103.00020).

python -m vit_jax.main --config=configs/clip.py --config.data.data_dir=TARS --workdir=$W
A minute on a CPU, on made-up images: --config=configs/clip.py:debug

Also --config=clip:MODEL, with ViT-B/16 instead of ViT-B/32, or ViT-L/14. TARS is a folder of tar
files with images and captions, NAME.jpg and NAME.txt. Without --config.data.tokenizer the run
trains one on them; with hf:openai/clip-vit-base-patch32 it has CLIP's.

From the paper (section 2 and tables 18 to 20): batches of 32,768, 32 epochs of 400 million pairs,
224 px, a random square of the resized image, a class token, a norm of the embedded patches, texts
of 77 tokens with a causal mask, a common width of 512 (L: 768), a scale that starts at 1 / 0.07 and
ends at 100, Adam with b2 0.98, eps 1e-6 and weight decay 0.2, 5e-4 (L: 4e-4), 2,000 steps of
warm-up, a cosine; open_clip's get_default_params has the same b2 and eps. From its published code
and weights: the activation x sigmoid(1.702 x), norms with eps 1e-5, no bias of the embedding of
patches. Our choice: bfloat16.

Zero-shot on ImageNet: --config.evals.zeroshot.data_dir=DIR, with DIR/imagenet2012. Top-1 of the
published weights, which learned from other data, as open_clip measures it (its
docs/openclip_results.csv): B/32 63.3 %, B/16 68.3 %, L/14 75.5 %; the paper has 63.2 and 68.6 %.
"""

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import base_config, split_words, zeroshot
from vit_jax.run.setup.recipes import EVAL_OPS, debug_on_captions, set_length, use_captions

WORDS = {"debug": "20 steps of tiny towers on made-up images"}
# Width and heads of the text tower, common width, learning rate.
MODELS = {
    "ViT-B/32": (512, 8, 512, 5e-4),
    "ViT-B/16": (512, 8, 512, 5e-4),
    "ViT-L/14": (768, 12, 768, 4e-4),
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    words = words or ["ViT-B/32"]
    if len(words) != 1 or words[0] not in MODELS:
        raise InputError(f"got {arg!r}: {nearest(words[0], [*MODELS, *WORDS])}")
    width, heads, common_width, peak_lr = MODELS[words[0]]
    c = base_config()
    use_captions(c, words[0], "softmax", text_length=77)
    c.data.ops = "decode|resize_small(antialias=True)|random_crop"
    c.data.mean = (0.48145466, 0.4578275, 0.40821073)
    c.data.std = (0.26862954, 0.26130258, 0.27577711)
    c.model.update(pool="token", pre_norm=True, patch_bias=False, norm_pooled=True)
    c.model.update(gelu="quick", norm_eps=1e-5, dtype="bfloat16")
    c.objective.update(text_width=width, text_depth=12, text_heads=heads, text_mlp_dim=4 * width)
    c.objective.update(causal=True, common_width=common_width)
    set_length(c, 32_768, "12.8e9 examples", "2000 steps", save="1000 steps", log="50 steps")
    c.optimizer.update(peak_lr=peak_lr, b2=0.98, eps=1e-6, weight_decay=0.2)
    c.schedule.name = "cosine"
    c.evals.zeroshot = zeroshot(
        data_name="imagenet2012", split="validation?", every="10000 steps", ops=EVAL_OPS
    )
    if "debug" in chosen:
        debug_on_captions(c)
    return c
