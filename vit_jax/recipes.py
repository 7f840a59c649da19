"""The papers' tables of hyper-parameters as data, for the files in configs/.

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), tables 3 and 4 (appendix B.1), for
`Pretraining` and `FineTuning`; Kolesnikov et al. 2019 (arXiv:1912.11370), section 3.3, for
`HyperRule`; Steiner et al. 2021 (arXiv:2106.10270), section 3, for `AUGREG`;
Beyer et al. 2022 (arXiv:2205.01580) for `BETTER_PLAIN`.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import InputError, nearest
from vit_jax.models import find_family, token_stride
from vit_jax.models.fields import field_names
from vit_jax.models.resnet import map_stride

# Where each data set has its images to train on and to validate with. The two large ones have no
# validation split of their own: as many images as ImageNet's are held out.
SPLITS = {
    "imagenet2012": ("train", "validation"),
    "imagenet21k": ("train[50000:]", "train[:50000]"),
    "jft": ("train[50000:]", "train[:50000]"),
}


class Pretraining(NamedTuple):
    """A row of table 3; common to all: batch 4096, 10k steps of warm-up, Adam, 224 px.

    epochs: the paper's, the usual one first.
    weight_decay: decoupled, times the current learning rate.
    grad_clip_norm: the global norm; None: no clipping.
    """

    epochs: tuple[int, ...]
    peak_lr: float
    decay: str
    weight_decay: float
    dropout: float
    grad_clip_norm: float | None = None


_JFT = {
    "ViT-B/16": Pretraining((7,), 8e-4, "linear", 0.1, 0.0),
    "ViT-B/32": Pretraining((7,), 8e-4, "linear", 0.1, 0.0),
    "ViT-L/32": Pretraining((7,), 6e-4, "linear", 0.1, 0.0),
    "ViT-L/16": Pretraining((7, 14), 4e-4, "linear", 0.1, 0.0),
    "ViT-H/14": Pretraining((14,), 3e-4, "linear", 0.1, 0.0),
    "BiT-R50x1": Pretraining((7,), 1e-3, "linear", 0.1, 0.0),
    "BiT-R101x1": Pretraining((7,), 8e-4, "linear", 0.1, 0.0),
    "BiT-R152x1": Pretraining((7,), 6e-4, "linear", 0.1, 0.0),
    "BiT-R50x2": Pretraining((7,), 1e-3, "linear", 0.1, 0.0),
    "BiT-R152x2": Pretraining((7,), 6e-4, "linear", 0.1, 0.0),
    "R50+ViT-B/32": Pretraining((7,), 8e-4, "linear", 0.1, 0.0),
    "R50+ViT-B/16": Pretraining((7,), 8e-4, "linear", 0.1, 0.0),
    "R50+ViT-L/32": Pretraining((7,), 2e-4, "linear", 0.1, 0.0),
    "R50+ViT-L/16": Pretraining((7, 14), 4e-4, "linear", 0.1, 0.0),
}
_IMAGENET21K = {
    "ViT-B/16": Pretraining((90,), 1e-3, "linear", 0.03, 0.1),
    "ViT-B/32": Pretraining((90,), 1e-3, "linear", 0.03, 0.1),
    "ViT-L/16": Pretraining((90, 30), 1e-3, "linear", 0.03, 0.1),
    "ViT-L/32": Pretraining((90, 30), 1e-3, "linear", 0.03, 0.1),
}
_ANY_VIT_ON_IMAGENET = Pretraining((300,), 3e-3, "cosine", 0.3, 0.1, grad_clip_norm=1.0)


def find_pretraining(model: str, data: str) -> Pretraining:
    """The row of table 3 for `model` on `data`: "imagenet2012", "imagenet21k" or "jft".

    Raises:
      InputError: if the paper has no such row; names those it has.
    """
    find_family(model).parse(model)
    if data == "imagenet2012" and model.startswith("ViT-"):
        return _ANY_VIT_ON_IMAGENET
    rows = {"imagenet21k": _IMAGENET21K, "jft": _JFT}
    if data not in rows and data != "imagenet2012":
        raise InputError(f"data {data!r}: needs imagenet2012, imagenet21k or jft=<TFDS name>")
    if model not in rows.get(data, {}):
        have = "; ".join(f"{name}: {', '.join(models)}" for name, models in rows.items())
        raise InputError(
            f"table 3 of the paper has no row for {model} on {data}; it has {have}; "
            "imagenet2012: any ViT"
        )
    return rows[data][model]


class FineTuning(NamedTuple):
    """A row of table 4; common to all: SGD, momentum 0.9, batch 512, cosine, clipping at norm 1.

    steps: of a run, those by which the learning rate is chosen included.
    peak_lrs: to choose from.
    dev_percent: of the training split, its last ones, by which is chosen; None: nothing is.
    test_split: what results are reported on.
    image_size: height and width of the usual image, in pixels; None: they differ from task to task.
    """

    steps: int
    peak_lrs: tuple[float, ...]
    dev_percent: int | None = None
    test_split: str = "test"
    image_size: tuple[int, int] | None = None

    @property
    def dev_splits(self) -> tuple[str, str]:
        """What is trained on, and what is looked at, while choosing."""
        cut = 100 - self.dev_percent
        return f"train[:{cut}%]", f"train[{cut}%:]"


_SMALL = (0.001, 0.003, 0.01, 0.03)
FINE_TUNING = {
    "imagenet2012": FineTuning(
        20_000, (0.003, 0.01, 0.03, 0.06), 1, "validation", image_size=(375, 500)
    ),
    "cifar10": FineTuning(10_000, _SMALL, 2, image_size=(32, 32)),
    "cifar100": FineTuning(10_000, _SMALL, 2, image_size=(32, 32)),
    "oxford_iiit_pet": FineTuning(500, _SMALL, 10, image_size=(375, 500)),
    "oxford_flowers102": FineTuning(500, _SMALL, 10, image_size=(500, 667)),
}
VTAB = FineTuning(2_500, (0.01,))  # each of the 19 tasks; nothing is chosen


def find_fine_tuning(data: str) -> FineTuning:
    """The row of table 4 for a data set, by its TFDS name.

    Raises:
      InputError: if there is none; names the nearest.
    """
    if data not in FINE_TUNING:
        raise InputError(f"data {data!r}: {nearest(data, list(FINE_TUNING))}")
    return FINE_TUNING[data]


def fine_tuning_size(model: str, *, headline: bool = False) -> int:
    """The side of an image, in pixels: 384, or 512 of the headline results on ImageNet.

    That is, the multiple of what a token stands for which is nearest: 378 and 518 of /14.

    Raises:
      InputError: if there is no such model.
    """
    stride, _ = token_stride(model)
    return round((512 if headline else 384) / stride) * stride


HYPER_RULE_LR = 0.003


class HyperRule(NamedTuple):
    """How a BiT is fine-tuned; common to all: SGD, momentum 0.9, batch 512, no weight decay.

    resize, crop: sides in pixels; of the resized image a random window is trained on.
    milestones: steps at which the rate is divided by 10.
    mixup: its parameter; None: without.
    """

    resize: int
    crop: int
    steps: int
    warmup: int
    milestones: tuple[int, ...]
    mixup: float | None


def hyper_rule(num_examples: int, image_size: tuple[int, int]) -> HyperRule:
    """BiT's rule for a data set of so many images of about that height and width."""
    small = image_size[0] * image_size[1] < 96 * 96
    resize, crop = (160, 128) if small else (512, 480)
    if num_examples < 20_000:
        return HyperRule(resize, crop, 500, 100, (200, 300, 400), None)
    if num_examples < 500_000:
        return HyperRule(resize, crop, 10_000, 500, (3_000, 6_000, 9_000), 0.1)
    return HyperRule(resize, crop, 20_000, 500, (6_000, 12_000, 18_000), 0.1)


