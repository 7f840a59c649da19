"""Noisy Student (arXiv:1911.04252): a teacher labels images, and a noised student learns them.

python -m vit_jax.main study --config=configs/noisy_student.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/noisy_student.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The teacher, a ViT of 469,000 parameters, trains on
the first 5,000 labelled images of CIFAR-10; it labels the other 45,000 (their own labels only
measure its accuracy); the student, of the same size, trains on both with RandAugment, dropout and
stochastic depth. One round, three seeds.

L2, the settings of the paper's largest run: an EfficientNet-B7 teaches an EfficientNet-L2, which
teaches a second and a third one. Labelled batches of 2048 with 14 and at last 28 times as many
unlabelled images, RandAugment 2 / 27, dropout 0.5, stochastic depth with survival 0.8 in the last
layer, soft labels above 0.3, 130,000 images of each class, 350 epochs of ImageNet at 475 px at a
learning rate of 0.128, x 0.97 every 2.4 epochs; then 1.5 epochs at 800 px on unaugmented labelled
images. UNLABELLED is your own set, as data.name takes it. The soft labels of 130,000 images of
each of 1,000 classes take 260 GB of memory in each process, in float16; hard labels, with
--config.study.soft_labels=false, take 4 bytes a image.

Our choices: the learning rate at 800 px, which the paper does not state; warm-up, L2
regularisation, averaging, value range and random crops as in configs/efficientnet.py; evaluation
and the last stage resize bilinearly and crop the central 87.5 % of each side.

python -m vit_jax.main study --config=configs/noisy_student.py:L2,UNLABELLED --workdir=$W
Published: 88.4 % top-1, where the teacher, EfficientNet-B7, has 85.0 %.
"""

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification, split_words
from vit_jax.run.setup.recipes import (
    EVAL_OPS,
    debug_on_digits,
    set_length,
    use_adamw,
    use_cifar10,
    use_imagenet,
    use_vit,
)

WORDS = {
    "L2": "the settings of the paper's EfficientNet-L2; needs UNLABELLED",
    "debug": "a few steps of tiny models, one seed",
}
LABELLED = 2048  # labelled images in a batch of L2


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != ("L2" in chosen) or {"L2", "debug"} <= chosen:
        raise InputError(f"got {arg!r}, needs L2,UNLABELLED, or debug, or nothing")
    c = base_config()
    c.study.name = "noisy_student"
    if "L2" in chosen:
        use_settings_of_l2(c, words[0])
    else:
        use_two_small_models(c)
    if "debug" in chosen:
        make_tiny(c)
    return c


def use_two_small_models(c):
    """Teacher and student of one size, on 5,000 and 45,000 images of CIFAR-10."""
    use_vit(c.model, "ViT-Ti/8", 96, 4, 384, 3, pool="gap")
    use_cifar10(c, split="train[:10%]")
    set_length(c, 64, "800 steps", "80 steps", save="1000 steps", log="100 steps")
    use_adamw(c)
    c.evals.test = classification(split="test", every="5000 steps", ops="decode", batch_size=500)
    c.study.metric, c.study.seeds = "test/top1", 3
    c.study.unlabelled, c.study.ratio, c.study.confidence = "cifar10@train[10%:]", 3.0, 0.3
    noise = "decode|pad_crop(2)|randaugment(1, 5)|flip"
    c.study.stages = (
        "teacher: model.dropout=0.1",
        "student: global_batch_size=128; duration=600 steps; schedule.warmup=60 steps; "
        f"model.dropout=0.1; model.stochastic_depth=0.1; data.ops={noise}",
    )


def use_settings_of_l2(c, unlabelled):
    """Section 3.1 and table 5 of the paper, and its release."""
    c.model.name, c.model.dtype = "EfficientNet-L2", "bfloat16"
    c.model.dropout, c.model.stochastic_depth = 0.5, 0.2
    use_imagenet(c, 475)
    c.data.ops = "inception_crop(area_min=0.08)|randaugment(2, 27)|flip"
    c.evals.val = classification(split="validation", every="10000 steps", ops=EVAL_OPS)
    c.loss.label_smoothing = 0.1
    c.optimizer.name, c.optimizer.peak_lr = "rmsprop", 0.128
    c.optimizer.l2, c.optimizer.weight_decay_on = 1e-5, "(?!.*/norm_).*"
    c.optimizer.ema_decay = 0.9999
    set_length(c, LABELLED, _epochs(350), _epochs(5), save="1000 steps", log="100 steps")
    c.schedule.name, c.schedule.timescale = "exponential", _epochs(2.4)  # x 0.97 every 2.4 epochs
    c.study.seeds, c.study.metric = 1, "val/top1"
    c.study.unlabelled, c.study.confidence, c.study.per_class = unlabelled, 0.3, 130_000
    c.study.stages = (
        "teacher: model.name=EfficientNet-B7; data.image_size=600",
        *(
            f"{name}: study.ratio={ratio}; global_batch_size={(1 + ratio) * LABELLED}"
            for name, ratio in (("student", 14), ("student_2", 14), ("student_3", 28))
        ),
        f"at_800: study.ratio=0; data.image_size=800; duration={_epochs(1.5)}; "
        f"data.ops={EVAL_OPS}; schedule.warmup=0 steps; optimizer.peak_lr=0.0016",
    )


def _epochs(number):
    """Steps in which the labelled images pass `number` times."""
    return f"{round(number * 1_281_167 / LABELLED)} steps"


def make_tiny(c):
    """A few steps of tiny models on handwritten digits."""
    debug_on_digits(c, ops="flip", eval_batch_size=360)
    set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
    c.study.seeds, c.study.unlabelled, c.study.confidence = 1, "digits@test", 0.0
    c.study.stages = (
        "teacher:",
        "student: study.ratio=1; model.dropout=0.1; model.stochastic_depth=0.1",
    )
