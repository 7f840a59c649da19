"""Tables of names: what a format calls the parameters of a model, and how it stores them.

A format lists its arrays once, as rows of a table; files are read and written by it. A row counts
for the models that have its parameters. A row with fields, such as {i}, is repeated with the
numbers of each layer.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import numpy as np
from einops import rearrange

from vit_jax.base.lazy import Lazy
from vit_jax.config import POSITIONS
from vit_jax.models.variants import VIT_VARIANTS
from vit_jax.transfer.shapes import abstract_model_state, abstract_params
from vit_jax.transfer.source import Source
from vit_jax.transfer.tensors import let_go

M = TypeVar("M", bound=nn.Module)

# The numbers of heads of the published ViTs.
HEADS_BY_WIDTH = {variant.width: variant.num_heads for variant in VIT_VARIANTS.values()}
_SHOWN = 8  # maximum number of unknown arrays in an error message; the others are counted


class Row(NamedTuple):
    """One array of a foreign file and the parameters in it.

    theirs: the array's name in the file.
    ours: the names of the parameters in the unrolled model; several are concatenated along the
      first axis of the file's array.
    axes: einops pattern "ours -> theirs" of each parameter, or one for all; "" if it is stored
      unchanged.
    """

    theirs: str
    ours: tuple[str, ...]
    axes: str | tuple[str, ...] = ""

    @property
    def _all_axes(self) -> tuple[str, ...]:
        return (self.axes,) * len(self.ours) if isinstance(self.axes, str) else self.axes

    def numbered(self, numbers: Mapping[str, Any]) -> "Row":
        """This row for the layer with these `numbers`."""
        ours = tuple(name.format(**numbers) for name in self.ours)
        return self._replace(theirs=self.theirs.format(**numbers), ours=ours)

    def read(self, array: np.ndarray, sizes: Mapping[str, int]) -> list[np.ndarray]:
        """The parameters in `array`."""
        parts = np.split(array, len(self.ours)) if len(self.ours) > 1 else [array]
        turned = (" -> ".join(reversed(axes.split(" -> "))) for axes in self._all_axes)
        return [_rearranged(*pair, sizes) for pair in zip(parts, turned, strict=True)]

    def write(self, params: Sequence[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
        """The array that holds `params`."""
        parts = [_rearranged(*pair, sizes) for pair in zip(params, self._all_axes, strict=True)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _rearranged(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    known = {axis: size for axis, size in sizes.items() if re.search(rf"\b{axis}\b", pattern)}
    return rearrange(array, pattern, **known) if pattern.strip(" ->") else array


def row(theirs: str, ours: str, axes: str = "") -> Row:
    """A row for one parameter."""
    return Row(theirs, (ours,), axes)


def joined(theirs: str, ours: Sequence[str], axes: Sequence[str]) -> Row:
    """A row for several parameters, each with its own axes."""
    return Row(theirs, tuple(ours), tuple(axes))


def layer(leaves: Mapping[str, tuple[str, str]]) -> Callable[..., list[Row]]:
    """A kind of layer: (its name in the file, its name here or several joined) -> its rows.

    `leaves` is {end of the name in the file: (parameter, axes)}.
    """

    def rows(theirs: str, *ours: str) -> list[Row]:
        return [
            Row(theirs + end, tuple(f"{name}/{leaf}" for name in ours), axes)
            for end, (leaf, axes) in leaves.items()
        ]

    return rows


# Layers in PyTorch's form. A patch embedding is a convolution there.
LINEAR = layer({".weight": ("kernel", "i o -> o i"), ".bias": ("bias", "")})
NORM = layer({".weight": ("scale", ""), ".bias": ("bias", "")})
PATCHES = layer({".weight": ("kernel", "(p q c) d -> d c p q"), ".bias": ("bias", "")})


def layers_of(model: nn.Module) -> list[dict[str, int]]:
    """The numbers of each layer: {i} of a Transformer, the numbers of each unit of a ResNet.

    Files count blocks and units of a ResNet from 1.
    """
    layers = [{"i": i} for i in range(getattr(model, "depth", 0))]
    for stage, depth in enumerate(getattr(model, "stages", ())):
        layers += [
            {"stage": stage, "block": stage + 1, "layer": i, "unit": i + 1} for i in range(depth)
        ]
    return layers


def rows_of(
    table: Iterable[Row], model: nn.Module, layers: Sequence[Mapping[str, Any]] | None = None
) -> list[Row]:
    """The rows of `table` that `model` has; `layers` are `layers_of(model)` by default."""
    leaves = {**abstract_params(model), **abstract_model_state(model)}
    layers = layers_of(model) if layers is None else layers
    found: list[Row] = []
    for fields, rows in itertools.groupby(table, lambda row: {*re.findall(r"{(\w+)", row.theirs)}):
        repeated = list(rows)
        for numbers in (n for n in layers if fields <= n.keys()) if fields else [{}]:
            found += [row.numbered(numbers) for row in repeated]
    return [row for row in found if leaves.keys() >= {*row.ours}]


def _sizes(model: nn.Module) -> dict[str, int]:
    """The sizes of the axes that patterns split: of patches and of heads."""
    p, q = getattr(model, "patch_size", (1, 1))
    return {"p": p, "q": q, "heads": getattr(model, "num_heads", 1), "two": 2}


def read_rows(rows: Sequence[Row], source: Source, model: nn.Module) -> dict[str, np.ndarray]:
    """{leaf name: array} of the parameters and the model state of the unrolled `model`.

    Raises:
      InputError: one error naming every array of `source` that is absent, unknown, not finite, or
        has a wrong shape.
    """
    leaves, sizes = {**abstract_params(model), **abstract_model_state(model)}, _sizes(model)
    found: dict[str, np.ndarray] = {}
    arrays, faults = source.arrays, []
    for row in rows:
        if row.theirs not in arrays:
            faults.append(f"{row.theirs}: absent")
            continue
        array = arrays[row.theirs]
        needed = _shape(row, leaves, sizes)
        if array.shape != needed:
            faults.append(f"{row.theirs}: {array.shape}, but needs {needed}")
        elif not np.isfinite(array).all():
            faults.append(f"{row.theirs}: some of its values are not finite")
        else:
            found |= dict(zip(row.ours, row.read(array, sizes), strict=True))
        let_go(array)
    known = {row.theirs for row in rows}
    unknown = [name for name, array in arrays.items() if name not in known and array.size]
    faults += [f"{name} {arrays[name].shape}: unknown" for name in unknown[:_SHOWN]]
    faults += [f"{len(unknown) - _SHOWN} more unknown"] * (len(unknown) > _SHOWN)
    source.refuse(faults, f"looks like a {type(model).__name__}, but is not one")
    return found


def write_rows(
    rows: Sequence[Row], leaves: Mapping[str, np.ndarray], model: nn.Module
) -> dict[str, Lazy]:
    """{name in the file: float32 array, made when it is asked for}; the inverse of `read_rows`."""
    sizes = _sizes(model)

    def make(row: Row, index: tuple[slice, ...]) -> np.ndarray:
        return row.write([np.asarray(leaves[name], np.float32) for name in row.ours], sizes)[index]

    return {row.theirs: Lazy(_shape(row, leaves, sizes), partial(make, row)) for row in rows}


def _shape(row: Row, leaves: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the row's array for parameters with the shapes of `leaves`."""
    empty = [np.broadcast_to(np.float32(0), leaves[name].shape) for name in row.ours]
    return row.write(empty, sizes).shape


