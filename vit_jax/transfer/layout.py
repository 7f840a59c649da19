"""The correspondence between a foreign format's arrays and a model's parameters.

A format lists one `Entry` for each of its arrays; the list serves to read and write files. Errors
name every absent, unknown or misshapen array by its name in the file.
"""

import logging
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import ml_dtypes
import numpy as np
from einops import rearrange

from vit_jax.config import LOSSES
from vit_jax.errors import InputError
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.transfer.common import refuse
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

logger = logging.getLogger("vit_jax")

_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
_SHOWN = 8  # maximum number of unknown arrays in an error message; the others are counted


class Entry(NamedTuple):
    """One array of a foreign file and the parameters in it.

    theirs: the array's name in the file.
    ours: the names of the parameters in the unrolled model.
    read: array -> parameters, in the order of `ours`.
    write: parameters -> array.
    """

    theirs: str
    ours: tuple[str, ...]
    read: Callable[[np.ndarray], Sequence[np.ndarray]]
    write: Callable[..., np.ndarray]


def same(theirs: str, ours: str) -> Entry:
    """An array that is stored unchanged."""
    return Entry(theirs, (ours,), lambda a: (a,), lambda a: a)


def transposed(theirs: str, ours: str) -> Entry:
    """A matrix stored as (outputs, inputs)."""
    return Entry(theirs, (ours,), lambda a: (a.T,), lambda a: a.T)


def joined(entry: Callable[[str, str], Entry], theirs: str, ours: Sequence[str]) -> Entry:
    """Several parameters, each stored as by `entry`, concatenated on the first axis."""
    parts = [entry(theirs, name) for name in ours]

    def read(array):
        pieces = np.split(array, len(parts))
        return [part.read(piece)[0] for part, piece in zip(parts, pieces, strict=True)]

    def write(*params):
        return np.concatenate([part.write(p) for part, p in zip(parts, params, strict=True)])

    return Entry(theirs, tuple(ours), read, write)


def rearranged(theirs: str, ours: str, pattern: str, **sizes: int) -> Entry:
    """An array that is rearranged by the einops `pattern` "theirs -> ours"."""
    their_axes, our_axes = pattern.split(" -> ")
    return Entry(
        theirs,
        (ours,),
        lambda a: (rearrange(a, pattern, **sizes),),
        lambda a: rearrange(a, f"{our_axes} -> {their_axes}", **sizes),
    )


def torch_linear(theirs: str, ours: str, bias: bool = True) -> list[Entry]:
    """The entries of a dense layer in PyTorch's form."""
    entries = [transposed(f"{theirs}.weight", f"{ours}/kernel")]
    return entries + [same(f"{theirs}.bias", f"{ours}/bias")] * bias


def torch_norm(theirs: str, ours: str) -> list[Entry]:
    """The entries of a LayerNorm in PyTorch's form."""
    return [same(f"{theirs}.weight", f"{ours}/scale"), same(f"{theirs}.bias", f"{ours}/bias")]


def torch_patches(theirs: str, patch_size: tuple[int, int]) -> list[Entry]:
    """The entries of the patch embedding as a convolution with kernel (D, 3, P, Q)."""
    p, q = patch_size
    kernel = rearranged(
        f"{theirs}.weight", "embedding/kernel", "d c p q -> (p q c) d", p=p, q=q, c=3
    )
    return [kernel, same(f"{theirs}.bias", "embedding/bias")]


def read_entries(
    entries: Sequence[Entry], arrays: Mapping[str, np.ndarray], model: nn.Module, source: str
) -> dict[str, np.ndarray]:
    """Read the parameters of the unrolled `model`, and its model state: {leaf name: array}.

    Raises:
      InputError: one error naming every array of `source` that is absent, unknown, not finite, or
        has a wrong shape.
    """
    params = abstract_params(model) | abstract_model_state(model)
    found, faults = {}, []
    for entry in entries:
        if entry.theirs not in arrays:
            faults.append(f"{entry.theirs}: absent")
            continue
        array = arrays[entry.theirs]
        needed = entry.write(*(np.zeros(params[name].shape, np.float32) for name in entry.ours))
        if array.shape != needed.shape:
            faults.append(f"{entry.theirs}: {array.shape}, but needs {needed.shape}")
        elif not np.isfinite(array).all():
            count = array.size - int(np.isfinite(array).sum())
            faults.append(f"{entry.theirs}: {count} of its {array.size} values are not finite")
        else:
            pieces = entry.read(array)
            found |= {name: piece for name, piece in zip(entry.ours, pieces, strict=True)}
    known = {entry.theirs for entry in entries}
    unknown = [name for name in arrays if name not in known]
    faults += [f"{name} {arrays[name].shape}: unknown" for name in unknown[:_SHOWN]]
    faults += [f"{len(unknown) - _SHOWN} more unknown"] * (len(unknown) > _SHOWN)
    refuse(faults, f"init_from={source!r}: looks like a {type(model).__name__}, but is not one")
    return found


