"""Model families: one file and one entry in MODELS each."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
from ml_collections import ConfigDict

from vit_jax.base.errors import Faults, InputError, nearest
from vit_jax.config import image_hw, model_fields
from vit_jax.models.axial import AXIAL_NAMES, AxialViT
from vit_jax.models.bit import BIT_NAMES, BiT, bit_fields
from vit_jax.models.contract import Model, about, field_names
from vit_jax.models.deit import DEIT_NAMES, DeiT
from vit_jax.models.efficientnet import EFFICIENTNET_NAMES, EfficientNet, efficientnet_fields
from vit_jax.models.fields import check_fields, field_defaults
from vit_jax.models.hybrid import HYBRID_NAMES, HybridViT, hybrid_fields
from vit_jax.models.resnet import STEM_WIDTH, map_stride
from vit_jax.models.t2t import T2T_NAMES, T2TViT, t2t_fields
from vit_jax.models.variants import VIT_NAMES, VIT_VARIANTS, vit_fields
from vit_jax.models.vit import ViT


class Family(NamedTuple):
    """A family of models.

    module: the Flax module class.
    parse: a function from a model's name to the module's fields.
    names: the models of the papers; the family's grammar may allow more.
    """

    module: type[nn.Module]
    parse: Callable[[str], dict[str, Any]]
    names: tuple[str, ...]


# Keyed by the start of a model's name; for hybrids without the ResNet's number of layers.
MODELS = {
    "ViT": Family(ViT, vit_fields, VIT_NAMES),
    "DeiT": Family(DeiT, vit_fields, DEIT_NAMES),
    "T2T": Family(T2TViT, t2t_fields, T2T_NAMES),
    "Axial": Family(AxialViT, vit_fields, AXIAL_NAMES),
    "R+ViT": Family(HybridViT, hybrid_fields, HYBRID_NAMES),
    "BiT": Family(BiT, bit_fields, BIT_NAMES),
    "EfficientNet": Family(EfficientNet, efficientnet_fields, EFFICIENTNET_NAMES),
}


def create_model(
    name: str,
    num_classes: int | None = 1000,
    image_size: int | Sequence[int] | None = 224,
    **fields,
) -> nn.Module:
    """Make the model called `name`, with the sizes of its paper.

        model = create_model("ViT-B/16", num_classes=10, image_size=(32, 48), pool="gap")
        variables = model.init(jax.random.key(0), jnp.zeros((1, 32, 48, 3)))
        logits = model.apply(variables, images)  # images (B, 32, 48, 3), float32

    Args:
      name: family, variant and patch size, e.g. "ViT-Ti/16" or "R50+ViT-B/16"; any patch size is
        allowed. For ResNets: layers and width factor, e.g. "BiT-R50x1"; "EfficientNet-B0".
      num_classes: number of classes; None makes a model without head, which returns the features.
      image_size: height and width in pixels, or one int for both. None accepts images of any size:
        for convolutional networks, and for Transformers with fixed or no positions.
      **fields: any field of the family's module, e.g. `pool`, `scan`, `dtype` (a name or a dtype).

    Raises:
      InputError: the name or a field is unknown, or values contradict each other.
    """
    family = find_family(name)
    fields = check_fields(family.module, fields, name)
    sizes = {"num_classes": num_classes, "image_size": image_size} | family.parse(name)
    return family.module(**(check_fields(family.module, sizes, name) | fields))


def find_family(name: str) -> Family:
    """The family of the model called `name`, found by the text before the first dash.

    Raises:
      InputError: if no family has that name.
    """
    start, dash, _ = name.partition("-")
    family = MODELS.get(re.sub(r"^R\d+\+", "R+", start)) if dash else None
    if family is None:
        known = [name for family in MODELS.values() for name in family.names]
        hint = translate_name(name) or nearest(name, known)
        raise InputError(f"name={name!r}: no such model; {hint}")
    return family


def fields_of(name: str) -> list[str]:
    """The names of the fields that the model called `name` has.

    Raises:
      InputError: for an unknown name.
    """
    return field_names(find_family(name).module)


def model_of(config: ConfigDict) -> Model:
    """The model of `config`, with one class.

    Raises:
      InputError: as `create_model`.
    """
    fields = model_fields(config)
    return about(create_model(config.model.name, 1, config.data.image_size, **fields))


SIZES = (
    "width", "depth", "mlp_dim", "num_heads", "patch_size", "stages", "stem_width",
    "width_factor", "depth_factor",
)  # fmt: skip


def sizes_of(name: str) -> dict[str, Any]:
    """{field: value} for those of SIZES that the model called `name` has.

    Raises:
      InputError: for an unknown name.
    """
    family = find_family(name)
    sizes = field_defaults(family.module) | check_fields(family.module, family.parse(name), name)
    return {field: sizes.get(field) for field in SIZES if field in field_names(family.module)}


# The families whose names have the form START-VARIANT/PATCH, each with that start.
_ANY_PATCH = {"ViT": "ViT", "DeiT": "DeiT", "Axial": "Axial-ViT"}


def name_of(model: nn.Module) -> str | None:
    """The name of the model with the family and the sizes of `model`; None if there is none."""
    patch = getattr(model, "patch_size", (0, 0))
    for start, family in MODELS.items():
        if family.module is not type(model):
            continue
        names = family.names
        if start in _ANY_PATCH:
            names = tuple(f"{_ANY_PATCH[start]}-{variant}/{patch[0]}" for variant in VIT_VARIANTS)
        for name in names:
            if all(getattr(model, field) == size for field, size in sizes_of(name).items()):
                return name
    return None


_SIZES_ELSEWHERE = {
    "tiny": "Ti", "small": "S", "medium": "M", "base": "B", "large": "L", "so400m": "So400m",
    "huge": "H", "giant": "g", "gigantic": "G", "b": "B", "l": "L", "h": "H",
}  # fmt: skip


def translate_name(name: str) -> str | None:
    """The hint for a name of timm, torchvision or Hugging Face; None if `name` is none of these.

    "vit_base_patch16_224.augreg_in21k", "vit_b_16" and "google/vit-base-patch16-224" are ViT-B/16,
    "tf_efficientnet_b0.ns_jft_in1k" is EfficientNet-B0, "t2t_vit_14" is T2T-ViT-14.
    """
    plain = name.rpartition("/")[2].lower().replace("-", "_")
    match = re.match(r"(?:tf_)?efficientnet_?(b[0-8]|l2)(?:_|\.|$)", plain)
    if match is not None:
        return f"it is called EfficientNet-{match[1].upper()} here"
    match = re.match(r"t2t_vit_(?:t_)?(\d+)(?:_|\.|$)", plain)
    if match is not None and f"T2T-ViT-{match[1]}" in T2T_NAMES:
        return f"it is called T2T-ViT-{match[1]} here"
    match = re.match(r"(vit|deit)3?_([a-z0-9]+)_(?:distilled_)?(?:patch)?(\d+)(?:_|\.|$)", plain)
    if match is None or match[2] not in _SIZES_ELSEWHERE:
        return None
    family = {"vit": "ViT", "deit": "DeiT"}[match[1]]
    if family == "DeiT" and "distilled" not in plain:
        family = "ViT"  # the same network, without the distillation token
    return f"it is called {family}-{_SIZES_ELSEWHERE[match[2]]}/{match[3]} here"


def is_of_family(model: nn.Module, name: str) -> bool:
    """Whether `model` is of the family of the model called `name`."""
    return type(model) is find_family(name).module


def token_stride(name: str) -> tuple[int, int]:
    """Height and width in pixels of the image area behind one token of the model `name`.

    The sides of an image must be multiples of it, except for a BiT or an EfficientNet.

    Raises:
      InputError: for an unknown name.
    """
    family = find_family(name)
    fields = check_fields(family.module, family.parse(name), name)
    fields |= {"num_classes": None, "image_size": None}
    if "pos_embed" in field_names(family.module):
        fields["pos_embed"] = "none"  # then no image size is needed
    return family.module(**fields).token_stride


def tiny_fields(name: str) -> dict[str, Any]:
    """{key of `config.model`: value} of a tiny model with the family and token stride of `name`.

    A ResNet, including the ResNet of a hybrid, keeps at most one unit and half its width; an
    EfficientNet keeps one block in each stage and an eighth of the width of B0; a T2T-ViT gets the
    sizes of the variant mu.

    Raises:
      InputError: for an unknown name.
    """
    has, tiny = fields_of(name), dict[str, Any](name=name)
    if "token_module" in has:
        return tiny | VIT_VARIANTS["mu"]._asdict() | {"token_width": 16}
    if "width_factor" in has:
        return tiny | {"width_factor": 0.125, "depth_factor": 0.1}
    if "patch_size" in has:
        without_patch, _, patch = name.rpartition("/")
        tiny["name"] = f"{without_patch.rpartition('-')[0]}-mu/{patch}"
    if "stages" in has:
        tiny["stem_width"] = STEM_WIDTH // 2
        if find_family(name).parse(name)["stages"]:
            tiny["stages"] = (1,)
            if "patch_size" in has:
                tiny["patch_size"] = token_stride(name)[0] // map_stride((1,))
    return tiny


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Check the section `model` together with `data.image_size`."""
    faults.extend(_find_remat_faults(config))
    sizes = {"data.image_size": config.data.image_size, "model.patch_size": config.model.patch_size}
    given = {key: size for key, size in sizes.items() if size is not None}
    sizes_are_good = all([faults.check(image_hw, size, key) for key, size in given.items()])
    if sizes_are_good and None not in (config.data.image_size, config.model.name):
        size, fields = config.data.image_size, model_fields(config)
        faults.check(create_model, config.model.name, 1, size, prefix="model.", **fields)


def _find_remat_faults(config: ConfigDict) -> list[str]:
    """A fault if `model.remat_layers` would change nothing."""
    layers = config.model.remat_layers
    if layers is None:
        return []
    if config.model.remat in (None, "none"):
        return [
            f"model.remat_layers={layers}: model.remat={config.model.remat} recomputes nothing; "
            "set --config.model.remat=full"
        ]
    if config.model.scan:
        return [
            f"model.remat_layers={layers}: a scan recomputes all layers; set "
            "--config.model.scan=false or --config.model.remat_layers=None"
        ]
    return []