def held(model: nn.Module, family: type[M]) -> M:
    """`model`, which `find_unheld` has found to be of the `family`."""
    assert isinstance(model, family)
    return model


def find_unheld(
    model: nn.Module, families: Sequence[type[nn.Module]], needed: Mapping[str, Sequence]
) -> list[str]:
    """Why a format that holds `families` with {field: values} as in `needed` cannot hold `model`.

    The values of `_NEEDED` hold for fields that `needed` leaves out. Positions must be tables at
    the stem.
    """
    if type(model) not in families:
        family = type(model).__name__
        return [f"it is {'an' if family[0] in 'AEIOU' else 'a'} {family}"]
    as_tables = tuple(name for name in POSITIONS if POSITIONS.find(name).is_table_of_stem())
    needed = {**_NEEDED, "pos_embed": as_tables, **needed}
    found = {f: getattr(model, _AS_FOUND.get(f, f), values[0]) for f, values in needed.items()}
    return [
        f"{field}={found[field]!r}, but the format needs {' or '.join(map(repr, values))}"
        for field, values in needed.items()
        if found[field] not in values
    ]


_NEEDED: dict[str, Sequence] = {
    "channels": (3,), "parallel": (False,), "norm": ("layer",), "qk_norm": (False,),
    "pos_embed_at": ("stem",),
    "registers": (0,), "pre_norm": (False,), "patch_bias": (True,), "key_bias": (True,),
    "gated_mlp": (False,), "mlp_norm": (False,), "rotary": (None,),
    "pool": ("token", "gap", "map"), "gelu": ("tanh", "exact"),
}  # fmt: skip
# The fields may be None, for the default.
_AS_FOUND = {"pos_embed_at": "positions_at", "class_token": "has_class_token"}
