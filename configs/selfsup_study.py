"""Does pretraining without labels help? Methods on CIFAR-10, then 1 % and 10 % of the labels.

python -m vit_jax.main study --config=configs/selfsup_study.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/selfsup_study.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Masked patches, masked autoencoders, DINO and LeJEPA
train one small ViT on all 50,000 images without labels, three seeds each. Its frozen features are
then judged by 20 nearest neighbours, a linear probe and their effective rank, and the whole model
is fine-tuned on 500 and on 5,000 labelled images. The row "from scratch" has as many steps of the
same fine-tuning from random weights. Runs that have ended are not repeated. It takes
67 CPU minutes, and at most 6 for one run. Results: docs/explanation/results.md.
"""

from vit_jax.config import classification, knn, linear_probe, rank
from vit_jax.run.setup.recipes import (
    begin,
    debug_on_digits,
    set_length,
    use_adamw,
    use_cifar10,
    use_vit,
)

WORDS = {"debug": "a few steps of tiny models, one seed"}

CROP = "inception_crop(area_min=0.3)|flip"
COLOURS = "color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"
VIEWS = f"data.ops=; data.num_global=2; data.global_ops={CROP}|{COLOURS}"
METHODS = {  # name: steps, about 3 CPU minutes; the keys of its objective and others that it sets
    "masked_patches": (550, f"objective.name=masked_patches; data.ops={CROP}"),
    "mae": (
        1100,
        "objective.name=mae; objective.decoder_width=64; objective.decoder_depth=1; "
        f"objective.decoder_heads=2; data.ops={CROP}",
    ),
    "dino": (
        220,
        "objective.name=self_distillation; objective.num_prototypes=1024; "
        "objective.head_width=256; objective.bottleneck=64; optimizer.ema_decay=0.99; "
        f"optimizer.ema_decay_end=1.0; {VIEWS}",
    ),
    "lejepa": (
        280,
        "objective.name=lejepa; objective.directions=256; objective.head_width=256; "
        f"objective.embedding_width=32; {VIEWS}",
    ),
}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3, pool="gap", pos_embed="sincos_2d")
    use_cifar10(c, "decode|pad_crop(4)|flip")
    set_length(c, 64, "250 steps", "25 steps", save="10000 steps", log="20 steps")
    use_adamw(c)
    how = {"every": "10000 steps", "ops": "decode", "batch_size": 500}
    splits = {"train_split": "train[:10%]", "test_split": "test[:20%]"}
    c.evals.test = classification(split="test[:20%]", **how)
    c.evals.near = knn(**splits, **how, num_neighbours=(20,))
    c.evals.probe = linear_probe(**splits, **how, l2=(0.01,))
    c.evals.rank = rank(split="train[:2000]", **how)
    c.study.name, c.study.metric = "pretraining", "test/top1"
    c.study.stages = tuple(
        f"{name}: global_batch_size=128; optimizer.peak_lr=0.001; {of_steps(steps)}; {keys}"
        for name, (steps, keys) in METHODS.items()
    )
    c.study.finetunings = ("1_percent: data.split=train[:1%]", "10_percent: data.split=train[:10%]")
    if "debug" in chosen:  # MAE only
        debug_on_digits(c, ops="pad_crop(1)", eval_every="10 steps", eval_batch_size=360)
        c.duration, c.evals.rank.split, c.checkpoint.every = "10 steps", "test", "10000 steps"
        c.log.every, c.study.seeds = "20 steps", 1
        c.study.stages = (
            "mae: objective.name=mae; objective.decoder_width=16; objective.decoder_depth=1; "
            "objective.decoder_heads=2; data.ops=pad_crop(1); global_batch_size=32; "
            + of_steps(10),
        )
        c.study.finetunings = ("few: data.split=train",)
    return c


def of_steps(number):
    return f"duration={number} steps; schedule.warmup={number // 10} steps"
