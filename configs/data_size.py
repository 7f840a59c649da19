"""ViTs and BiT ResNets pretrained on nested parts of a data set: --config=data_size:MODE

python -m vit_jax.main study --config=configs/data_size.py:tuned --workdir=$W/tuned \\
  --config.data.data_dir=DIR
python -m vit_jax.main study --config=configs/data_size.py:fixed --workdir=$W/fixed \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/data_size.py:tuned,debug

DIR holds cifar10/VERSION as TFDS prepares it. Models pretrain on class-balanced parts of the
images of airplane, automobile, bird, cat and deer, each part within the next larger one. They are
judged on the other five classes: by least squares on the frozen features of ten images of each
class, and after fine-tuning on 250 images. A small version of section 4.3 of arXiv:2010.11929:

tuned: the regularisation is chosen for each model and size on 2,500 held-out images, then each
  model is fine-tuned (figure 3)
fixed: one setting for all models and sizes, judged where the accuracy on the held-out images is
  best (figure 4)

How it works: docs/explanation/data_size.md.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, fewshot, split_words
from vit_jax.run.setup.recipes import debug_on_digits, set_length, use_adamw, use_cifar10

WORDS = {
    "tuned": "regularisation chosen for each size, then fine-tuning",
    "fixed": "one setting, judged at its best step",
    "debug": "a few steps of tiny models",
}
MODELS = {
    "BiT": "model.name=BiT-R50x1; model.stages=1,1; model.stem_width=32",
    "ViT": "model.name=ViT-Ti/8; model.width=96; model.depth=3; model.mlp_dim=384; "
    "model.num_heads=4",
}
TINY = {
    "BiT": "model.name=BiT-R50x1; model.stages=1,; model.stem_width=32",
    "ViT": "model.name=ViT-mu/4",
}
CANDIDATES = (
    "weak: optimizer.weight_decay=0.03",
    "strong: optimizer.weight_decay=0.3; loss.label_smoothing=0.1; "
    "data.ops=decode|pad_crop(4)|flip",
)
TINY_CANDIDATES = ("weak: optimizer.weight_decay=0.03", "strong: optimizer.weight_decay=0.3")
FINETUNE = (
    "data.classes=5,6,7,8,9; data.split=train[2500:2961]; duration=100 steps; "
    "optimizer.peak_lr=0.001; schedule.warmup=10 steps; optimizer.weight_decay=0.0"
)
TINY_FINETUNE = "data.classes=5,6,7,8,9; data.subset=50; duration=10 steps"


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    modes = chosen & {"tuned", "fixed"}
    if words or len(modes) != 1:
        raise InputError(f"got {arg!r}, needs tuned or fixed; optional word: debug")
    tuned, debug = modes == {"tuned"}, "debug" in chosen
    c = base_config()
    set_length(c, 50, "400 steps", "40 steps", save="400 steps", log="50 steps")
    c.model.name = "ViT-Ti/8"  # the study replaces it and sets its sizes
    use_cifar10(c, classes=(0, 1, 2, 3, 4), split="train[:90%]", subset_balanced=True)
    use_adamw(c)

    every = "400 steps" if tuned else "100 steps"
    held_out = {"every": every, "ops": "decode", "batch_size": 500}
    # The study's fine-tuning takes other classes, and with them the test split.
    c.evals.dev = classification(split="train[90%:]", **held_out)
    c.evals.test = classification(split="test", **held_out | {"every": "400 steps"})
    c.evals.fewshot = fewshot(
        train_split="train[:2000]", test_split="test[:4000]", shots=(10,), classes=(5, 6, 7, 8, 9),
        **held_out,
    )  # fmt: skip
    if debug:
        every = "20 steps" if tuned else "10 steps"
        debug_on_digits(c, eval_every=every, eval_batch_size=120)

    c.study.name, c.study.seeds = "grid", 1
    c.study.metric = "fewshot/10shot_top1"
    if tuned:
        c.study.candidates, c.study.choose_by = TINY_CANDIDATES if debug else CANDIDATES, "dev/top1"
        c.study.finetune = TINY_FINETUNE if debug else FINETUNE
        c.study.finetune_metric = "test/top1"
    else:
        c.checkpoint.keep_best, c.study.point = "dev/top1", "best"
    c.study.cells = tuple(
        f"{model} | {size} pretraining images: data.subset={size}; {fields}"
        for model, fields in (TINY if debug else MODELS).items()
        for size in ((50, 200) if debug else (250, 1_000, 4_000, 20_000))
    )
    return c
