"""Arrays whose parts are read, or computed, when they are asked for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A float32 array that is not in memory: NumPy reads all of it, and a slice reads a part.

    read: a slice for each axis -> the part.
    agreed: whether all processes of the job are known to read the same numbers.
    of: the array whose layer this is; None: it is no layer.
    """

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]
    agreed: bool = False
    of: "Lazy | None" = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[()], np.float32 if dtype is None else dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) for part in index):
            return np.asarray(self)[index]
        return self.read((*index, *(slice(None),) * (len(self.shape) - len(index))))

    def layer(self, i: int) -> "Lazy":
        """self[i], without reading it."""

        def read(index: tuple[slice, ...]) -> np.ndarray:
            return self.read((slice(i, i + 1), *index))[0]

        return Lazy(self.shape[1:], read, self.agreed, self)


def stack(layers: Sequence[np.ndarray | Lazy]) -> Lazy:
    """The arrays along a new first axis; of all layers of an array, in order, that array."""
    whole = layers[0].of if isinstance(layers[0], Lazy) else None
    of_whole = [isinstance(layer, Lazy) and layer.of is whole for layer in layers]
    if whole and all(of_whole) and len(layers) == whole.shape[0]:
        return whole

    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([layer[index[1:]] for layer in layers[index[0]]])

    agreed = all(isinstance(layer, Lazy) and layer.agreed for layer in layers)
    return Lazy((len(layers), *layers[0].shape), read, agreed)