def write_entries(
    entries: Sequence[Entry], params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """{name in the file: contiguous float32 array}; the inverse of `read_entries`."""
    return {
        entry.theirs: np.ascontiguousarray(
            entry.write(*(np.asarray(params[name], np.float32) for name in entry.ours))
        )
        for entry in entries
    }


def require(
    arrays: Mapping[str, np.ndarray],
    ranks: Mapping[str, int],
    source: str,
    optional: Mapping[str, int] = types.MappingProxyType({}),
) -> None:
    """Raise InputError if an array needed to infer the model is absent or misshapen.

    `ranks` maps names to numbers of axes; arrays in `optional` may be absent.
    """
    faults = []
    for name, rank in (ranks | optional).items():
        if name not in arrays:
            if name in ranks:
                faults.append(f"{name}: absent")
        elif arrays[name].ndim != rank or 0 in arrays[name].shape:
            faults.append(f"{name}: {arrays[name].shape}, but needs {rank} axes")
    refuse(faults, f"init_from={source!r}: its architecture cannot be inferred")


def count_layers(arrays: Mapping[str, np.ndarray], pattern: str, source: str) -> int:
    """The number of layers; the first group of the regex `pattern` is a layer's index."""
    layers = {int(m[1]) for name in arrays if (m := re.match(pattern, name))}
    if not layers:
        raise InputError(f"init_from={source!r}: it has no layers")
    missing = sorted(set(range(max(layers) + 1)) - layers)
    if missing:
        raise InputError(
            f"init_from={source!r}: layers {', '.join(map(str, missing))} of {max(layers) + 1} are "
            "absent; fetch it again"
        )
    return len(layers)


def without_decoder(
    arrays: Mapping[str, np.ndarray], pattern: str, source: str
) -> dict[str, np.ndarray]:
    """`arrays` without those of a masked autoencoder's decoder, which match the regex `pattern`.

    Their names are logged.
    """
    decoder = [name for name in arrays if re.fullmatch(pattern, name)]
    if decoder:
        logger.info(
            "%s: the decoder of a masked autoencoder is left out (%d arrays): %s",
            source, len(decoder), ", ".join(decoder),
        )  # fmt: skip
    return {name: array for name, array in arrays.items() if name not in decoder}


def heads_by_width(width: int) -> int | None:
    """The number of heads of the published ViTs with that width; None if there are none."""
    return {variant.width: variant.num_heads for variant in VIT_VARIANTS.values()}.get(width)


def as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Convert floating-point weights to float32.

    Raises:
      ValueError: if they are not floating point.
    """
    if not any(array.dtype == np.dtype(d) for d in _FLOATS):
        raise ValueError(f"{name} has dtype {array.dtype}; weights must be floating point")
    return array.astype(np.float32, copy=False)


def check_agreement(stated: Mapping[str, Any], found: Mapping[str, Any], source: str) -> None:
    """Raise InputError if values of a config contradict the arrays."""
    faults = [
        f"{key}={value!r}, but {found[key]!r} in the arrays"
        for key, value in stated.items()
        if key in found and value is not None and value != found[key]
    ]
    refuse(faults, f"init_from={source!r}: its config and its arrays disagree")


def read_stated(
    content: Mapping[str, Any] | None, kinds: Mapping[str, str], source: str
) -> dict[str, Any]:
    """The values of a JSON object without its nulls.

    `kinds` maps keys to KINDS; a key may be absent.

    Raises:
      InputError: naming each value that has the wrong kind for its key.
    """
    stated = {key: value for key, value in (content or {}).items() if value is not None}
    faults = [
        f"{key}={stated[key]!r}: needs {kind}"
        for key, kind in kinds.items()
        if key in stated and not KINDS[kind](stated[key])
    ]
    refuse(faults, f"init_from={source!r}: its JSON file")
    return stated


def int_or_pair(size: tuple[int, int]) -> int | list[int]:
    """(height, width) for a JSON file: one number if they are equal, else a list."""
    return size[0] if size[0] == size[1] else list(size)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive int": lambda value: type(value) is int and value > 0,
    "a positive number": lambda value: _is_number(value) and value > 0,
    "a share above 0, at most 1": lambda value: _is_number(value) and 0 < value <= 1,
    "bilinear or bicubic": lambda value: value in ("bilinear", "bicubic"),
    "center or squash": lambda value: value in ("center", "squash"),
    "true or false": lambda value: type(value) is bool,
    "text": lambda value: isinstance(value, str),
    "softmax or sigmoid": lambda value: value in list(LOSSES),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "three numbers": lambda value: (
        isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))
    ),
    "three positive numbers": lambda value: (
        KINDS["three numbers"](value) and all(number > 0 for number in value)
    ),
}
