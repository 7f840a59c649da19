"""Checks of the model fields that a user may set.

Importing this module loads no family, so every family may import it.
"""

import functools
import inspect
import types
import typing
from numbers import Integral, Real
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base.errors import InputError, collect_faults, nearest
from vit_jax.config import image_hw

DTYPES = ("float32", "bfloat16")

FROM_1, POSITIVE, RATE = "[1, inf)", "(0, inf)", "[0, 1)"

# The declarations of fields that several families have, but for the default: arguments of `key`.
Declaration = dict[str, Any]
DROPOUT: Declaration = {"meaning": "rate, rounded to 1/256", "within": RATE}
HEAD_BIAS: Declaration = {"meaning": "initial bias of the last linear layer"}
NORM_EPS: Declaration = {"meaning": "epsilon of the norms", "within": POSITIVE}
NUM_CLASSES: Declaration = {"meaning": "of the head; None: no head", "within": FROM_1}
REMAT: Declaration = {
    "meaning": "what the backward pass recomputes", "choices": ("none", "dots", "full")
}  # fmt: skip
SCAN: Declaration = {"meaning": "one scan over the layers, which compiles faster"}
STAGES: Declaration = {"meaning": "ResNet: units per stage"}
STEM_WIDTH: Declaration = {"meaning": "ResNet: channels of the root", "within": FROM_1}
STOCHASTIC_DEPTH: Declaration = {
    "meaning": "rate in the last layer; grows linearly from 0", "within": RATE
}  # fmt: skip

# The behaviour of a model that lacks one of these fields.
WITHOUT: dict[str, Any] = {
    "dtype": "float32", "remat": "none", "remat_layers": None, "scan": False, "channels": 3,
    "keep_tokens": 1.0, "max_tokens": None, "pack": None,
}  # fmt: skip
_NOT_CHOSEN = ("num_classes", "image_size", "max_tokens", "pack", "ops", "constrain")
_NOTHING = object()  # equals no value
_LISTS = {
    "stages": "the units of each stage, e.g. (3, 4, 6, 3)",
    "stem_channels": "the channels of each convolution, e.g. (24, 48, 96, 192)",
}


def field_names(module: type[nn.Module]) -> list[str]:
    """The names of a module's fields, without Flax's own."""
    return [f for f in inspect.signature(module).parameters if f not in ("parent", "name")]


def field_defaults(module: type[nn.Module]) -> dict[str, Any]:
    """{field: default} for the fields of a module that have one."""
    parameters = inspect.signature(module).parameters
    defaults = {f: parameters[f].default for f in field_names(module)}
    return {f: value for f, value in defaults.items() if value is not inspect.Parameter.empty}


_KINDS = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an int", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    type(None): ("None", lambda value: value is None),
}


@functools.cache
def _kinds_of_fields(module: type[nn.Module]) -> dict[str, tuple[type, ...]]:
    """{field: the types it accepts}, for fields whose accepted types are all in _KINDS."""
    hints, kinds = typing.get_type_hints(module), {}
    for name in field_names(module):
        is_union = typing.get_origin(hints[name]) in (typing.Union, types.UnionType)
        accepted = typing.get_args(hints[name]) if is_union else (hints[name],)
        if all(kind in _KINDS for kind in accepted):
            kinds[name] = accepted
    return kinds


def check_fields(module: type[nn.Module], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`fields` converted for the family's `module`: sizes to pairs, the name of a dtype to it.

    A family that lacks a field of `WITHOUT` accepts the value that describes it anyway.

    Raises:
      InputError: prefixed with `where`; names all fields that the family lacks, or all values of
        a wrong type.
    """
    known, family = field_names(module), module.__name__
    fields = {f: v for f, v in fields.items() if f in known or v != WITHOUT.get(f, _NOTHING)}
    to_choose = [f for f in known if f not in _NOT_CHOSEN]
    collect_faults(
        [
            f"{f}: {family} has no such field; leave it at None; {nearest(f, to_choose)}"
            for f in fields
            if f not in known
        ],
        where,
    )
    checked = dict(fields)
    kinds = _kinds_of_fields(module)  # type: ignore[arg-type] # mypy wants a hash of instances
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
    for name in fields.keys() & _LISTS.keys():
        if not isinstance(fields[name], list | tuple):
            raise InputError(f"{name}={fields[name]!r}: needs {_LISTS[name]}")
        checked[name] = tuple(fields[name])
    if "dtype" in fields:
        dtype = fields["dtype"]
        if dtype not in DTYPES and dtype not in [jnp.dtype(known) for known in DTYPES]:
            raise InputError(f"dtype={dtype!r}: known: {', '.join(DTYPES)}")
        checked["dtype"] = jnp.dtype(dtype)
    return checked


def check_image_shape(
    shape: tuple[int, ...], image_size: tuple[int, int] | None, channels: int = 3
) -> None:
    """Raise InputError if `shape` is not (B, H, W, channels) with `image_size` (None: any)."""
    if shape[1:] != (*(image_size or shape[1:3]), channels):
        raise InputError(
            f"images of shape {shape}: this model needs (B, H, W, {channels}) with "
            f"image_size={image_size}; resize them, or the model (image_size=)"
        )


def find_undivided(
    image_size: tuple[int, ...], patch_size: tuple[int, int], stride: tuple[int, int]
) -> list[str]:
    """One fault for each side of the image that is no multiple of the token stride in pixels."""
    faults = []
    on_map, remedy = "", "a divisor of it, or "
    if stride != patch_size:  # a hybrid: the patches divide a feature map, not the image
        on_map, remedy = f", a token every {stride} pixels", ""
    for axis, side, patch in zip(("height", "width"), image_size, stride, strict=True):
        if side % patch:
            below, above = side // patch * patch, (side // patch + 1) * patch
            fits = f"{below} or {above}" if below else str(above)
            faults.append(
                f"patch_size={patch_size}{on_map}: {patch} does not divide the image's {axis} "
                f"{side}; choose {remedy}image_size with {axis} {fits}"
            )
    return faults
