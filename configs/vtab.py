"""Fine-tuning on the 19 tasks of VTAB-1k, as in the paper: --config=vtab:MODEL

python -m vit_jax.main study --config=configs/vtab.py:ViT-B/16 --workdir=$W \\
  --config.init_from=ViT-B/16@imagenet21k --config.data.data_dir=DIR

DIR holds the data sets as TFDS prepares them. Tasks with missing data are skipped and listed, with
the way to get the data. From table 4 (arXiv:2010.11929): 2,500 steps, SGD with momentum 0.9 at
0.01, batch 512, cosine, clipping at norm 1; from appendix B.1.1: 384 px (/14: 378) for every task.
A BiT follows the same recipe instead of its HyperRule, which uses another size for small images.
Our choices: images are resized but not augmented, because some tasks predict positions or counts;
bfloat16. Each task is run three times; --config.study.seeds=1 runs it once.

A few seconds, on the digits: --config=configs/vtab.py:ViT-B/16,debug
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import fine_tuning_size, make_tiny, set_length

WORDS = {"debug": "20 steps of a tiny model"}


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != 1:
        raise InputError(
            f"got {arg!r}, needs MODEL, e.g. configs/vtab.py:ViT-B/16; optional words: debug"
        )
    (model,) = words
    c = base_config()
    c.init_from = ""  # required
    set_length(c, 512, "2500 steps", "0 steps", save="500 steps", log="50 steps")
    c.model.name, c.model.dtype = model, "bfloat16"

    c.data.name, c.data.split = "vtab/caltech101", "train800val200"  # the study replaces them
    c.data.image_size = fine_tuning_size(model)
    c.data.ops = "decode|resize"
    c.evals.test = classification(split="test", every="2500 steps", ops="decode|resize")

    c.optimizer.name, c.optimizer.peak_lr, c.optimizer.grad_clip_norm = "sgd", 0.01, 1.0
    c.schedule.name = "cosine"
    c.study.name, c.study.metric = "vtab", "test/top1"

    if "debug" in chosen:
        c.init_from = "scratch"
        c.model.dtype, c.data.image_size = "float32", make_tiny(c.model, model)
        c.data.name, c.data.split = "digits", "train"
        set_length(c, 32, "20 steps", "0 steps", save="20 steps", log="10 steps")
        c.evals.test.every = "20 steps"
        c.study.seeds = 1
    return c
