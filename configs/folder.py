"""One's own pictures: a folder with a sub-folder per class, from scratch, minutes on a CPU.

python -m vit_jax.main --config=configs/folder.py --config.data.data_dir=PICTURES --workdir=$W

PICTURES/train/CLASS/*.jpg and PICTURES/val/CLASS/*.jpg; or PICTURES/CLASS/*.jpg, of which a tenth
is held out to validate with. A larger model: --config=configs/folder.py:ViT-S/16
--config.data.image_size=224. A few seconds: --config=configs/folder.py:debug
"""

from vit_jax.config import base_config, classification, refuse_words, split_words
from vit_jax.models.variants import parse_vit_name

WORDS = {
    "MODEL": "a ViT such as ViT-S/16, in place of a small one of 1.2M parameters",
    "debug": "20 steps of a tiny model",
}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words[1:], WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration = 32, "40 epochs"
    c.model.pool, c.model.dropout = "gap", 0.1
    if words:
        parse_vit_name(words[0])
        c.model.name = words[0]
    else:
        c.model.name = "ViT-Ti/8"
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 128, 6, 512, 4

    c.data.name, c.data.image_size = "folder", 64
    c.data.ops = "inception_crop(area_min=0.3)|flip"
    eval_ops = "decode|resize(antialias=True)"
    c.evals.val = classification(split="val", every="2 epochs", ops=eval_ops)

    c.loss.label_smoothing = 0.1
    c.optimizer.peak_lr, c.optimizer.weight_decay = 5e-4, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.schedule.name, c.schedule.warmup = "cosine", "2 epochs"
    c.checkpoint.every, c.log.every = "2 epochs", "10 steps"

    if "debug" in chosen:
        c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 32, 1, 64, 2
        c.duration, c.schedule.warmup = "20 steps", "2 steps"
        c.log.every, c.checkpoint.every, c.evals.val.every = "5 steps", "10 steps", "10 steps"
    return c
