"""ResNets in published `.npz` files: Big Transfer's models, and the stems of hybrids.

Blocks and units are numbered from 1. A hybrid's GroupNorm leaves are published as (1, 1, 1, C), the
only form that the reference code reads; here (C,) is read too. Some of Big Transfer's files number
their layers (`standardized_conv2d_17`).
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import InputError
from vit_jax.models.bit import BiT
from vit_jax.models.hybrid import HybridViT
from vit_jax.transfer import layout
from vit_jax.transfer.layout import Entry, rearranged, same

_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_HEAD = "resnet/head/conv2d"
_STEM = "conv_root/kernel"


def is_bit(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the arrays have Big Transfer's names."""
    return any(name.startswith("resnet/") for name in arrays)


def is_hybrid(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the arrays include a hybrid's ResNet."""
    return _STEM in arrays


def without_numbers(arrays: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
    """The arrays of a BiT with numbers removed from the names of layers.

    Raises:
      InputError: if two arrays then have the same name.
    """
    found = {}
    for name, array in arrays.items():
        plain = re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+", r"\1", name)
        if plain in found:
            raise InputError(
                f"init_from={source!r}: {name} occurs twice, with different numbers; fetch it again"
            )
        found[plain] = array
    return found


def infer_bit(
    arrays: Mapping[str, np.ndarray], image_size: tuple[int, int] | None, source: str
) -> BiT:
    """The model of a BiT's arrays, which do not determine the image size."""
    layout.require(arrays, {_ROOT: 4}, source, {f"{_HEAD}/kernel": 4})
    has_head = f"{_HEAD}/kernel" in arrays
    return BiT(
        num_classes=arrays[f"{_HEAD}/kernel"].shape[3] if has_head else None,
        image_size=image_size,
        stages=_count_units(arrays, "resnet/", source),
        stem_width=arrays[_ROOT].shape[3],
    )


def infer_stem(arrays: Mapping[str, np.ndarray], source: str) -> dict[str, Any]:
    """The fields of a hybrid that its ResNet's arrays determine."""
    layout.require(arrays, {_STEM: 4}, source)
    return {"stages": _count_units(arrays, "", source), "stem_width": arrays[_STEM].shape[3]}


def _count_units(arrays: Mapping[str, np.ndarray], prefix: str, source: str) -> tuple[int, ...]:
    """The number of units of each block."""
    matches = (re.match(rf"{prefix}block(\d+)/unit(\d+)/", name) for name in arrays)
    found = sorted({(int(m[1]), int(m[2])) for m in matches if m})
    units: dict[int, list[int]] = {}
    for block, unit in found:
        units.setdefault(block, []).append(unit)
    numbered = {"blocks": list(units)} | {f"block{b}'s units": units[b] for b in units}
    for what, numbers in numbered.items():
        if numbers != list(range(1, len(numbers) + 1)):
            raise InputError(
                f"init_from={source!r}: {what} have the numbers {numbers}, but numbers must be "
                "consecutive from 1; fetch it again"
            )
    return tuple(map(len, units.values()))


def fold_norms(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A hybrid's arrays with GroupNorm leaves reshaped to (1, 1, 1, C)."""
    is_norm = re.compile(r"(.*/)?gn(\d|_root|_proj)/(scale|bias)").fullmatch
    return {
        name: array.reshape(1, 1, 1, -1) if is_norm(name) and array.ndim == 1 else array
        for name, array in arrays.items()
    }


def stem_entries(model: HybridViT) -> list[Entry]:
    """The entries of a hybrid's ResNet."""
    entries = [same(_STEM, "stem/conv_root/kernel"), *_flat_norm("gn_root", "stem/norm_root")]
    for theirs, ours, is_first in _units(model.stages, "block{}/unit{}", "stem"):
        for part in ["1", "2", "3", *["_proj"] * is_first]:
            entries.append(same(f"{theirs}/conv{part}/kernel", f"{ours}/conv{part}/kernel"))
            entries += _flat_norm(f"{theirs}/gn{part}", f"{ours}/norm{part}")
    return entries


def bit_entries(model: BiT) -> list[Entry]:
    """The entries of a BiT."""
    entries = [same(_ROOT, "trunk/conv_root/kernel"), *_norm("resnet/group_norm", "trunk/norm")]
    for theirs, ours, is_first in _units(model.stages, "resnet/block{}/unit{:02}", "trunk"):
        for i, part in enumerate("abc", 1):
            entries.append(_conv(f"{theirs}/{part}", f"{ours}/conv{i}"))
            entries += _norm(f"{theirs}/{part}/group_norm", f"{ours}/norm{i}")
        if is_first:
            entries.append(_conv(f"{theirs}/a/proj", f"{ours}/conv_proj"))
    if model.num_classes is not None:
        kernel = rearranged(f"{_HEAD}/kernel", "head/kernel", "h w d c -> (h w d) c", h=1, w=1)
        entries += [kernel, same(f"{_HEAD}/bias", "head/bias")]
    return entries


def _units(stages, their_pattern, our_root):
    """(name in the file, our name, whether it is the first of its stage) for every unit."""
    for stage, depth in enumerate(stages):
        for unit in range(depth):
            ours = f"{our_root}/stage_{stage}/layer_{unit}"
            yield their_pattern.format(stage + 1, unit + 1), ours, unit == 0


def _conv(theirs: str, ours: str) -> Entry:
    return same(f"{theirs}/standardized_conv2d/kernel", f"{ours}/kernel")


def _norm(theirs: str, ours: str) -> list[Entry]:
    return [same(f"{theirs}/gamma", f"{ours}/scale"), same(f"{theirs}/beta", f"{ours}/bias")]


def _flat_norm(theirs: str, ours: str) -> list[Entry]:
    pattern, ones = "x y z c -> (x y z c)", {"x": 1, "y": 1, "z": 1}
    return [
        rearranged(f"{theirs}/{leaf}", f"{ours}/{leaf}", pattern, **ones)
        for leaf in ("scale", "bias")
    ]
