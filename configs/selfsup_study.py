"""Does pretraining without labels help? Methods on CIFAR-10, then 1 % and 10 % of the labels.

python -m vit_jax.main study --config=configs/selfsup_study.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/selfsup_study.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Masked patches, masked autoencoders, DINO and LeJEPA
train one small ViT on all 50,000 pictures without labels, three seeds each. Its frozen features are
then judged by 20 nearest neighbours, a linear probe and their effective rank, and the whole model
is fine-tuned on 500 and on 5,000 labelled pictures. The row "from scratch" has as many steps of the
same fine-tuning from random weights. Runs that have ended are not repeated. It takes
67 CPU minutes, and at most 6 for one run. Results: docs/explanation/results.md.
"""

from vit_jax.config import (
    base_config,
    classification,
    knn,
    linear_probe,
    rank,
    refuse_words,
    split_words,
)

WORDS = {"debug": "a few steps of tiny models, one seed"}

CROP = "inception_crop(area_min=0.3)|flip"
COLOURS = "color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"
VIEWS = {
    "data.ops": "",
    "data.num_global": "2",
    "data.global_ops": f"{CROP}|{COLOURS}",
}
METHODS = {  # name: the keys of its objective, and the others that it sets
    "masked_patches": {"objective.name": "masked_patches", "data.ops": CROP},
    "mae": {
        "objective.name": "mae",
        "objective.decoder_width": "64",
        "objective.decoder_depth": "1",
        "objective.decoder_heads": "2",
        "data.ops": CROP,
    },
    "dino": {
        "objective.name": "self_distillation",
        "objective.num_prototypes": "1024",
        "objective.head_width": "256",
        "objective.bottleneck": "64",
        "optimizer.ema_decay": "0.99",
        "optimizer.ema_decay_end": "1.0",
        **VIEWS,
    },
    "lejepa": {
        "objective.name": "lejepa",
        "objective.directions": "256",
        "objective.head_width": "256",
        "objective.embedding_width": "32",
        **VIEWS,
    },
}
# About 3 CPU minutes each.
STEPS = {"masked_patches": 550, "mae": 1100, "dino": 220, "lejepa": 280}
FINETUNINGS = {"1_percent": "train[:1%]", "10_percent": "train[:10%]"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.model.name, c.model.pool, c.model.pos_embed = "ViT-Ti/8", "gap", "sincos_2d"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
    c.data.name, c.data.image_size, c.data.ops = "cifar10", 32, "decode|pad_crop(4)|flip"
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "250 steps", "25 steps"
    c.schedule.name = "cosine"
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.checkpoint.every, c.log.every = "10000 steps", "20 steps"
    how = {"every": "10000 steps", "ops": "decode", "batch_size": 500}
    splits = {"train_split": "train[:10%]", "test_split": "test[:20%]"}
    c.evals.test = classification(split="test[:20%]", **how)
    c.evals.near = knn(**splits, **how, num_neighbours=(20,))
    c.evals.probe = linear_probe(**splits, **how, l2=(0.01,))
    c.evals.rank = rank(split="train[:2000]", **how)
    c.study.name, c.study.metric = "pretraining", "test/top1"
    pretraining = {"global_batch_size": "128", "optimizer.peak_lr": "0.001"}
    c.study.stages = entries(
        {name: {**pretraining, **of_steps(STEPS[name]), **keys} for name, keys in METHODS.items()}
    )
    c.study.finetunings = entries(
        {name: {"data.split": split} for name, split in FINETUNINGS.items()}
    )
    if "debug" in chosen:
        make_small(c)
    return c


def of_steps(number):
    return {"duration": f"{number} steps", "schedule.warmup": f"{number // 10} steps"}


def entries(stages):
    """The text of each stage: {name: {key: value}} -> "name: key=value; key=value"."""
    return tuple(
        f"{name}: {'; '.join(f'{key}={value}' for key, value in keys.items())}"
        for name, keys in stages.items()
    )


def make_small(c):
    """A few steps of a tiny model on handwritten digits, MAE only."""
    c.model.name = "ViT-mu/4"
    c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    c.data.name, c.data.image_size, c.data.ops = "digits", 8, "pad_crop(1)"
    c.global_batch_size, c.duration, c.schedule.warmup = 32, "10 steps", "2 steps"
    for name in ("near", "probe"):
        c.evals[name].train_split, c.evals[name].test_split = "train", "test"
    c.evals.test.split = c.evals.rank.split = "test"
    for entry in c.evals.values():
        entry.every, entry.ops, entry.batch_size = "10 steps", "", 360
    c.study.seeds = 1
    tiny = {"global_batch_size": "32", **of_steps(10)}
    mae = {**METHODS["mae"], **tiny, "data.ops": "pad_crop(1)", "objective.decoder_width": "16"}
    c.study.stages = entries({"mae": mae})
    c.study.finetunings = entries({"few": {"data.split": "train"}})
