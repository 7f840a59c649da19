"""Fine-tuning with the paper's choice of learning rate: --config=finetune_study:MODEL,DATA

For each learning rate in DATA's row of table 4 (arXiv:2010.11929), a run trains on part of the
training split and is evaluated on the rest (10 % of Pets and Flowers, 2 % of CIFAR, 1 % of
ImageNet). The best rate is trained on the whole split with three seeds and tested; the study
reports mean and standard deviation. A BiT needs no choice: its HyperRule sets the rate. The words
and configs/finetune.py gives all other settings.

python -m vit_jax.main study --config=configs/finetune_study.py:ViT-B/16,cifar10 --workdir=$W \\
  --config.init_from=ViT-B/16@imagenet21k
A minute: --config=configs/finetune_study.py:ViT-B/16,cifar10,debug

To run one member separately, pass the flags that the study prints to `python -m vit_jax.main`.
"""

import pathlib

from vit_jax.base.errors import InputError
from vit_jax.config.text import import_config
from vit_jax.experiment.finetune_length import BIT_LR
from vit_jax.run.setup.recipes import FINE_TUNING

FINETUNE = import_config(pathlib.Path(__file__).with_name("finetune.py"))
WORDS = {w: what for w, what in FINETUNE.WORDS.items() if w not in ("list", "multilabel")}


def get_config(arg=""):
    c = FINETUNE.get_config(arg)
    if c.data.name in FINETUNE.OWN:
        raise InputError(
            f"got {arg!r}, DATA needs to be one of {', '.join(FINE_TUNING)}; for own images set "
            "the rate by --config=finetune:MODEL,folder --config.optimizer.peak_lr=..."
        )
    # While the study chooses, this is the development split; the test split is not used then.
    c.evals.held_out = c.evals.test
    del c.evals.test
    c.study.name = "finetune_sweep"
    if c.data.name == "digits":
        c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 4, 64
        c.study.peak_lrs, c.study.seeds = (0.003, 0.03), 2
        c.study.train_split, c.study.dev_split = "dev_train", "dev"
    else:
        row = FINE_TUNING[c.data.name]
        c.study.peak_lrs = (BIT_LR,) if c.model.name.startswith("BiT-") else row.peak_lrs
        c.study.train_split, c.study.dev_split = row.dev_splits
    return c
