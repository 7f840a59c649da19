"""DeiT III (arXiv:2204.07118) and ViT-5 (arXiv:2602.08071) on ImageNet-1k: --config=deit3:MODEL

MODEL is ViT-S/16, ViT-B/16 or ViT-L/16, with layer scale 1e-4 and positions of the patches only.
Words: vit5, for its blocks: RMS norms, also of queries and keys, no biases of q, k and v, rotary
positions beside the learned ones, 4 registers; finetune, the second stage; debug.

From the papers and the commands of their codes: LAMB at 3e-3 (S 4e-3) to 1e-5 by a cosine, batch
2048, weight decay 0.05, 800 epochs (ViT-5 L 400) with 5 of warm-up, binary cross-entropy in which
both classes of a mixed image count whole, MixUp 0.8 or CutMix 1.0, 3-Augment and colour jitter 0.3,
3 views of an image in a batch, 192 px (S 224), stochastic depth S 0.05, B 0.2, L 0.45 (ViT-5 L
0.35), the same in all layers. finetune, of --config.init_from with its head: 20 epochs at 224 px
with 5 of warm-up, AdamW at 1e-5, batch 512, weight decay 0.1, label smoothing 0.1, RandAugment
9 / 0.5, one view of an image. DeiT III fine-tunes S at 384 px only.

Our choices: batches of 2112 in the first stage, because a batch holds pairs of images with 3 views
each; MixUp and CutMix draw for each pair of images; warm-up begins at 0 instead of 1e-6; images are
resized bilinearly, not bicubically; LAMB does not scale the update of the head, which begins at 0;
no running average; bfloat16. The loss is a sum over the classes, where theirs is a mean: LAMB's
clipping at norm 1 and eps 1e-8 are 1000 times as large here, and act alike.

python -m vit_jax.main --config=configs/deit3.py:ViT-B/16 --workdir=$W/192
python -m vit_jax.main --config=configs/deit3.py:ViT-B/16,finetune --config.init_from=$W/192 \\
  --workdir=$W/224
Published, top-1 at 224 px: DeiT III S 81.4 %, B 83.8 %, L 84.9 %; ViT-5 S 82.2 %, B 84.2 %,
L 84.9 %.
CPU, under a minute: --config=configs/deit3.py:ViT-B/16,vit5,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import debug_on_synthetic, set_length, use_imagenet

WORDS = {
    "vit5": "the blocks and the numbers of ViT-5",
    "finetune": "20 epochs at 224 px, from --config.init_from",
    "debug": "20 steps of a tiny model",
}
# Image size, learning rate; stochastic depth and epochs of DeiT III; of ViT-5.
MODELS = {
    "ViT-S/16": (224, 4e-3, (0.05, 800), (0.05, 800)),
    "ViT-B/16": (192, 3e-3, (0.2, 800), (0.2, 800)),
    "ViT-L/16": (192, 3e-3, (0.45, 800), (0.35, 400)),
}
VIT5 = {
    "norm": "rms", "qk_norm": True, "qkv_bias": False, "registers": 4, "rotary": "indices",
    "rotary_base": 1e4, "rotary_registers": 100.0,
}  # fmt: skip
MIXING, EVAL_OPS = "mixup_or_cutmix(0.8, 1.0)", "decode|resize_small|central_crop"
DEVICE_OPS = f"flip|three_augment|color_jitter(1.0, 0.3, 0.3, 0.3, 0.0)|{MIXING}"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 1 or words[0] not in MODELS:
        raise InputError(
            f"got {arg!r}, needs one of {', '.join(MODELS)}; optional words: {', '.join(WORDS)}"
        )
    image_size, peak_lr, *of_both = MODELS[words[0]]
    stochastic_depth, epochs = of_both["vit5" in chosen]
    c = base_config()
    c.model.name, c.model.dtype, c.model.gelu = words[0], "bfloat16", "exact"
    c.model.layer_scale, c.model.pos_embed_class_token = 1e-4, False
    c.model.stochastic_depth, c.model.uniform_depth = stochastic_depth, True
    if "vit5" in chosen:
        c.model.update(VIT5)
    device_ops = f"flip|{MIXING}" if "finetune" in chosen else DEVICE_OPS
    if "finetune" in chosen:
        c.init_from, c.init_head = "", "kept"  # init_from is required
        use_imagenet(c)
        c.data.ops = f"inception_crop(area_min=0.08)|randaugment(2, 9, 0.5)|{device_ops}"
        set_length(c, 512, "20 epochs", "5 epochs", save="1000 steps", log="50 steps")
        c.optimizer.peak_lr, c.optimizer.weight_decay, c.schedule.name = 1e-5, 0.1, "constant"
        c.loss.label_smoothing = 0.1
    else:
        use_imagenet(c, image_size)
        c.data.ops, c.data.repeats = f"inception_crop(area_min=0.08)|{device_ops}", 3
        set_length(c, 2112, f"{epochs} epochs", "5 epochs", save="1000 steps", log="50 steps")
        c.optimizer.name, c.optimizer.peak_lr, c.optimizer.weight_decay = "lamb", peak_lr, 0.05
        c.optimizer.grad_clip_norm, c.optimizer.eps = 1000.0, 1e-5  # see the docstring
        c.schedule.name, c.schedule.end_share = "cosine", 1e-5 / peak_lr
        c.loss.name, c.loss.whole_targets = "sigmoid", True
    c.evals.val = classification(split="validation", every="5 epochs", ops=EVAL_OPS)
    if "debug" in chosen:
        c.init_from, c.init_head = "scratch", "new"
        debug_on_synthetic(c, device_ops)
        c.global_batch_size, c.evals.val.batch_size = 24, 32
    return c
