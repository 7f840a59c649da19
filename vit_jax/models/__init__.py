"""Model families: one file and one line in MODELS each."""

import inspect
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config import image_hw
from vit_jax.errors import InputError, collect_faults, nearest
from vit_jax.models.deit import DeiT, make_deit
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.models.vit import ViT, make_vit

# What a model's name begins with -> (its module, its maker).
MODELS = {"ViT": (ViT, make_vit), "DeiT": (DeiT, make_deit)}
DTYPES = ("float32", "bfloat16")


def create_model(
    name: str,
    num_classes: int | None = 1000,
    image_size: int | Sequence[int] = 224,
    **fields,
) -> nn.Module:
    """Makes the model called `name`, with the sizes of its paper.

        model = create_model("ViT-B/16", num_classes=10, image_size=(32, 48), pool="gap")
        variables = model.init(jax.random.key(0), jnp.zeros((1, 32, 48, 3)))
        logits = model.apply(variables, images)  # images (B, 32, 48, 3), float32

    Args:
      name: family, variant and patch size, e.g. "ViT-Ti/16"; any patch size.
      num_classes: None for a model without head, which gives the features.
      image_size: height and width in pixels; an int for both.
      **fields: any field of the family's module, e.g. `pool`, `scan`, `dtype` (a name or a dtype).

    Raises:
      InputError: unknown name or field, or values that do not go together.
    """
    family = next((f for f in MODELS if name.startswith(f + "-")), None)
    if family is None:
        known = [f"{f}-{variant}/16" for f in MODELS for variant in VIT_VARIANTS]
        raise InputError(f"name={name!r}: no such model; {nearest(name, known)}")
    module, make = MODELS[family]
    return make(name, num_classes, image_hw(image_size), **check_fields(module, fields, name))


def check_fields(module: type[nn.Module], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`fields` as the family's `module` takes them: pairs for sizes, a dtype for its name.

    Raises:
      InputError: naming `where`: all fields that the family lacks; or a value of a wrong kind.
    """
    known = [f for f in inspect.signature(module).parameters if f not in ("parent", "name")]
    family = module.__name__
    collect_faults(
        [f"{f}: {family} has no such field; {nearest(f, known)}" for f in fields if f not in known],
        where,
    )
    checked = dict(fields)
    for size in ("image_size", "patch_size"):
        if size in fields:
            checked[size] = image_hw(fields[size], size)
    if "dtype" in fields:
        dtype = fields["dtype"]
        if dtype not in DTYPES and dtype not in [jnp.dtype(known) for known in DTYPES]:
            raise InputError(f"dtype={dtype!r}: known: {', '.join(DTYPES)}")
        checked["dtype"] = jnp.dtype(dtype)
    return checked