class Augmentation(NamedTuple):
    """What a recipe does to images besides cropping and flipping them.

    randaugment: its arguments; None: without.
    mixing: the op that mixes images; "": without.
    """

    randaugment: tuple[float, ...] | None = None
    mixing: str = ""

    def ops(self, crop: str) -> str:
        """The preprocessing string; `crop` stands for the host ops that come first, if any."""
        found = [crop] if crop else []
        if self.randaugment:
            found.append(f"randaugment({', '.join(map(str, self.randaugment))})")
        found.append("flip")
        if self.mixing:
            found.append(self.mixing)
        return "|".join(found)


AUGREG = {
    "none": Augmentation(),
    "light1": Augmentation((2, 0)),
    "light2": Augmentation((2, 10), "mixup(0.2)"),
    "medium1": Augmentation((2, 15), "mixup(0.2)"),
    "medium2": Augmentation((2, 15), "mixup(0.5)"),
    "strong1": Augmentation((2, 20), "mixup(0.5)"),
    "strong2": Augmentation((2, 20), "mixup(0.8)"),
}


def make_tiny(model: ConfigDict, name: str) -> int:
    """Sets `config.model` to a tiny model of the family of `name`, with tokens as large as its.

    A ResNet, also that of a hybrid, has one unit, if it has any, and half the width.

    Returns the side, in pixels, of images of 2 x 2 tokens.
    """
    family, sizes = find_family(name), find_family(name).parse(name)
    stride, _ = token_stride(name)
    has = field_names(family.module)
    model.name = name
    if "patch_size" in has:
        model.name = f"{name.partition('-')[0]}-mu/{name.rpartition('/')[2]}"
    if "stages" in has:
        model.stem_width = 32
        if sizes["stages"]:
            model.stages = (1,)
            if "patch_size" in has:
                model.patch_size = stride // map_stride(model.stages)
    return 2 * stride


# "Better plain ViT".
BETTER_PLAIN = Augmentation((2, 10), "mixup(0.2)")


def find_augreg(name: str) -> Augmentation:
    """The row of AugReg's table for `name`.

    Raises:
      InputError: if there is none; names the nearest.
    """
    if name not in AUGREG:
        raise InputError(f"augmentation {name!r}: {nearest(name, list(AUGREG))}")
    return AUGREG[name]
