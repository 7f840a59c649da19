"""Model families: one file and one line in MODELS each."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
from ml_collections import ConfigDict

from vit_jax.config import image_hw, model_fields
from vit_jax.errors import Faults, InputError, nearest
from vit_jax.models.bit import BIT_NAMES, BiT, bit_fields
from vit_jax.models.deit import DEIT_NAMES, DeiT
from vit_jax.models.fields import check_fields, field_names
from vit_jax.models.hybrid import HYBRID_NAMES, HybridViT, hybrid_fields
from vit_jax.models.variants import VIT_NAMES, vit_fields
from vit_jax.models.vit import ViT


class Family(NamedTuple):
    """The models of one kind.

    module: its class.
    parse: name -> the fields of the module that it stands for.
    names: those of the papers; a family's grammar may allow more.
    """

    module: type[nn.Module]
    parse: Callable[[str], dict[str, Any]]
    names: tuple[str, ...]


# By what a model's name begins with; of a hybrid without the layers of its ResNet.
MODELS = {
    "ViT": Family(ViT, vit_fields, VIT_NAMES),
    "DeiT": Family(DeiT, vit_fields, DEIT_NAMES),
    "R+ViT": Family(HybridViT, hybrid_fields, HYBRID_NAMES),
    "BiT": Family(BiT, bit_fields, BIT_NAMES),
}


def create_model(
    name: str,
    num_classes: int | None = 1000,
    image_size: int | Sequence[int] | None = 224,
    **fields,
) -> nn.Module:
    """Makes the model called `name`, with the sizes of its paper.

        model = create_model("ViT-B/16", num_classes=10, image_size=(32, 48), pool="gap")
        variables = model.init(jax.random.key(0), jnp.zeros((1, 32, 48, 3)))
        logits = model.apply(variables, images)  # images (B, 32, 48, 3), float32

    Args:
      name: family, variant and patch size, e.g. "ViT-Ti/16" or "R50+ViT-B/16"; any patch size.
        Of ResNets layers and width: "BiT-R50x1".
      num_classes: None for a model without head, which gives the features.
      image_size: height and width in pixels; an int for both. None: images of any size, as of a
        ResNet, or of a Transformer whose positions are fixed or none.
      **fields: any field of the family's module, e.g. `pool`, `scan`, `dtype` (a name or a dtype).

    Raises:
      InputError: unknown name or field, or values that do not go together.
    """
    family = find_family(name)
    fields = check_fields(family.module, fields, name)
    own = check_fields(family.module, family.parse(name), name)
    sizes = {"num_classes": num_classes, "image_size": image_size}
    return family.module(**(check_fields(family.module, sizes, name) | own | fields))


def find_family(name: str) -> Family:
    """The family of the model called `name`, by what stands before the first dash.

    Raises:
      InputError: if there is none.
    """
    family, dash, _ = name.partition("-")
    found = MODELS.get(re.sub(r"^R\d+\+", "R+", family)) if dash else None
    if found is None:
        known = [name for family in MODELS.values() for name in family.names]
        raise InputError(f"name={name!r}: no such model; {nearest(name, known)}")
    return found


def token_stride(name: str) -> tuple[int, int]:
    """Height and width in pixels of what a token of the model called `name` stands for.

    Those of an image must be multiples of it, but for a BiT.

    Raises:
      InputError: for an unknown name.
    """
    family = find_family(name)
    fields = check_fields(family.module, family.parse(name), name)
    fields |= {"num_classes": None, "image_size": None}
    if "pos_embed" in field_names(family.module):
        fields["pos_embed"] = "none"  # so that it needs no image size
    return family.module(**fields).token_stride


def check_config(config: ConfigDict, faults: Faults) -> None:
    """Checks the section `model` with `data.image_size`."""
    sizes = {"data.image_size": config.data.image_size, "model.patch_size": config.model.patch_size}
    given = {key: size for key, size in sizes.items() if size is not None}
    sizes_are_good = all([faults.check(image_hw, size, key) for key, size in given.items()])
    if sizes_are_good and None not in (config.data.image_size, config.model.name):
        size, fields = config.data.image_size, model_fields(config)
        faults.check(create_model, config.model.name, 1, size, prefix="model.", **fields)
