"""A result as the paper reports it: --config=finetune_study:MODEL,DATA

Each learning rate of DATA's row of table 4 (arXiv:2010.11929) is tried on a part of the training
split and judged on the rest of it (10 % of Pets and Flowers, 2 % of CIFAR, 1 % of ImageNet). The
best is trained on all of it with three seeds, and tested: mean and standard deviation. Of a BiT
there is nothing to choose: its HyperRule says the rate. The words and all else are those of
configs/finetune.py.

python -m vit_jax.main study --config=configs/finetune_study.py:ViT-B/16,cifar10 --workdir=$W \\
  --config.init_from=ViT-B/16@imagenet21k
A minute: --config=configs/finetune_study.py:ViT-B/16,cifar10,debug

A member by itself is `python -m vit_jax.main` with the flags that the study prints.
"""

import pathlib

from vit_jax.config.text import import_config
from vit_jax.recipes import HYPER_RULE_LR, find_fine_tuning

FINETUNE = import_config(pathlib.Path(__file__).with_name("finetune.py"))
WORDS = FINETUNE.WORDS


def get_config(arg=""):
    c = FINETUNE.get_config(arg)
    debug = c.data.name == "digits"
    # While choosing it is the development split; test is none to be looked at then.
    c.evals.held_out = c.evals.test
    del c.evals.test
    c.study.name = "finetune_sweep"
    if debug:
        c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 4, 64
        c.study.peak_lrs, c.study.seeds = (0.003, 0.03), 2
        c.study.train_split, c.study.dev_split = "dev_train", "dev"
    else:
        row = find_fine_tuning(c.data.name)
        c.study.peak_lrs = (HYPER_RULE_LR,) if c.model.name.startswith("BiT-") else row.peak_lrs
        c.study.train_split, c.study.dev_split = row.dev_splits
    return c
