"""Safetensors files, in shards where they are large; no more than one array is copied at a time.

Files on disks are mapped: the memory of an array that was read is the disk's cache, which the
system takes back when it is needed.
"""

import json
import math
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from etils import epath
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.serialization import StateDictSplit

from vit_jax.base.errors import InputError
from vit_jax.base.files import is_object, open_for_append, write_whole
from vit_jax.base.lazy import Lazy

WEIGHTS = "model.safetensors"  # in a folder
INDEX = f"{WEIGHTS}.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SHARD_SIZE = "5GB"  # at most in a file, as huggingface_hub has it, unless one array has more
_COUNTER = ".num_batches_tracked"  # an array of each batch norm in PyTorch, without influence
_NUMBERS = (_COUNTER, ".position_ids")  # the positions are 0, 1, 2, ...


def read_tensors(path: epath.Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each array but the counters and numbers.

    Raises:
      ValueError, OSError or SafetensorError: if the file is damaged, or no weights.
    """
    for name, dtype, shape, data in (_stored if is_object(path) else _mapped)(path):
        if name.endswith(_NUMBERS):
            continue
        if dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {dtype}; weights must be floating point")
        yield name, np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def _stored(path: epath.Path) -> Iterator[tuple[str, str, list[int], Any]]:
    """(name, dtype, shape, bytes) of the arrays of an object in a store."""
    for name, entry in safetensors.deserialize(path.read_bytes()):
        yield name, entry["dtype"], entry["shape"], entry["data"]


def _mapped(path: epath.Path) -> Iterator[tuple[str, str, list[int], Any]]:
    """(name, dtype, shape, bytes) of the arrays of a file on a disk."""
    with safetensors.safe_open(os.fspath(path), "np"):  # finds whatever does not fit
        pass
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        yield name, entry["dtype"], entry["shape"], memoryview(content)[first:last]


def shard_names(index: Mapping[str, Any]) -> list[str]:
    """The names of the files in the content of INDEX."""
    return sorted({*map(str, index.get("weight_map", {}).values())})


def let_go(array: np.ndarray) -> None:
    """Take the pages of a mapped file out of this process; they are read again when needed."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def share_equal(
    found: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """`found` with the arrays of `known` that have the same name and values, so as to hold one."""
    shared = {}
    for name, array in found.items():
        same = name in known and np.array_equal(array, known[name])
        shared[name] = known[name] if same else array
        let_go(array)
    return shared


def check_size(size: str, key: str) -> None:
    """Raise InputError, naming `key`, unless `size` is one of `write_tensors`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)[KMGT]B", size.upper())
    if found is None or float(found[1]) <= 0:
        raise InputError(f"{key}={size}: needs a size such as 5GB or 500MB")


def write_tensors(
    path: epath.Path,
    arrays: Mapping[str, np.ndarray | Lazy],
    max_shard_size: str | int | None = None,
) -> list[str]:
    """Write arrays in PyTorch's names; return the names of the files.

    A path to WEIGHTS becomes several files and an index if the arrays need more than
    `max_shard_size`, bytes or "500MB"; None: SHARD_SIZE. Files have PyTorch's mark in their
    metadata, which some libraries require, and batch norms the counters that PyTorch expects.
    """
    means = [name for name in arrays if name.endswith(".running_mean")]
    counters = {name.replace(".running_mean", _COUNTER): np.zeros((), np.int64) for name in means}
    all_arrays: dict[str, np.ndarray | Lazy] = {**counters, **dict(sorted(arrays.items()))}
    most = max_shard_size or SHARD_SIZE if path.name == WEIGHTS else sys.maxsize
    stem = path.stem.replace("{", "{{").replace("}", "}}")
    split = _split(all_arrays, most, f"{stem}{{suffix}}{path.suffix}")
    for file, names in split.filename_to_tensors.items():
        parts = _parts({name: all_arrays[name] for name in names})
        open_for_append(path.with_name(file), parts).close()
    if not split.is_sharded:
        return [path.name]
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_whole(path.with_name(INDEX), json.dumps(index, indent=2) + "\n")
    return [INDEX, *split.filename_to_tensors]


def _split(arrays: dict[str, np.ndarray | Lazy], most: int | str, pattern: str) -> StateDictSplit:
    """The names of arrays by file, as transformers divides them."""
    return split_state_dict_into_shards_factory(
        arrays, get_storage_size=_size, filename_pattern=pattern, max_shard_size=most
    )


def _size(array: np.ndarray | Lazy) -> int:
    return math.prod(array.shape) * (array.dtype.itemsize if isinstance(array, np.ndarray) else 4)


def _parts(arrays: Mapping[str, np.ndarray | Lazy]) -> Iterable[bytes | memoryview]:
    """The bytes of a file: the header, then each array, as `safetensors.numpy.save` has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + _size(array)
        dtype = {v: k for k, v in {**DTYPES, "I64": np.int64}.items()}[
            array.dtype.type if isinstance(array, np.ndarray) else np.float32
        ]
        header[name] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        yield np.ascontiguousarray(array).data.cast("B") if math.prod(array.shape) else b""
