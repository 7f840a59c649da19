"""Hyper-parameter tables of the papers as data, for the files in configs/.

Sources: Dosovitskiy et al. 2020 (arXiv:2010.11929), tables 3 and 4 (appendix B.1), for
`Pretraining` and `FineTuning`; Kolesnikov et al. 2019 (arXiv:1912.11370), section 3.3, for
`HyperRule`; Steiner et al. 2021 (arXiv:2106.10270), section 3, for `AUGREG`;
Beyer et al. 2022 (arXiv:2205.01580) for `BETTER_PLAIN`; Touvron et al. 2020 (arXiv:2012.12877),
table 9, for `DEIT`; He et al. 2021 (arXiv:2111.06377) and the commands in its published code for
`MAE`.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from vit_jax.errors import InputError, nearest
from vit_jax.experiment.finetune_length import BIT_LR, bit_steps, bit_warmup
from vit_jax.models import fields_of, find_family, token_stride
from vit_jax.models.resnet import map_stride
from vit_jax.models.variants import VIT_VARIANTS

# Training and validation split of each data set. The two large sets have no validation split; as
# many images as ImageNet's validation split has are held out of their training split.
SPLITS = {
    "imagenet2012": ("train", "validation"),
    "imagenet21k": ("train[50000:]", "train[:50000]"),
    "jft": ("train[50000:]", "train[:50000]"),
}


class Pretraining(NamedTuple):
    """A row of table 3. Common to all: batch 4096, 10k steps of warm-up, Adam, 224 px.

    epochs: the paper's choices, the usual one first.
    weight_decay: decoupled, multiplied by the current learning rate.
    grad_clip_norm: maximum global norm; None: no clipping.
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
      InputError: if the paper has no such row; lists the rows it has.
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
    """A row of table 4. Common to all: SGD, momentum 0.9, batch 512, cosine, clipping at norm 1.

    steps: length of every run, including those that select the learning rate.
    peak_lrs: the learning rates to choose from.
    dev_percent: share of the training split, taken from its end, that selects the learning rate;
      None: there is nothing to select.
    test_split: the split that results are reported on.
    image_size: height and width of a typical image, in pixels; None: it differs between tasks.
    """

    steps: int
    peak_lrs: tuple[float, ...]
    dev_percent: int | None = None
    test_split: str = "test"
    image_size: tuple[int, int] | None = None

    @property
    def dev_splits(self) -> tuple[str, str]:
        """The splits to train on and to validate on while the learning rate is selected."""
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
VTAB = FineTuning(2_500, (0.01,))  # for each of the 19 tasks, without a search


def find_fine_tuning(data: str) -> FineTuning:
    """The row of table 4 for a data set, given its TFDS name.

    Raises:
      InputError: if there is no such row; suggests the nearest name.
    """
    if data not in FINE_TUNING:
        raise InputError(f"data {data!r}: {nearest(data, list(FINE_TUNING))}")
    return FINE_TUNING[data]


def fine_tuning_size(model: str, *, headline: bool = False) -> int:
    """Side of the training images in pixels: 384, or 512 for the headline results on ImageNet.

    Rounded to the nearest multiple of the model's token stride: 378 and 518 for /14.

    Raises:
      InputError: if there is no such model.
    """
    stride, _ = token_stride(model)
    return round((512 if headline else 384) / stride) * stride


HYPER_RULE_LR = BIT_LR


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


