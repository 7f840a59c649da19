"""Adam against SGD for pretraining ResNets, as in appendix D.1 (arXiv:2010.11929), on CIFAR-10.

python -m vit_jax.main study --config=configs/adam_or_sgd.py --workdir=$W --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/adam_or_sgd.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Two BiT ResNets pretrain on five classes with each
optimizer. For each, the learning rate is chosen on held-out images; the chosen model is
fine-tuned with SGD on 250 images of the other five classes, as the paper's table 7 does on other
data sets.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import begin, debug_on_digits, set_length, use_adamw, use_cifar10

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
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 50, "400 steps", "40 steps", save="400 steps", log="50 steps")
    c.model.name, c.model.stem_width, c.model.stages = "BiT-R50x1", 32, (1,)
    use_cifar10(c, classes=(0, 1, 2, 3, 4), split="train[:90%]")
    c.evals.dev = classification(split="train[90%:]", every="400 steps", ops="decode")
    c.evals.test = classification(split="test", every="400 steps", ops="decode")
    use_adamw(c, weight_decay=0.0)  # the study replaces both, and the optimizer

    c.study.name, c.study.metric, c.study.choose_by = "grid", "dev/top1", "dev/top1"
    c.study.finetune, c.study.finetune_metric = FINETUNE, "test/top1"
    rates, models = PEAK_LRS, MODELS
    if "debug" in chosen:
        rates, models = PEAK_LRS[1:3], {"one stage": "(1,)"}
        debug_on_digits(c, model=None)
        c.study.seeds, c.study.finetune = 1, "data.classes=5,6,7,8,9; duration=10 steps"
    c.study.candidates = tuple(f"lr_{lr}: optimizer.peak_lr={lr}" for lr in rates)
    c.study.cells = tuple(
        f"BiT, {size} | {optimizer}: model.stages={stages}; {fields}"
        for size, stages in models.items()
        for optimizer, fields in OPTIMIZERS.items()
    )
    return c
