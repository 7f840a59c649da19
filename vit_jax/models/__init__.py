"""Model families: one file and one line in MODELS each."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config import image_hw
from vit_jax.errors import InputError, collect_faults, nearest
from vit_jax.models.bit import BIT_NAMES, BiT, bit_fields
from vit_jax.models.deit import DEIT_NAMES, DeiT
from vit_jax.models.hybrid import HYBRID_NAMES, HybridViT, hybrid_fields
from vit_jax.models.variants import vit_fields
from vit_jax.models.vit import VIT_NAMES, ViT


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
DTYPES = ("float32", "bfloat16")


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


def field_names(module: type[nn.Module]) -> list[str]:
    """The fields of a family's module."""
    return [f for f in inspect.signature(module).parameters if f not in ("parent", "name")]


_KINDS = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an int", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    type(None): ("None", lambda value: value is None),
}


@functools.cache
def _kinds_of_fields(module: type[nn.Module]) -> dict[str, tuple[type, ...]]:
    """{field: those of _KINDS that it takes}, of the fields that take no others."""
    hints, kinds = typing.get_type_hints(module), {}
    for name in field_names(module):
        is_union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        found = typing.get_args(hints[name]) if is_union else (hints[name],)
        if all(kind in _KINDS for kind in found):
            kinds[name] = found
    return kinds


def with_known(model: nn.Module, **fields: Any) -> nn.Module:
    """`model` with those of `fields` that its family has."""
    known = field_names(type(model))
    return model.clone(**{name: value for name, value in fields.items() if name in known})


def check_fields(module: type[nn.Module], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`fields` as the family's `module` takes them: pairs for sizes, a dtype for its name.

    Raises:
      InputError: naming `where`: all fields that the family lacks; or a value of a wrong kind.
    """
    known, family = field_names(module), module.__name__
    to_choose = [f for f in known if f not in ("attend", "constrain")]
    collect_faults(
        [
            f"{f}: {family} has no such field; {nearest(f, to_choose)}"
            for f in fields
            if f not in known
        ],
        where,
    )
    checked = dict(fields)
    kinds = _kinds_of_fields(module)
    collect_faults(
        [
            f"{name}={value!r}: needs {' or '.join(_KINDS[kind][0] for kind in kinds[name])}"
            for name, value in fields.items()
            if name in kinds and not any(_KINDS[kind][1](value) for kind in kinds[name])
        ],
        where,
    )
    for size in ("image_size", "patch_size"):
        if size in fields and (fields[size] is not None or size == "patch_size"):
            checked[size] = image_hw(fields[size], size)
    if "stages" in fields:
        if not isinstance(fields["stages"], list | tuple):
            raise InputError(
                f"stages={fields['stages']!r}: needs the units of each stage, e.g. (3, 4, 6, 3)"
            )
        checked["stages"] = tuple(fields["stages"])
    if "dtype" in fields:
        dtype = fields["dtype"]
        if dtype not in DTYPES and dtype not in [jnp.dtype(known) for known in DTYPES]:
            raise InputError(f"dtype={dtype!r}: known: {', '.join(DTYPES)}")
        checked["dtype"] = jnp.dtype(dtype)
    return checked