class Augmentation(NamedTuple):
    """Augmentation of a recipe, apart from cropping and flipping.

    randaugment: its arguments; None: not used.
    mixing: the op that mixes images; "": none.
    """

    randaugment: tuple[float, ...] | None = None
    mixing: str = ""

    def ops(self, crop: str) -> str:
        """The preprocessing string; `crop` holds the host ops that come first, if any."""
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
    """Set `config.model` to a tiny model of the family of `name` with the same token stride.

    A ResNet, including the ResNet of a hybrid, keeps at most one unit and half its width; an
    EfficientNet keeps one block in each stage and an eighth of the width of B0; a T2T-ViT gets the
    sizes of the variant mu.

    Returns the side, in pixels, of images with 2 x 2 tokens.
    """
    sizes = find_family(name).parse(name)
    stride, _ = token_stride(name)
    has = fields_of(name)
    model.name = name
    if "token_module" in has:
        model.update(VIT_VARIANTS["mu"]._asdict(), token_width=16)
    elif "patch_size" in has:
        without_patch, _, patch = name.rpartition("/")
        model.name = f"{without_patch.rpartition('-')[0]}-mu/{patch}"
    if "width_factor" in has:
        model.width_factor, model.depth_factor = 0.125, 0.1
    if "stages" in has:
        model.stem_width = 32
        if sizes["stages"]:
            model.stages = (1,)
            if "patch_size" in has:
                model.patch_size = stride // map_stride(model.stages)
    return 2 * stride


class DataEfficient(NamedTuple):
    """A stage of DeiT. Common to both: 3 views of an image, 5 epochs of warm-up, table 9's ops.

    batch_size: a multiple of 6, as pairs of images with 3 views each are mixed.
    lr_at_512: the learning rate at a batch of 512; it grows with the batch.
    """

    image_size: int
    batch_size: int
    epochs: int
    lr_at_512: float
    weight_decay: float
    schedule: str

    @property
    def ops(self) -> str:
        """The preprocessing after the crop."""
        return f"randaugment(2, 9, 0.5)|{self.ops_on_device}"

    @property
    def ops_on_device(self) -> str:
        return "flip|erase(0.25, area_max=0.333)|mixup_or_cutmix(0.8, 1.0)"


# The second is a fine-tuning of the first, by the commands of the published code.
DEIT = {
    "224": DataEfficient(224, 960, 300, 5e-4, 0.05, "cosine"),
    "384": DataEfficient(384, 480, 30, 5e-6, 1e-8, "constant"),
}


class MaskedAutoencoding(NamedTuple):
    """What follows the pretraining of a masked autoencoder.

    epochs, lr_at_256, layer_decay, stochastic_depth: of the fine-tuning; the learning rate is for a
      batch of 256 and grows with the batch.
    linear_epochs: of the linear classifier.
    """

    epochs: int
    lr_at_256: float
    layer_decay: float
    stochastic_depth: float
    linear_epochs: int


MAE = {
    "ViT-B/16": MaskedAutoencoding(100, 5e-4, 0.65, 0.1, 90),
    "ViT-L/16": MaskedAutoencoding(50, 1e-3, 0.75, 0.2, 50),
    "ViT-H/14": MaskedAutoencoding(50, 1e-3, 0.75, 0.3, 50),
}


def make_small_on_cifar10(config: ConfigDict) -> None:
    """Set a ViT of 0.8 million parameters, and CIFAR-10, for runs of minutes on a CPU.

    Training with labels keeps the duration of 1,000 steps; other objectives set their own.
    """
    m, d = config.model, config.data
    m.name, m.dtype, m.pos_embed = "ViT-Ti/4", "float32", "sincos_2d"
    m.width, m.depth, m.mlp_dim, m.num_heads = 128, 4, 512, 4
    m.stochastic_depth = None
    d.name, d.split, d.image_size, d.ops = "cifar10", "train", 32, "decode|pad_crop(4)|flip"
    config.global_batch_size, config.duration = 128, "1000 steps"
    config.schedule.warmup = "100 steps"
    config.log.every, config.checkpoint.every = "50 steps", "500 steps"
    for entry in config.evals.values():
        entry.split, entry.every, entry.ops = "test", "500 steps", "decode"
        entry.batch_size = 500


# "Better plain ViT".
BETTER_PLAIN = Augmentation((2, 10), "mixup(0.2)")


def find_augreg(name: str) -> Augmentation:
    """The row of AugReg's table called `name`.

    Raises:
      InputError: if there is no such row; suggests the nearest name.
    """
    if name not in AUGREG:
        raise InputError(f"augmentation {name!r}: {nearest(name, list(AUGREG))}")
    return AUGREG[name]


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
