"""AdamW, Muon and LAMB, each with five learning rates chosen by the same rule, on CIFAR-10.

python -m vit_jax.main study --config=configs/adamw_muon_lamb.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/adamw_muon_lamb.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. Each optimizer runs with its usual learning rate,
with a third and a ninth of it, and with three and nine times as much. Usual is 0.001 for AdamW and
for Muon, whose updates are as large as AdamW's, and 0.003 for LAMB, as in DeiT III
(arXiv:2204.07118). The table has the accuracy on held-out training images, by which to choose;
study.csv has the test accuracy too. All else is as for the plain ViT of configs/blocks_of_today.py,
whose seeds show the noise. Results: docs/explanation/results.md.
"""

from vit_jax.config import classification
from vit_jax.run.setup.recipes import (
    begin,
    debug_on_digits,
    set_length,
    use_adamw,
    use_cifar10,
    use_vit,
)

WORDS = {"debug": "a few steps of a tiny model, two learning rates"}

USUAL = {"adamw": 1e-3, "muon": 1e-3, "lamb": 3e-3}
FACTORS = {"usual / 9": 1 / 9, "usual / 3": 1 / 3, "usual": 1, "usual x 3": 3, "usual x 9": 9}


def get_config(arg=""):
    c, chosen = begin(arg, WORDS, __file__)
    set_length(c, 64, "800 steps", "10 %", save="800 steps", log="50 steps")
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3)
    use_cifar10(c, split="train[:90%]")
    c.evals.dev = classification(split="train[90%:]", every="800 steps", ops="decode")
    c.evals.test = classification(split="test", every="800 steps", ops="decode", batch_size=500)
    use_adamw(c)

    c.study.name, c.study.metric, c.study.seeds = "grid", "dev/top1", 1
    factors = FACTORS
    if "debug" in chosen:
        debug_on_digits(c)
        factors = {"usual": 1, "usual x 3": 3}
    c.study.cells = tuple(
        f"{name} | {column}: optimizer.name={name}; optimizer.peak_lr={usual * factor:.2g}"
        for name, usual in USUAL.items()
        for column, factor in factors.items()
    )
    return c
