"""Noisy Student (arXiv:1911.04252): a teacher labels pictures, and a noised student learns them.

python -m vit_jax.main study --config=configs/noisy_student.py --workdir=$W \\
  --config.data.data_dir=DIR
A minute, on handwritten digits: --config=configs/noisy_student.py:debug

DIR holds cifar10/VERSION as TFDS prepares it. The teacher, a ViT of 469,000 parameters, trains on
the first 5,000 labelled pictures of CIFAR-10; it labels the other 45,000 (their own labels only
measure its accuracy); the student, of the same size, trains on both with RandAugment, dropout and
stochastic depth. One round, three seeds.

L2, the settings of the paper's largest run: an EfficientNet-B7 teaches an EfficientNet-L2, which
teaches a second and a third one. Labelled batches of 2048 with 14 and at last 28 times as many
unlabelled pictures, RandAugment 2 / 27, dropout 0.5, stochastic depth with survival 0.8 in the last
layer, soft labels above 0.3, 130,000 pictures of each class, 350 epochs of ImageNet at 475 px at a
learning rate of 0.128, x 0.97 every 2.4 epochs; then 1.5 epochs at 800 px on unaugmented labelled
pictures. UNLABELLED is your own set, as data.name takes it. The soft labels of 130,000 pictures of
each of 1,000 classes take 260 GB of memory in each process, in float16; hard labels, with
--config.study.soft_labels=false, take 4 bytes a picture.

Our choices: the learning rate at 800 px, which the paper does not state; warm-up, L2
regularisation, averaging, value range and random crops as in configs/efficientnet.py; evaluation
and the last stage resize bilinearly and crop the central 87.5 % of each side.

python -m vit_jax.main study --config=configs/noisy_student.py:L2,UNLABELLED --workdir=$W
Published: 88.4 % top-1, where the teacher, EfficientNet-B7, has 85.0 %.
"""

from vit_jax.config import base_config, classification, split_words
from vit_jax.errors import InputError

WORDS = {
    "L2": "the settings of the paper's EfficientNet-L2; needs UNLABELLED",
    "debug": "a few steps of tiny models, one seed",
}
LABELLED = 2048  # labelled pictures in a batch of L2


def get_config(arg=""):
    words, chosen = split_words(arg, WORDS)
    if len(words) != ("L2" in chosen) or {"L2", "debug"} <= chosen:
        raise InputError(f"got {arg!r}, needs L2,UNLABELLED, or debug, or nothing")
    c = base_config()
    c.study.name, c.study.seeds = "noisy_student", 3
    if "L2" in chosen:
        use_settings_of_l2(c, words[0])
    else:
        use_cifar10(c)
    if "debug" in chosen:
        make_small(c)
    return c


def use_cifar10(c):
    """Teacher and student of one size, on 5,000 and 45,000 pictures."""
    c.model.name, c.model.pool = "ViT-Ti/8", "gap"
    c.model.width, c.model.depth, c.model.mlp_dim, c.model.num_heads = 96, 4, 384, 3
    c.data.name, c.data.split, c.data.image_size = "cifar10", "train[:10%]", 32
    c.data.ops = "decode|pad_crop(2)|flip"
    c.global_batch_size, c.duration, c.schedule.warmup = 64, "800 steps", "80 steps"
    c.optimizer.peak_lr, c.optimizer.weight_decay = 1e-3, 0.05
    c.optimizer.grad_clip_norm = 1.0
    c.checkpoint.every, c.log.every = "1000 steps", "100 steps"
    c.evals.test = classification(split="test", every="5000 steps", ops="decode", batch_size=500)
    c.study.metric = "test/top1"
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
    c.data.name, c.data.image_size = "imagenet2012", 475
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    c.data.ops = "inception_crop(area_min=0.08)|randaugment(2, 27)|flip"
    ops = "decode|resize_small(crop=0.875)|central_crop"
    c.evals.val = classification(split="validation", every="10000 steps", ops=ops)
    c.loss.label_smoothing = 0.1
    c.optimizer.name, c.optimizer.peak_lr = "rmsprop", 0.128
    c.optimizer.l2, c.optimizer.weight_decay_on = 1e-5, "(?!.*/norm_).*"
    c.optimizer.ema_decay = 0.9999
    c.schedule.name = "exponential"  # x 0.97 every 2.4 epochs
    c.checkpoint.every, c.log.every = "1000 steps", "100 steps"
    c.global_batch_size = LABELLED
    c.duration, c.schedule.warmup = _epochs(350), _epochs(5)
    c.schedule.timescale = _epochs(2.4)
    c.study.seeds, c.study.metric = 1, "val/top1"
    c.study.unlabelled, c.study.confidence, c.study.per_class = unlabelled, 0.3, 130_000
    c.study.stages = (
        "teacher: model.name=EfficientNet-B7; data.image_size=600",
        *(
            f"{name}: study.ratio={ratio}; global_batch_size={(1 + ratio) * LABELLED}"
            for name, ratio in (("student", 14), ("student_2", 14), ("student_3", 28))
        ),
        f"at_800: study.ratio=0; data.image_size=800; duration={_epochs(1.5)}; "
        "data.ops=decode|resize_small(crop=0.875)|central_crop; schedule.warmup=0 steps; "
        "optimizer.peak_lr=0.0016",
    )


def _epochs(number):
    """Steps in which the labelled pictures pass `number` times."""
    return f"{round(number * 1_281_167 / LABELLED)} steps"


def make_small(c):
    """A few steps of tiny models on handwritten digits."""
    c.model.name = "ViT-mu/4"
    c.model.width = c.model.depth = c.model.mlp_dim = c.model.num_heads = None
    c.data.name, c.data.split, c.data.image_size, c.data.ops = "digits", "train", 8, "flip"
    c.global_batch_size, c.duration, c.schedule.warmup = 32, "20 steps", "5 steps"
    c.log.every, c.checkpoint.every = "5 steps", "10 steps"
    c.evals.test = classification(split="test", every="20 steps", batch_size=360)
    c.study.seeds, c.study.metric = 1, "test/top1"
    c.study.unlabelled, c.study.confidence, c.study.per_class = "digits@test", 0.0, None
    c.study.stages = (
        "teacher:",
        "student: study.ratio=1; model.dropout=0.1; model.stochastic_depth=0.1",
    )
