"""Common parts of files in configs/: settings of runs, and hyper-parameter tables of the papers.

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), table 4 (appendix B.1), for `FineTuning`;
Kolesnikov et al. 2019 (arXiv:1912.11370), section 3.3, for `HyperRule`; Steiner et al. 2021
(arXiv:2106.10270), section 3, for `AUGREG`, whose light2 is also the augmentation of Beyer et al.
2022 (arXiv:2205.01580).
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import (
    EVALUATORS,
    base_config,
    knn,
    patch_features,
    rank,
    refuse_words,
    split_words,
)
from vit_jax.experiment.finetune_length import bit_steps, bit_warmup
from vit_jax.models import tiny_fields, token_stride

EVAL_OPS = "decode|resize_small(crop=0.875)|central_crop"  # of ImageNet

# Training and validation split of each data set. The two large sets have no validation split; as
# many images as ImageNet's validation split has are held out of their training split.
SPLITS = {
    "imagenet2012": ("train", "validation"),
    "imagenet21k": ("train[50000:]", "train[:50000]"),
    "jft": ("train[50000:]", "train[:50000]"),
}


def begin(arg: str, words: dict[str, str], file: str) -> tuple[ConfigDict, set[str]]:
    """A base config, and the words in `arg`, for a config whose words are all in `words`.

    Raises:
      InputError: for other words; names the config's `file` and the known ones.
    """
    unknown, chosen = split_words(arg, words)
    refuse_words(unknown, words, file)
    return base_config(), chosen


def set_length(
    c: ConfigDict, batch_size: int, duration: str, warmup: str, *, save: str, log: str
) -> None:
    """Set the batch, the length of the run and of its warm-up, and how often it saves and logs."""
    c.global_batch_size, c.duration, c.schedule.warmup = batch_size, duration, warmup
    c.checkpoint.every, c.log.every = save, log


def use_adamw(c: ConfigDict, peak_lr: float = 1e-3, weight_decay: float = 0.05) -> None:
    """Set AdamW with a cosine, and clipping at norm 1."""
    c.optimizer.peak_lr, c.optimizer.weight_decay = peak_lr, weight_decay
    c.optimizer.grad_clip_norm, c.schedule.name = 1.0, "cosine"


def use_muon(c: ConfigDict) -> None:
    """Set Muon with a linear decay, as small ViTCs with batches of 128 were tried."""
    c.optimizer.name, c.optimizer.peak_lr, c.schedule.name = "muon", 3e-3, "linear"


def use_vit(model: ConfigDict, name: str, *sizes: int, **fields: Any) -> None:
    """Set `config.model` to a ViT with these sizes, and other fields.

    `sizes` are width, depth, mlp_dim and num_heads; without them the ViT has its name's sizes.
    """
    names = ("width", "depth", "mlp_dim", "num_heads")
    given = dict(zip(names, sizes or (None,) * len(names), strict=True))
    model.update({"name": name} | given | fields)


def use_cifar10(c: ConfigDict, ops: str = "decode|pad_crop(2)|flip", **keys: Any) -> None:
    """Set CIFAR-10 with these preprocessing ops, and other keys of `data`."""
    c.data.update({"name": "cifar10", "image_size": 32, "ops": ops} | keys)


def use_cifar10_fast(c: ConfigDict) -> None:
    """Set a ViTC of 1.1 million parameters for 32 px, and ten epochs of 128 images by Muon."""
    sizes = {"patch_size": 8, "stem_channels": (32, 64, 128), "pos_embed": "sincos_2d"}
    use_vit(c.model, "ViTC-1GF", 128, 6, 384, 4, **sizes)
    set_length(c, 128, "10 epochs", "10 %", save="100 %", log="100 steps")
    use_muon(c)


def use_imagenet(c: ConfigDict, image_size: int = 224) -> None:
    """Set ImageNet-1k, in the value range of many published recipes."""
    c.data.name, c.data.image_size = "imagenet2012", image_size
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def debug_on_synthetic(c: ConfigDict, ops: str = "flip") -> None:
    """Turn a recipe with the evaluator `val` into 20 steps of a tiny model on made-up images."""
    c.data.name, c.data.split, c.data.ops = "synthetic", "train", ops
    c.data.image_size = make_tiny(c.model, c.model.name)
    c.data.num_classes, c.data.num_examples = 10, 256
    c.evals.val.split, c.evals.val.ops, c.evals.val.every = "val", "", "10 steps"
    set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")


def debug_on_digits(
    c: ConfigDict,
    model: str | None = "ViT-mu/4",
    ops: str = "",
    *,
    eval_every: str = "20 steps",
    eval_ops: str = "",
    eval_batch_size: int | None = None,
) -> None:
    """Turn a run into 20 steps of a tiny ViT on handwritten digits; a caller may then change it.

    Evaluators of features train on the split train, all others except `rank` take test.

    Args:
      model: its name; None: the model stays as it is.
    """
    if model is not None:
        use_vit(c.model, model)
    c.data.name, c.data.image_size, c.data.split, c.data.ops = "digits", 8, "train", ops
    set_length(c, 32, "20 steps", "2 steps", save="20 steps", log="10 steps")
    for entry in c.evals.values():
        entry.every, entry.ops, entry.batch_size = eval_every, eval_ops, eval_batch_size
        if "train_split" in entry:
            entry.train_split, entry.test_split = "train", "test"
        elif entry.type != "rank":
            entry.split = "test"


class FineTuning(NamedTuple):
    """A row of table 4. Common to all: SGD, momentum 0.9, batch 512, cosine, clipping at norm 1.

    steps: length of every run, including those that select the learning rate.
    peak_lrs: the learning rates to choose from.
    dev_percent: share of the training split, taken from its end, that selects the learning rate.
    image_size: height and width of a typical image, in pixels.
    test_split: the split that results are reported on.
    """

    steps: int
    peak_lrs: tuple[float, ...]
    dev_percent: int
    image_size: tuple[int, int]
    test_split: str = "test"

    @property
    def dev_splits(self) -> tuple[str, str]:
        """The splits to train on and to validate on while the learning rate is selected."""
        cut = 100 - self.dev_percent
        return f"train[:{cut}%]", f"train[{cut}%:]"


_SMALL = (0.001, 0.003, 0.01, 0.03)
FINE_TUNING = {
    "imagenet2012": FineTuning(20_000, (0.003, 0.01, 0.03, 0.06), 1, (375, 500), "validation"),
    "cifar10": FineTuning(10_000, _SMALL, 2, (32, 32)),
    "cifar100": FineTuning(10_000, _SMALL, 2, (32, 32)),
    "oxford_iiit_pet": FineTuning(500, _SMALL, 10, (375, 500)),
    "oxford_flowers102": FineTuning(500, _SMALL, 10, (500, 667)),
}


def fine_tuning_size(model: str, *, headline: bool = False) -> int:
    """Side of the training images in pixels: 384, or 512 for the headline results on ImageNet.

    Rounded to the nearest multiple of the model's token stride: 378 and 518 for /14.

    Raises:
      InputError: if there is no such model.
    """
    stride, _ = token_stride(model)
    return round((512 if headline else 384) / stride) * stride


class HyperRule(NamedTuple):
    """Fine-tuning settings for BiT. Common to all: SGD, momentum 0.9, batch 512, no weight decay.

    resize, crop: sides in pixels; training takes a random crop of the resized image.
    milestones: steps at which the learning rate is divided by 10.
    mixup: its alpha; None: no MixUp.
    """

    resize: int
    crop: int
    steps: int
    warmup: int
    milestones: tuple[int, ...]
    mixup: float | None


def hyper_rule(num_examples: int, image_size: tuple[int, int]) -> HyperRule:
    """BiT's rule for a data set of `num_examples` images of typical size (height, width)."""
    small = image_size[0] * image_size[1] < 96 * 96
    resize, crop = (160, 128) if small else (512, 480)
    steps = bit_steps(num_examples)
    short = steps == 500
    milestones = (200, 300, 400) if short else tuple(steps * i // 10 for i in (3, 6, 9))
    mixup = None if short else 0.1
    return HyperRule(resize, crop, steps, bit_warmup(steps), milestones, mixup)


AUGREG = {  # RandAugment, on the host, and MixUp, on the device
    "none": ("", ""),
    "light1": ("randaugment(2, 0)", ""),
    "light2": ("randaugment(2, 10)", "mixup(0.2)"),
    "medium1": ("randaugment(2, 15)", "mixup(0.2)"),
    "medium2": ("randaugment(2, 15)", "mixup(0.5)"),
    "strong1": ("randaugment(2, 20)", "mixup(0.5)"),
    "strong2": ("randaugment(2, 20)", "mixup(0.8)"),
}


def augreg_ops(name: str, crop: str) -> str:
    """The preprocessing of a row of AugReg's table; `crop` holds the host ops before, if any.

    Raises:
      InputError: if there is no such row; suggests the nearest name.
    """
    if name not in AUGREG:
        raise InputError(f"augmentation {name!r}: {nearest(name, list(AUGREG))}")
    randaugment, mixing = AUGREG[name]
    return "|".join(op for op in (crop, randaugment, "flip", mixing) if op)


def make_tiny(model: ConfigDict, name: str) -> int:
    """Set `config.model` to the tiny model of the family of `name`; see `models.tiny_fields`.

    Returns the side, in pixels, of images with 2 x 2 tokens.
    """
    model.update(tiny_fields(name))
    return 2 * token_stride(name)[0]


def make_small_on_cifar10(c: ConfigDict, near_every: str) -> None:
    """Set a ViT of 0.8 million parameters, and CIFAR-10, for runs of minutes on a CPU.

    Training with labels keeps the duration of 1,000 steps; other objectives set their own. Adds the
    evaluator `near`, of features.
    """
    of_vit = {"dtype": "float32", "pos_embed": "sincos_2d", "stochastic_depth": None}
    use_vit(c.model, "ViT-Ti/4", 128, 4, 512, 4, **of_vit)
    use_cifar10(c, "decode|pad_crop(4)|flip", split="train")
    set_length(c, 128, "1000 steps", "10 %", save="500 steps", log="50 steps")
    for entry in c.evals.values():
        entry.split, entry.every, entry.ops = "test", "500 steps", "decode"
        entry.batch_size = 500
    c.evals.near = knn(
        train_split="train[:20%]", test_split="test", every=near_every, ops="decode",
        batch_size=500, num_neighbours=(20,),
    )  # fmt: skip


def view_ops(*, smallest: float, middle: float) -> tuple[str, str]:
    """(data.global_ops, data.local_ops) of DINO and DINOv2, for photographs.

    The first global view is always blurred, the second one seldom, and sometimes solarised.

    Args:
      smallest: least share of the area that a global view shows; its largest is 1.
      middle: largest share of the area that a local view shows; its least is 0.05.

    Source: Caron et al. 2021 (arXiv:2104.14294), section 3.2, with the numbers of its code.
    """
    colours = "flip|color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"
    crop = f"inception_crop(area_min={smallest}, antialias=True)|{colours}"
    local = f"inception_crop(area_min=0.05, area_max={middle}, antialias=True)|{colours}|blur(0.5)"
    return f"{crop}|blur(1.0); {crop}|blur(0.1)|solarize(0.2)", local


def use_small_views(c: ConfigDict, crop: str, num_local: int = 4) -> None:
    """Set 2 global views of images of few pixels, and local ones of half the size.

    `crop`: inception_crop or scaled_inception_crop.
    """
    colours = "flip|color_jitter(0.8, 0.4, 0.4, 0.2, 0.1)|greyscale(0.2)"
    whole = f"{crop}(area_min=0.3)|{colours}"
    c.data.num_global, c.data.global_ops = 2, f"{whole}; {whole}|solarize(0.2)"
    if num_local:
        c.data.num_local, c.data.local_size = num_local, c.data.image_size // 2
        c.data.local_ops = f"{crop}(area_min=0.1, area_max=0.3)|{colours}"


def use_own_images(c: ConfigDict, duration: str, *, ranked: bool = True) -> None:
    """Set own images of any size, flat or nested, and a small ViT to pretrain on them from scratch.

    The model has 1.2 million parameters at 64 px. Evaluators: `features`; `rank`, if `ranked`; and
    `near`, if the images lie in folders of classes.
    """
    set_length(c, 64, duration, "10 %", save="250 steps", log="2 %")
    of_vit = {"dtype": "float32", "gelu": "exact", "pos_embed": "sincos_2d", "pool": "gap"}
    use_vit(c.model, "ViT-Ti/8", 128, 6, 512, 4, stochastic_depth=None, **of_vit)
    c.data.name, c.data.image_size = "unlabelled", 64
    how = {"every": "25 %", "ops": "scaled_decode|resize_small(antialias=True)|central_crop"}
    c.evals = {
        "features": patch_features(split="train", **how),
        "near": knn(
            data_name="folder", train_split="train", test_split="val?", **how,
            num_neighbours=(5, 20), baselines=True,
        ),
    }  # fmt: skip
    if ranked:
        c.evals.rank = rank(split="train", **how, num_images=2000)


def use_own_images_fast(c: ConfigDict, duration: str) -> None:
    """As `use_own_images`, with a ViTC of 1.2 million parameters, two views an image, and Muon.

    Four convolutions leave 4 x 4 tokens, a quarter of the ViT's. The rank would mislead: it does
    not centre the features, and their mean is large here.
    """
    use_own_images(c, duration, ranked=False)
    use_vit(c.model, "ViTC-1GF", 128, 6, 384, 4, stem_channels=(16, 32, 64, 128))
    use_small_views(c, "scaled_inception_crop", num_local=0)
    use_muon(c)
    c.global_batch_size = 128


def debug_on_own_images(c: ConfigDict) -> None:
    """Turn self-supervised training on own images into 20 steps of a tiny model."""
    use_vit(c.model, c.model.name)
    c.data.image_size = 2 * make_tiny(c.model, c.model.name)
    c.model.dtype, c.data.local_size = "float32", c.data.image_size // 2
    c.data.num_local = min(c.data.num_local, 2)
    set_length(c, 16, "20 steps", "5 steps", save="10 steps", log="5 steps")
    for entry in c.evals.values():
        entry.every = "10 steps"
    if "rank" in c.evals:
        c.evals.rank.num_images = 100
    if "near" in c.evals:
        c.evals.near.num_neighbours = (2,)


def use_captions(c: ConfigDict, model: str, loss: str, text_length: int) -> None:
    """Set the contrastive objective, tar files with images and captions, and 224 px."""
    c.objective.name, c.objective.loss, c.model.name = "contrastive", loss, model
    c.data.name, c.data.image_size, c.data.text_length = "tar", 224, text_length
    c.data.ops = "decode|resize(antialias=True)"


def debug_on_captions(c: ConfigDict, own: bool = False) -> None:
    """Turn it into 20 steps of tiny towers, on made-up images, or on `own` ones as before.

    The former are evaluated on the digits; evaluators that need captions, which the digits lack,
    are left out.
    """
    use_vit(c.model, c.model.name)
    c.data.text_length, c.model.dtype = 40, "float32"
    c.data.image_size = make_tiny(c.model, c.model.name)
    if not own:
        c.data.name, c.data.split, c.data.ops = "synthetic", "train", ""
        c.data.num_classes, c.data.num_examples = 10, 256
    tiny = {"text_width": 32, "text_depth": 1, "text_heads": 2, "text_mlp_dim": 64}
    c.objective.update(tiny)
    c.objective.common_width = c.objective.common_width and 16
    if c.objective.name == "captions":
        c.objective.decoder_depth = 1
    set_length(c, 32, "20 steps", "5 steps", save="10 steps", log="5 steps")
    splits = {"split": "test", "train_split": "train", "test_split": "test"}
    ops = "resize" if c.data.max_tokens is None else ""
    for name, entry in [*c.evals.items()]:
        entry.every = "20 steps"
        if own:
            continue
        if EVALUATORS.find(entry.type).reads_captions:
            del c.evals[name]
            continue
        entry.update({key: split for key, split in splits.items() if key in entry})
        entry.update(data_name="digits", ops=ops)
