"""Adam against SGD for pretraining ResNets, as in appendix D.1 (arXiv:2010.11929), on CIFAR-10.

python -m vit_jax.main study --config=configs/adam_or_sgd.py --workdir=$W --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/adam_or_sgd.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Two BiT ResNets pretrain on five classes with each
optimizer. For each, the learning rate is chosen on held-out pictures; the chosen model is
fine-tuned with SGD on 250 pictures of the other five classes, as the paper's table 7 does on other
data sets.
"""

from vit_jax.config import base_config, classification, refuse_words, split_words

WORDS = {"debug": "a few steps of a tiny model, one seed"}

OPTIMIZERS = {
    "Adam": "optimizer.name=adamw; optimizer.weight_decay=0.1",
    # The paper's momentum, and its weight decay for SGD as L2 regularisation.
    "SGD": "optimizer.name=sgd; optimizer.momentum=0.9; optimizer.l2=0.0001",
}
# The rates of both optimizers lie far apart; what is much too high diverges or is not chosen.
PEAK_LRS = (0.001, 0.003, 0.03, 0.1)
MODELS = {"one stage": "(1,)", "two stages": "(1,1)"}
FINETUNE = (
    "data.classes=5,6,7,8,9; data.split=train[2500:2961]; duration=100 steps; "
    "schedule.warmup=10 steps; optimizer.name=sgd; optimizer.peak_lr=0.003; "
    "optimizer.weight_decay=0.0; optimizer.l2=0.0"
)


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    refuse_words(words, WORDS, __file__)
    c = base_config()
    c.global_batch_size, c.duration, c.schedule.warmup = 50, "400 steps", "40 steps"
    c.model.name, c.model.stem_width, c.model.stages = "BiT-R50x1", 32, (1,)
    c.data.name, c.data.image_size, c.data.classes = "cifar10", 32, (0, 1, 2, 3, 4)
    c.data.split, c.data.ops = "train[:90%]", "decode|pad_crop(2)|flip"
    c.evals.dev = classification(split="train[90%:]", every="400 steps", ops="decode")
    c.evals.test = classification(split="test", every="400 steps", ops="decode")
    c.optimizer.peak_lr, c.optimizer.grad_clip_norm = 0.001, 1.0  # the study replaces the rate
    c.schedule.name = "cosine"
    c.checkpoint.every, c.log.every = "400 steps", "50 steps"

    c.study.name, c.study.metric, c.study.choose_by = "grid", "dev/top1", "dev/top1"
    c.study.finetune, c.study.finetune_metric = FINETUNE, "test/top1"
    rates, models = PEAK_LRS, MODELS
    if "debug" in chosen:
        rates, models = PEAK_LRS[1:3], {"one stage": "(1,)"}
        c.data.name, c.data.image_size, c.data.split, c.data.ops = "digits", 8, "train", ""
        c.evals.dev = classification(split="test", every="20 steps")
        c.evals.test = classification(split="test", every="20 steps")
        c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "2 steps"
        c.checkpoint.every, c.log.every, c.study.seeds = "20 steps", "10 steps", 1
        c.study.finetune = "data.classes=5,6,7,8,9; duration=10 steps"
    c.study.candidates = tuple(f"lr_{lr}: optimizer.peak_lr={lr}" for lr in rates)
    c.study.cells = tuple(
        f"BiT, {size} | {optimizer}: model.stages={stages}; {fields}"
        for size, stages in models.items()
        for optimizer, fields in OPTIMIZERS.items()
    )
    return c
